"""A model's chat template: messages to the text that the model was trained on. Owns the compiled
template; immutable.

Templates come with the checkpoint and are run in a sandbox, in the dialect that Hugging Face's
templates are written in (trimmed blocks, loop controls, ``raise_exception``, ``tojson``,
``strftime_now``, ``generation`` blocks).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from pdx.errors import CheckpointError, InvalidRequest
from pdx.text.reasoning import THINK_END
from pdx.text.tool_calls import call_form_of

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
#: A template's own code fails in these ways on messages that its author did not think of.
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


#: Variables that pdx fills in itself.
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """A model's compiled template and the special tokens that it may name.

    Some models have a second template for requests with tools: ``tool_source``.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None
    ) -> None:
        tool_source = source if tool_source is None else tool_source
        self._template = _compile(source)
        self._tool_template = self._template if tool_source == source else _compile(tool_source)
        self._special_tokens = dict(special_tokens)
        both = source + tool_source
        #: Tools can be shown to the model.
        self.takes_tools = "tools" in tool_source
        #: How the model writes tool calls; None: in no way that is known here.
        self.call_form = call_form_of(both)
        #: The model thinks between tags (see ``pdx.text.reasoning``).
        self.tags_reasoning = THINK_END in both
        self._knows_calls = "tool_calls" in both
        self._knows_developer = "developer" in both

    @classmethod
    def from_folder(cls, folder: str | Path) -> ChatTemplate | None:
        """The template of a Hugging Face folder, None where the model has none.

        Raises:
            CheckpointError: a file is damaged, or the template does not compile.
        """
        config = _read_json(Path(folder) / "tokenizer_config.json")
        named = _named_templates(config)
        path = Path(folder) / "chat_template.jinja"
        source = path.read_text("utf-8") if path.is_file() else named.get("default")
        if source is None:
            return None
        tokens = _read_json(Path(folder) / "special_tokens_map.json") | config
        return cls(source, _special_tokens(tokens), named.get("tool_use"))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt for the assistant's next message. Messages' contents are strings or lists of
        text parts; ``variables`` are the template's own, such as ``enable_thinking``.

        Raises:
            InvalidRequest: the template refuses these messages (say, two users in a row), or a part
            is no text.
        """
        variables = variables or {}
        for name in variables.keys() & (_RESERVED | self._special_tokens.keys()):
            raise InvalidRequest(
                f"chat_template_kwargs cannot set {name}", param="chat_template_kwargs"
            )
        template = self._tool_template if tools else self._template
        flat = [self._flat(message) for message in messages]

        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            return template.render(
                **self._special_tokens,
                **variables,
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )

        try:
            return _with_either_arguments(render, flat)
        except _TEMPLATE_FAILURES as error:
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {error}", param="messages"
            ) from error

    def _flat(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as templates know them: with a text, and no role of a later date."""
        flat = {**message, **_flat_content(message)}
        if flat.get("content") is None and not self._knows_calls:
            flat["content"] = ""  # it joins contents without looking; others look for None
        if flat.get("role") == "developer" and not self._knows_developer:
            flat["role"] = "system"
        return flat


def _with_either_arguments(
    render: Callable[[Sequence[Mapping[str, Any]]], str], messages: Sequence[Mapping[str, Any]]
) -> str:
    """Most templates want the arguments of earlier tool calls as objects. Some (DeepSeek's) join
    them to a text, which only JSON can be."""
    try:
        return render(messages)
    except TypeError:
        if not any(message.get("tool_calls") for message in messages):
            raise
        return render([_with_text_arguments(message) for message in messages])


def _with_text_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [{**c, "function": _as_text(c["function"])} for c in calls]}


def _as_text(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": _to_json(function["arguments"])}


def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"the chat template does not compile: {error}") from error


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


def _named_templates(config: Mapping[str, Any]) -> dict[str, str]:
    """``chat_template`` is a string, the default, or a list of named templates."""
    found = config.get("chat_template")
    if isinstance(found, list):
        pairs = ((entry.get("name"), entry.get("template")) for entry in found)
        return {name: source for name, source in pairs if isinstance(source, str)}
    return {"default": found} if isinstance(found, str) else {}


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
