"""A request's part in a pass, as ranks, messenger and client are told of it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pdx.request.batch import Batch, RequestStart, RequestStep, SampledToken, ScoredToken
from pdx.request.chunk import PrefillChunk
from pdx.request.request import FinishReason, SamplingParams
from pdx.scheduler.request import Request

__all__ = [
    "ScheduledPass",
    "by_request",
    "chunk_of",
    "finish_reason",
    "logprobs_of",
    "start_message",
    "step_of",
]


class ScheduledPass(msgspec.Struct, frozen=True, kw_only=True):
    """A batch for the ranks, and what the messenger needs to know of it."""

    batch: Batch
    chunks: list[PrefillChunk]


def by_request(tokens: Iterable[SampledToken]) -> dict[int, list[SampledToken]]:
    """A pass's tokens of each request, in order."""
    grouped: dict[int, list[SampledToken]] = {}
    for token in tokens:
        grouped.setdefault(token.request_id, []).append(token)
    return grouped


def start_message(request: Request) -> RequestStart:
    """The message that tells a rank of a request before its first pass."""
    return RequestStart(
        request_id=request.request_id,
        token_ids=request.token_ids,
        num_computed=request.num_computed,
        first_output_idx=request.output_len,
        sampling=request.sampling,
        prompt_logprobs=request.scoring.num_top if request.scoring else None,
        next_token_id=request.scoring.next_token_id if request.scoring else None,
    )


def step_of(
    request: Request, num_tokens: int, new_pages: tuple[int, ...], *, may_draft: bool = False
) -> RequestStep:
    """So many tokens of a request in the next pass; ``new_pages`` the rank was not told of."""
    ends_prefill = request.num_computed + num_tokens >= request.prefill_len
    return RequestStep(
        request_id=request.request_id,
        num_tokens=num_tokens,
        new_page_indices=list(new_pages),
        sample=request.sampling is not None and request.prefill_done,
        zero_last_page=request.sampling is None and ends_prefill,
        may_draft=may_draft,
    )


def chunk_of(request: Request, pass_idx: int, page_indices: tuple[int, ...]) -> PrefillChunk:
    """The chunk of a request that the pass which it is in prefills."""
    end = request.num_computed + request.num_in_pass
    return PrefillChunk(
        request_id=request.request_id,
        pass_idx=pass_idx,
        start=request.num_computed,
        end=end,
        last=end >= request.prefill_len,
        page_indices=page_indices,
    )


def finish_reason(request: Request, token_id: int, sampling: SamplingParams) -> FinishReason | None:
    """Why this token is the request's last; None: it is not."""
    if token_id in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if request.output_len >= sampling.max_tokens else None


def logprobs_of(sampled: SampledToken, sampling: SamplingParams) -> list[ScoredToken]:
    """Logprobs of a token, where they are wanted."""
    if sampling.logprobs is None:
        return []
    return [ScoredToken(token_id=sampled.token_id, logprob=sampled.logprob, top=sampled.top)]
