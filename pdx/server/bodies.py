"""Request bodies, as they come from the client. Pydantic is used here and nowhere else; nothing
here has state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar, get_args

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from pdx.errors import InvalidRequest
from pdx.server.fields import IGNORED_FIELDS, NEUTRAL_FIELDS, check_neutral, unknown_field
from pdx.server.refusals import no_json, wrong_value

__all__ = [
    "MAX_TEXT_CHARS",
    "MAX_TOKENIZED_LEN",
    "Body",
    "ChatBody",
    "CompletionBody",
    "DetokenizeBody",
    "GenerateBody",
    "TokenizeBody",
    "parse_body",
]

#: Tokens of one text, whether it comes as text or as ids.
MAX_TOKENIZED_LEN = 1 << 20
#: Characters of one text. A run of blanks has few tokens, yet takes about a hundred bytes of memory
#: and a few microseconds for each character; this is about what the longest text of words takes.
MAX_TEXT_CHARS = 6 << 20
_MAX_LOGPROBS = 20
_MAX_STOPS = 32
_MAX_STOP_CHARS = 1024
_PARTS_AT_ONCE = 1 << 15  # even
#: What stands once for each object of a kind, and how many a body may have. Making Python objects
#: holds the GIL, and with it all streams; so many take no longer than reading 16 MiB of text.
_LIMITS = (
    ((b"[", b"{"), 1 << 16, "lists and objects"),
    ((b":",), 1 << 16, "keys"),
    ((b",",), 1 << 20, "values"),
)

#: A text, token ids, or a list of either.
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        },
    ]
}
_MESSAGES_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"type": "string", "examples": ["system", "user", "assistant", "tool"]},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        },
                    },
                ]
            },
        },
    },
}
_TOOLS_SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": {"type": "string", "minLength": 1}},
            },
        },
    },
}
ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_StopString = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARS)]
#: What else a message or a tool may have is the template's business.
_Messages = Annotated[list[dict[str, Any]], WithJsonSchema(_MESSAGES_SCHEMA)]
_Tools = Annotated[list[dict[str, Any]], WithJsonSchema(_TOOLS_SCHEMA)]


class Body(BaseModel):
    """Any body. None: the client left the field out."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    #: Additions to ``NEUTRAL_FIELDS`` for fields whose meaning depends on the endpoint.
    neutral: ClassVar[dict[str, tuple[object, ...]]] = {}

    model: str | None = None


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    #: Padding against traffic analysis, which OpenAI's clients may ask for. Changes no token.
    include_obfuscation: bool | None = None
    #: With ``include_usage``: each chunk tells the usage up to there (vLLM's name).
    continuous_usage_stats: bool | None = None


class GenerateBody(Body):
    """What completions and chat completions have in common."""

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    #: -1 is vLLM's spelling of "all tokens", 0 is SGLang's and transformers'.
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    #: Token ids, as strings, to what is added to their logits.
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = None
    stop: _StopString | Annotated[list[_StopString], Field(max_length=_MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    #: Requests with another one share no KV cache, so that nobody learns by time what others ask.
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class CompletionBody(GenerateBody):
    """``POST /v1/completions``."""

    # No template is rendered and no reasoning is told from the answer.
    neutral = {
        "include_reasoning": (True, False),
        "reasoning_effort": get_args(ReasoningEffort),
        "separate_reasoning": (True, False),
        "stream_reasoning": (True, False),
    }

    #: Checked by hand (see ``pdx.server.checks``), where its length is known to be bearable.
    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)] = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=_MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None


class _Templated(Body):
    """What a chat template is given."""

    messages: _Messages
    tools: _Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatBody(GenerateBody, _Templated):
    """``POST /v1/chat/completions``."""

    neutral = {"add_generation_prompt": (True,), "best_of": (1,), "echo": (False,)}

    #: What the template is told, where it asks.
    reasoning_effort: ReasoningEffort | None = None
    #: False: the reasoning is left out of the answer.
    include_reasoning: bool | None = None
    #: SGLang's names. False: the reasoning is part of the content, or comes in one piece.
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    tool_choice: Annotated[Any, WithJsonSchema({"enum": ["none", "auto", None]})] = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MAX_LOGPROBS)] | None = None


class TokenizeBody(Body):
    """``POST /tokenize``: a text, or messages for the chat template."""

    prompt: str | None = None
    messages: _Messages | None = None
    tools: _Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    tokens: Annotated[list[int], Field(max_length=MAX_TOKENIZED_LEN)]


BodyT = TypeVar("BodyT", bound=Body)


def parse_body(
    raw: bytes, kind: type[BodyT], on_unknown: Callable[[str], None] | None = None
) -> BodyT:
    """Decode and check the form of a body; what depends on the model is checked later.

    Args:
        on_unknown: is given the names of unknown fields, which are dropped; None: they are refused.

    Raises:
        InvalidRequest: no JSON, a wrong type or range, an unknown field, or one that is not served.
    """
    _check_num_objects(raw)
    try:
        # Half as long with the GIL held as pydantic's own reading of JSON.
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise no_json(raw, error) from error
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        raise wrong_value(error, value) from error
    _check_extras(body, NEUTRAL_FIELDS | kind.neutral, "", on_unknown)
    options = getattr(body, "stream_options", None)
    if options is not None:
        _check_extras(options, {}, "stream_options.", on_unknown)
    return body


def _check_extras(
    body: BaseModel,
    neutral: dict[str, tuple[object, ...]],
    prefix: str,
    on_unknown: Callable[[str], None] | None,
) -> None:
    """Look at the fields of an object that its class does not declare. Those of the whole body,
    which has no prefix, may be known all the same."""
    for name, value in (body.model_extra or {}).items():
        if name in neutral:
            check_neutral(prefix + name, value, neutral[name])
        elif not prefix and name in IGNORED_FIELDS:
            continue
        elif on_unknown is not None:
            on_unknown(prefix + name)
        else:
            known = [*type(body).model_fields, *neutral, *(() if prefix else IGNORED_FIELDS)]
            raise unknown_field(prefix + name, known)


def _check_num_objects(raw: bytes) -> None:
    """Refuse what would become millions of objects: it would hold up all streams for seconds."""
    if all(_count(signs, raw) <= most for signs, most, _ in _LIMITS):
        return
    counts = [0] * len(_LIMITS)
    for text in _outside_of_strings(raw):
        for idx, (signs, most, what) in enumerate(_LIMITS):
            counts[idx] += _count(signs, text)
            if counts[idx] > most:
                raise InvalidRequest(f"the body has more than {most} {what}")


def _outside_of_strings(raw: bytes) -> Iterator[bytes]:
    """Every other part between quotes, once escaped ones are gone. A few parts at a time: one split
    of a body with millions of strings would take as long as what it is to prevent.
    """
    rest = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    while rest:
        parts = rest.split(b'"', _PARTS_AT_ONCE)
        rest = parts.pop() if len(parts) > _PARTS_AT_ONCE else b""
        yield b"".join(parts[::2])


def _count(signs: tuple[bytes, ...], text: bytes) -> int:
    return sum(map(text.count, signs))
