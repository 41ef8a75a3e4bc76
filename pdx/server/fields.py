"""Fields that clients send and that nothing here reads: which of them are taken, and with which
values. OpenAI's, vLLM's and SGLang's names, as of 2026.

A field that would change the answer and is not served is refused by name, unless it has the value
that changes nothing. So a client never gets an answer to another question than it asked.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable

from pdx.errors import InvalidRequest
from pdx.server.refusals import SHOWN_CHARS, shown

__all__ = ["IGNORED_FIELDS", "NEUTRAL_FIELDS", "DroppedFields", "check_neutral", "unknown_field"]

logger = logging.getLogger(__name__)

#: Names that are remembered so that each is warned of once; a client may send any number.
_MAX_REMEMBERED = 256

#: Accepted with any value: they are labels, advice that an engine is free to ignore, or options of
#: something else that is refused (guided decoding, images) and mean nothing without it.
IGNORED_FIELDS = frozenset(
    {
        "custom_labels",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "log_metrics",
        "media_io_kwargs",
        "metadata",
        "mm_processor_kwargs",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "rid",
        "safety_identifier",
        "service_tier",
        "store",
        "truncation_side",
        "use_audio_in_video",
        "user",
    }
)

#: Known fields that are not served, with the values (besides null) that mean the same as leaving
#: them out.
NEUTRAL_FIELDS: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "data_parallel_rank": (),
    "documents": ([],),
    "early_stopping": (False,),
    "ebnf": (),
    "extra_key": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "input_embeds": (),
    "json_schema": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_path": (),
    "modalities": (["text"],),
    "moderation": (),
    "no_stop_trim": (False,),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "regex": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "session_params": ({},),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([],),
    "stream_reasoning": (True,),
    "structural_tag": (),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}


class DroppedFields:
    """Says once of each unknown field that it is dropped. Shared by all requests."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def note(self, name: str) -> None:
        """A request had this field."""
        name = name[:SHOWN_CHARS]
        if name in self._names or len(self._names) >= _MAX_REMEMBERED:
            return
        self._names.add(name)
        logger.warning("requests have the unknown field %s: it is dropped", shown(name))
        if len(self._names) == _MAX_REMEMBERED:
            logger.warning("%d unknown fields were named: no more are", _MAX_REMEMBERED)


def check_neutral(path: str, value: object, neutral: tuple[object, ...]) -> None:
    """Refuse a field that is not served, unless its value changes nothing.

    Raises:
        InvalidRequest: it would; the message has the values that are allowed.
    """
    # In Python False == 0 and True == 1, in an API they are different answers to different
    # questions.
    same = (value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral)
    if value is not None and not any(same):
        allowed = " or ".join(map(shown, (None, *neutral)))
        raise InvalidRequest(
            f"{path} {shown(value)} is not served; leave the field out, or send {allowed}",
            param=path.partition(".")[0],
        )


def unknown_field(path: str, known: Iterable[str]) -> InvalidRequest:
    """The refusal of a field that nobody knows; ``known``: the names that its object may have."""
    parent, _, name = path[:SHOWN_CHARS].rpartition(".")
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        hint = f"did you mean {shown(near[0])}?"
    elif parent:
        hint = f"{parent} may have {', '.join(sorted(known))}"
    else:
        hint = (
            "/openapi.json lists what is taken; a server with --ignore-unknown-fields drops the "
            "rest"
        )
    return InvalidRequest(f"unknown field {shown(path)}; {hint}", param=path.partition(".")[0])
