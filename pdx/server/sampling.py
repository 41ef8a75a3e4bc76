"""From a request's sampling fields and the checkpoint's recommendations to resolved parameters.
Pure, but for the seeds that it draws where the client gives none.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pdx.errors import CheckpointError, InvalidRequest
from pdx.request.request import SamplingParams
from pdx.request.stream import FrontendConfig
from pdx.server.bodies import GenerateBody
from pdx.text.tokenizer import Tokenizer

__all__ = ["SamplingDefaults", "sampling_of_choices"]

_NUM_SEEDS = 2**64
_T = TypeVar("_T", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What the checkpoint recommends where the client says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_folder(cls, folder: str | Path) -> SamplingDefaults:
        """Read ``generation_config.json``, where there is one and it samples (``do_sample``).

        Raises:
            CheckpointError: the file is damaged, or a value is out of its range.
        """
        path = Path(folder) / "generation_config.json"
        if not path.is_file():
            return cls()
        try:
            config = json.loads(path.read_text("utf-8"))
            if not config.get("do_sample"):
                return cls()
            body = GenerateBody.model_validate(
                {name: config[name] for name in cls.__slots__ if config.get(name) is not None}
            )
        except (AttributeError, ValueError) as error:  # pydantic's errors are ValueErrors
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        return cls(**body.model_dump(include=set(cls.__slots__), exclude_none=True))


def sampling_of_choices(
    body: GenerateBody,
    defaults: SamplingDefaults,
    config: FrontendConfig,
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> list[SamplingParams]:
    """Parameters of each of the ``n`` choices of one prompt. Choice i draws from seed + i.

    Raises:
        InvalidRequest: a token id is outside the vocabulary or has no token; the minimum is above
            the maximum, or cannot be reached because every token stops.
    """
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {min_tokens}, above the most that may be generated, {max_tokens}",
            param="min_tokens",
        )
    client_stops = _check_ids(body.stop_token_ids or (), config, "stop_token_ids")
    stops = (*(() if body.ignore_eos else config.eos_token_ids), *client_stops)
    if min_tokens and not _can_go_on(frozenset(stops), config, tokenizer):
        raise InvalidRequest(
            "min_tokens cannot be reached: stop_token_ids and the model's own stop tokens are all "
            "the tokens there are",
            param="min_tokens",
        )
    logit_bias = _logit_bias(body, config, tokenizer)
    first_seed = secrets.randbits(64) if body.seed is None else body.seed
    return [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=_either(body.temperature, defaults.temperature),
            top_p=_either(body.top_p, defaults.top_p),
            # The client's -1 and 0 both mean all tokens.
            top_k=max(_either(body.top_k, defaults.top_k), 0),
            min_p=_either(body.min_p, defaults.min_p),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=_either(body.repetition_penalty, defaults.repetition_penalty),
            logit_bias=logit_bias,
            min_tokens=min_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            seed=(first_seed + idx) % _NUM_SEEDS,
            stop_token_ids=stops,
        )
        for idx in range(body.n or 1)
    ]


def _either(asked: _T | None, default: _T) -> _T:
    return default if asked is None else asked


def _check_ids(token_ids: Sequence[int], config: FrontendConfig, param: str) -> Sequence[int]:
    for token_id in token_ids:
        if not 0 <= token_id < config.vocab_size:
            raise InvalidRequest(
                f"token id {token_id} is outside the vocabulary of {config.vocab_size}", param=param
            )
    return token_ids


def _can_go_on(stops: frozenset[int], config: FrontendConfig, tokenizer: Tokenizer) -> bool:
    """Some token is no stop token. But for tiny vocabularies the first few ids tell."""
    return any(i not in stops and tokenizer.has_token(i) for i in range(config.vocab_size))


def _logit_bias(
    body: GenerateBody, config: FrontendConfig, tokenizer: Tokenizer
) -> dict[int, float]:
    bias = {}
    for key, value in (body.logit_bias or {}).items():
        # Longer than any id: int() refuses thousands of digits with an error of its own.
        if not (key.isascii() and key.isdecimal() and len(key) < 20):
            raise InvalidRequest(
                f"logit_bias is keyed by token ids, got {key[:80]!r}", param="logit_bias"
            )
        if key != str(int(key)):
            raise InvalidRequest(
                f"logit_bias is keyed by token ids without leading zeros, {int(key)} for {key!r}",
                param="logit_bias",
            )
        bias[int(key)] = value
    _check_ids(tuple(bias), config, "logit_bias")
    tokenless = next((i for i in bias if not tokenizer.has_token(i)), None)
    if tokenless is not None:
        raise InvalidRequest(
            f"token id {tokenless} is padding of the model's vocabulary: it has no token and is "
            "never drawn",
            param="logit_bias",
        )
    return bias
