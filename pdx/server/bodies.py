"""Request bodies, as they come from the client. Pydantic is used here and nowhere else; nothing
here has state.

A field that would change the answer and is not served is refused by name, unless it has the value
that changes nothing. So a client never gets an answer to another question than it asked.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pdx.errors import InvalidRequest

__all__ = ["ChatBody", "CompletionBody", "GenerateBody", "parse_body"]

_SHOWN_CHARS = 80

#: Accepted with any value: they are labels, or advice that an engine is free to ignore.
_IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

#: Known fields that are not served, with the values (besides null) that mean the same as leaving
#: them out.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "cache_salt": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_k": (-1, 0),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    #: Padding against traffic analysis, which OpenAI's clients may ask for. Changes no token.
    include_obfuscation: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


class GenerateBody(BaseModel):
    """What completions and chat completions have in common. None: the client left it out."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    #: Additions to ``_NEUTRAL`` for fields whose meaning depends on the endpoint.
    neutral: ClassVar[dict[str, tuple[object, ...]]] = {}

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None


class CompletionBody(GenerateBody):
    """``POST /v1/completions``."""

    neutral = {"add_special_tokens": (True,), "logprobs": ()}

    #: A text, token ids, or a list of either. Checked by hand: see ``pdx.server.checks``.
    prompt: Any = None


class ChatBody(GenerateBody):
    """``POST /v1/chat/completions``."""

    neutral = {"add_special_tokens": (False,), "logprobs": (False,), "top_logprobs": (0,)}

    messages: list[dict[str, Any]]


BodyT = TypeVar("BodyT", bound=GenerateBody)


def parse_body(raw: bytes, kind: type[BodyT]) -> BodyT:
    """Decode and check the form of a body; the values are checked later.

    Raises:
        InvalidRequest: no JSON, a wrong type, an unknown field, or one that is not served.
    """
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = f"{where}: {first['msg']}" if where else first["msg"]
        raise InvalidRequest(message, param=where.partition(".")[0] or None) from error
    for name, value in (body.model_extra or {}).items():
        _check_extra(name, value, _NEUTRAL | kind.neutral)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest(
            "stream_options is only allowed with stream: true", param="stream_options"
        )
    return body


def _check_extra(name: str, value: object, neutral: dict[str, tuple[object, ...]]) -> None:
    if name in _IGNORED:
        return
    if name not in neutral:
        raise InvalidRequest(f"unknown field {name!r}", param=name)
    # In Python False == 0 and True == 1, in an API they are different answers to different
    # questions.
    same = (value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral[name])
    if value is not None and not any(same):
        allowed = " or ".join(map(_shown, (None, *neutral[name])))
        raise InvalidRequest(
            f"{name} {_shown(value)} is not served; leave the field out, or send {allowed}",
            param=name,
        )


def _shown(value: object) -> str:
    """As the client wrote it, cut to a readable length."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
