"""A model's chat template: messages to the text that the model was trained on. Owns the compiled
template; immutable.

Templates come with the checkpoint and are run in a sandbox, in the dialect that Hugging Face's
templates are written in (trimmed blocks, loop controls, ``raise_exception``, ``tojson``,
``strftime_now``, ``generation`` blocks).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from pdx.errors import CheckpointError, InvalidRequest

__all__ = ["ChatTemplate", "flatten_content"]

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class ChatTemplate:
    """One compiled template and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_folder(cls, folder: str | Path) -> ChatTemplate | None:
        """The template of a Hugging Face folder, None where the model has none.

        Raises:
            CheckpointError: a file is damaged, or the template does not compile.
        """
        config = _read_json(Path(folder) / "tokenizer_config.json")
        path = Path(folder) / "chat_template.jinja"
        source = path.read_text("utf-8") if path.is_file() else _default_of(config)
        if source is None:
            return None
        named = _read_json(Path(folder) / "special_tokens_map.json") | config
        return cls(source, _special_tokens(named))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for the assistant's next message. Messages' contents are strings or lists of
        text parts.

        Raises:
            InvalidRequest: the template refuses these messages (say, two users in a row), or a part
            is no text.
        """
        flat = [{**message, **_flat_content(message)} for message in messages]
        try:
            return self._template.render(
                **self._special_tokens,
                messages=flat,
                tools=None,
                documents=None,
                add_generation_prompt=True,
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            # A template's own code fails in these ways on messages that its author did not think
            # of.
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {error}", param="messages"
            ) from error


def flatten_content(parts: Sequence[Any]) -> str:
    """The text of a content given as a list of parts.

    Raises:
        InvalidRequest: a part is not of type "text".
    """
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            raise InvalidRequest(
                f'a content part must be {{"type": "text", "text": ...}}, got type {kind!r}',
                param="messages",
            )
        texts.append(text)
    return "".join(texts)


def _flat_content(message: Mapping[str, Any]) -> dict[str, str]:
    content = message.get("content")
    return {"content": flatten_content(content)} if isinstance(content, list) else {}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return value


def _default_of(config: Mapping[str, Any]) -> str | None:
    """``chat_template`` is a string, or a list of named templates of which "default" is meant."""
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """A token is a string, or an object with its ``content``."""
    tokens = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        content = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja's own filter escapes for HTML, which models have not seen."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's words for training; here it
    is only its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
