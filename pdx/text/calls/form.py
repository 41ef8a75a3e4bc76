"""What a form of writing tool calls is made of: frozen data, from which calls are read.

A form has a file of its own with one `CallForm`, and a line in `forms.py`. How a form's text is
read follows from the kind of its body: `json_bodies.py` and `parameter_body.py` read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["CallForm", "JsonCall", "NamedJson", "Parameters", "Tags", "ToolCall"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model asks for."""

    name: str
    #: JSON of an object, as the model wrote it wherever it wrote JSON.
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """What stands in front of something and behind it. The first character of a tag occurs in it
    only once."""

    start: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCall:
    """The whole call is a JSON object: ``{"name": NAME, "arguments": {...}}``."""

    name_key: str
    #: The first one that the object has counts; the model was taught the first.
    arguments_keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedJson:
    """``NAME separator {...}``, or where ``is_fenced``, in lines,
    ``function separator NAME fence json {...} fence``. Both are read, whichever is taught: models
    confuse them."""

    separator: str
    fence: str
    is_fenced: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Each argument stands between tags, a text without quotes:
    ``name_start NAME name_end (key_start KEY key_end VALUE value_end)* end``."""

    name_start: str
    name_end: str
    key_start: str
    key_end: str
    value_end: str
    end: str


Body: TypeAlias = JsonCall | NamedJson | Parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How a model writes its calls."""

    name: str
    #: Whether a chat template's source teaches this form.
    is_taught_by: Callable[[str], bool]
    body: Body
    #: Around all calls of an answer; None: the form has no such tags.
    section: Tags | None = None
    #: Around each call. A form that has neither these nor a section is bare: its calls look like
    #: any other JSON.
    call: Tags | None = None
    #: What bare calls may have in front; it goes with the call.
    prefix: str | None = None
    #: Characters between two calls beside white space.
    separators: str = ""

    @property
    def tags(self) -> frozenset[str]:
        """What calls are found by; a tokenizer may have special tokens for it."""
        pairs = [pair for pair in (self.section, self.call) if pair is not None]
        tags = {tag for pair in pairs for tag in (pair.start, pair.end)}
        if isinstance(self.body, NamedJson):
            tags.add(self.body.separator)
        elif isinstance(self.body, Parameters):
            body = self.body
            tags |= {body.name_start, body.key_start, body.value_end, body.end}
        return frozenset(tags)

    @property
    def is_bare(self) -> bool:
        """No tag says where a call begins."""
        return self.section is None and self.call is None
