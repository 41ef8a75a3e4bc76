"""A model's chat template: messages to the text that the model was trained on. Owns the compiled
template; immutable.

Templates come with the checkpoint and are run in a sandbox, in the dialect that Hugging Face's
templates are written in (trimmed blocks, loop controls, ``raise_exception``, ``tojson``,
``strftime_now``, ``generation`` blocks).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from pdx.checkpoint.model_files import template_files
from pdx.errors import CheckpointError, InvalidRequest
from pdx.text.calls import call_form_of
from pdx.text.chat_history import Lost, Reading, Shadow, canonical, fold, sample_of
from pdx.text.reasoning import THINK_END

__all__ = ["ChatTemplate"]

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
#: A reading is looked for with about this much work, counted in messages and in stretches of the
#: tools' JSON: a long chat must not be rendered dozens of times.
_MAX_WORK = 40_000
_MIN_TRIES, _MAX_TRIES = 8, 100
_TOOL_CHARS_OF_WORK = 256
_MAX_RENDER_S = 30
_LOOKUPS_PER_LOOK = 256


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
        #: What a request may set: names that the templates read and do not set themselves.
        self.variables = (_variables(source) | _variables(tool_source)) - (
            _RESERVED | self._special_tokens.keys()
        )
        self._knows_developer = "developer" in both

    @classmethod
    def from_folder(cls, folder: str | Path) -> ChatTemplate | None:
        """The template of a Hugging Face folder, None where the model has none.

        Raises:
            CheckpointError: a file is damaged, or the template does not compile.
        """
        folder = Path(folder)
        config = _read_json(folder / "tokenizer_config.json")
        named = _named_templates(folder, config)
        source = named.get("default")
        if source is None:
            return None
        tokens = _read_json(folder / "special_tokens_map.json") | config
        return cls(source, _special_tokens(tokens), named.get("tool_use"))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt for the assistant's next message. Messages are as clients send them, once
        their form is checked; ``variables`` are the template's own, such as ``enable_thinking``.

        The template gets them in the reading that keeps every word and every call, and of several
        the one with the shortest prompt: it is the one without empty turns, without "None", and
        without JSON in JSON.

        Raises:
            InvalidRequest: the template refuses these messages (say, two users in a row) or leaves
                a part of them out in every reading, or a part is no text.
        """
        variables = {k: v for k, v in (variables or {}).items() if v is not None}
        for name in variables.keys() & (_RESERVED | self._special_tokens.keys()):
            raise InvalidRequest(
                f"chat_template_kwargs cannot set {name}", param="chat_template_kwargs"
            )
        history = [self._with_known_role(message) for message in canonical(messages)]
        given = {
            **self._special_tokens,
            **variables,
            "add_generation_prompt": add_generation_prompt,
        }
        with _deadline(len(history)):
            if tools:
                return _rendered(self._tool_template, history, tools, given)
            try:
                return _rendered(self._template, history, None, given)
            except InvalidRequest:
                # Calls of before may be known to the template for tools only.
                if self._tool_template is self._template or not _has_calls(history):
                    raise
                return _rendered(self._tool_template, history, [], given)

    def _with_known_role(self, message: dict[str, Any]) -> dict[str, Any]:
        if message.get("role") == "developer" and not self._knows_developer:
            return {**message, "role": "system"}
        return message


def _has_calls(history: Sequence[Mapping[str, Any]]) -> bool:
    return any("tool_calls" in message or message.get("role") == "tool" for message in history)


def _rendered(
    template: jinja2.Template,
    history: Sequence[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    given: Mapping[str, Any],
) -> str:
    """The prompt in the best reading.

    Raises:
        InvalidRequest: the template refuses or leaves out a part.
    """

    def render(messages: Sequence[dict[str, Any]], reading: Reading) -> str:
        shown = tools if tools is None else reading.tools(tools) or []
        said = {"messages": reading.messages(messages), "tools": shown, "documents": None}
        return template.render({**given, **said})

    try:
        reading, folded = _choose(render, history, tools or ())
        return render(fold(history, folded), reading)
    except _TEMPLATE_FAILURES as error:
        raise InvalidRequest(
            f"the model's chat template refuses the messages: {error}", param="messages"
        ) from error


_Render = Callable[[Sequence[dict[str, Any]], Reading], str]


@dataclass(frozen=True, slots=True)
class _Tried:
    """What came of a reading. Smaller is better."""

    num_lost: int
    num_names_lost: int
    prompt_len: int
    reading: Reading
    lost: tuple[Lost, ...]

    @property
    def rank(self) -> tuple[int, int, int, bool]:
        # JSON is as long as what Python prints of an object.
        is_object = not self.reading.text_arguments
        return self.num_lost, self.num_names_lost, self.prompt_len, is_object


def _choose(
    render: _Render, history: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> tuple[Reading, set[int]]:
    """The reading to take, and the messages to fold into those that follow them.

    Raises:
        InvalidRequest: all readings lose a part of the chat.
    """
    sample = sample_of(history)
    if len(sample) < len(history):
        best = _search(render, sample, Shadow(sample), tools)
        shadow = Shadow(history)
        whole = None if best is None else _try(render, shadow, shadow.messages, best.reading)
        if whole is not None and not whole.num_lost:
            return whole.reading, set()
    else:
        shadow = Shadow(history)
    best = _search(render, history, shadow, tools)
    if best is None or not best.num_lost:
        # Where the template refuses all readings, the plain one says why.
        return (Reading() if best is None else best.reading), set()
    return best.reading, _fold_or_refuse(render, history, shadow, best)


def _search(
    render: _Render,
    history: Sequence[dict[str, Any]],
    shadow: Shadow,
    tools: Sequence[Mapping[str, Any]],
) -> _Tried | None:
    """The best reading that is found; None: the template refuses those that were tried."""
    work = len(history) + len(json.dumps(tools)) // _TOOL_CHARS_OF_WORK + 1
    tries_left = min(_MAX_TRIES, max(_MIN_TRIES, _MAX_WORK // work))
    best: _Tried | None = None
    for group in _readings(history, tools):
        for reading in group[:tries_left]:
            found = _try(render, shadow, shadow.messages, reading)
            if found is not None and (best is None or found.rank < best.rank):
                best = found
        tries_left -= len(group)
        if tries_left <= 0 or (best is not None and not best.lost):
            break
    return best


def _try(
    render: _Render, shadow: Shadow, messages: Sequence[dict[str, Any]], reading: Reading
) -> _Tried | None:
    try:
        text = render(messages, reading)
    except _TEMPLATE_FAILURES:
        return None
    lost = shadow.lost_in(text)
    num_names = sum(one.is_name_only for one in lost)
    return _Tried(len(lost) - num_names, num_names, len(text), reading, tuple(lost))


def _fold_or_refuse(
    render: _Render, history: Sequence[dict[str, Any]], shadow: Shadow, best: _Tried
) -> set[int]:
    """Which messages must be folded so that nothing is lost. Only a system message may: many
    templates know one, in front, and some say it only in the first turn."""
    lost = [one for one in best.lost if not one.is_name_only]
    indices = {one.idx for one in lost}
    if all(history[idx].get("role") == "system" for idx in indices):
        found = _try(render, shadow, fold(shadow.messages, indices), best.reading)
        if found is not None and not found.num_lost:
            return indices
    if not _says_words(render):
        return set()  # it is no template of chats, and nobody can miss anything in its prompt
    first = lost[0]
    what = "the content" if first.call is None else f"the call of {first.call[:80]!r}"
    raise InvalidRequest(
        f"the model's chat template leaves out {what} of messages[{first.idx}] "
        f"(role {history[first.idx].get('role')!r}); send the chat without it, or use another "
        "template",
        param="messages",
    )


def _says_words(render: _Render) -> bool:
    """The words of one question are in its prompt."""
    question = Shadow([{"role": "user", "content": "x"}])
    found = _try(render, question, question.messages, Reading())
    return found is not None and not found.lost


def _readings(
    history: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> Iterator[list[Reading]]:
    """The readings that differ for this chat, in groups. Those of a group differ in how a value is
    given, and the shortest prompt tells which is meant. Between groups the shape of the chat
    changes, and that of the fewest changes is taken."""
    with_calls = [message for message in history if "tool_calls" in message]
    calls = [call for message in with_calls for call in message["tool_calls"]]
    arguments = [call["function"]["arguments"] for call in calls]
    has_results = any(message.get("role") == "tool" for message in history)
    applies = {
        "one_call_each": len(calls) > len(with_calls),
        "words_apart": (has_words := any(message["content"] for message in with_calls)),
        "words_joined": has_words,
        "filled": bool(tools) or has_results,
        "short_ids": bool(calls) or has_results,
        "as_parts": True,
    }
    values: list[list[tuple[str, Any]]] = [
        [("no_content", value) for value in ("", None)] if calls else [],
        [("text_arguments", value) for value in (False, True)] if calls else [],
        [("boxed_arguments", value) for value in (False, True)]
        if any(isinstance(each, str) for each in arguments)
        else [],
    ]
    group = [dict(some) for some in itertools.product(*filter(None, values))]
    shapes = [name for name, does in applies.items() if does]
    for num_changes in range(len(shapes) + 1):
        for names in itertools.combinations(shapes, num_changes):
            if {"words_apart", "words_joined"} <= set(names):
                continue
            changes: dict[str, Any] = dict.fromkeys(names, True)
            yield [Reading(**some, **changes) for some in group]


def _variables(source: str) -> frozenset[str]:
    environment = _environment()
    free = jinja2.meta.find_undeclared_variables(environment.parse(source))
    return frozenset(free - environment.globals.keys())


def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"the chat template does not compile: {error}") from error


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


def _named_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Each template by its name. Files of their own go before what ``tokenizer_config.json`` has,
    where it is a text (the default), an object, or a list of named ones."""
    files = {name: path.read_text("utf-8") for name, path in template_files(folder).items()}
    if files:
        return files
    beside = _read_json(folder / "chat_template.json").get("chat_template")
    found = config.get("chat_template") if beside is None else beside
    if isinstance(found, list):
        entries = [entry for entry in found if isinstance(entry, Mapping)]
        found = {entry.get("name"): entry.get("template") for entry in entries}
    if isinstance(found, Mapping):
        return {name: text for name, text in found.items() if isinstance(text, str)}
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


class _TooSlow(Exception):
    """A template has used up its time. No failure of the template: no other reading is tried."""


class _Clock(threading.local):
    """When the chat that this thread renders must be done."""

    deadline_s = math.inf
    num_lookups = 0


_clock = _Clock()


@contextlib.contextmanager
def _deadline(num_messages: int) -> Iterator[None]:
    """Bound the time that rendering takes: of some templates it grows with the square of the
    chat's length."""
    _clock.deadline_s = time.monotonic() + _MAX_RENDER_S
    try:
        yield
    except _TooSlow:
        raise InvalidRequest(
            f"the model's chat template takes more than {_MAX_RENDER_S} s for the {num_messages} "
            "messages; send fewer",
            param="messages",
        ) from None
    finally:
        _clock.deadline_s = math.inf


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Looks at the clock now and then. Whatever a template does at length, it looks up names."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        _look_at_the_clock()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _look_at_the_clock()
        return super().getitem(obj, argument)


def _look_at_the_clock() -> None:
    _clock.num_lookups += 1
    if _clock.num_lookups % _LOOKUPS_PER_LOOK == 0 and time.monotonic() > _clock.deadline_s:
        raise _TooSlow


def _environment() -> jinja2.Environment:
    environment = _Environment(
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
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )


def _listed(value: object) -> list[Any]:
    """What ``map`` and its like give is no list."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


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
