"""What the primary sends to a rank for one forward pass, and what comes back.

Batches are deltas: a rank keeps each request's tokens and page table, appends what it samples
itself, and drops a request when told to. So a batch may be sent while the pass before it still
runs.
"""

from __future__ import annotations

import msgspec

from pdx.request.ids import IdArray
from pdx.request.request import SamplingParams

__all__ = [
    "Batch",
    "PromptScores",
    "RequestStart",
    "RequestStep",
    "SampledToken",
    "ScoredToken",
    "StepOutput",
]


class RequestStart(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the rank does not know yet."""

    #: Made by the primary, never reused while the rank knows the request.
    request_id: int
    #: The whole known sequence: the prompt, and after a preemption also the output so far.
    token_ids: IdArray
    #: How many of ``token_ids`` have their KV in the pages already (0 where this node prefills from
    #: the start, ``len(token_ids) - 1`` where a prefiller wrote them).
    num_computed: int
    #: Index of the first output token that this rank would sample (> 0 after a preemption), for
    #: Philox(seed, i).
    first_output_idx: int
    #: None where the request is only prefilled here.
    sampling: SamplingParams | None
    #: Score the prompt's tokens, with this many of the most likely ones; None: do not.
    prompt_logprobs: int | None = None
    #: The token that follows ``token_ids``, which the last position's logits score; None: there is
    #: none to score (this rank samples it).
    next_token_id: int | None = None


class RequestStep(msgspec.Struct, frozen=True, kw_only=True):
    """One request's part in a pass: run the next ``num_tokens`` of its sequence."""

    request_id: int
    num_tokens: int
    #: Pages (indices into the rank's KV memory) appended to the request's page table before the
    #: pass.
    new_page_indices: list[int]
    #: Sample one token from the last position's logits and append it to the sequence.
    sample: bool
    #: Zero the unused tokens of the last page (all layers) before the pass, because the page will
    #: be sent whole.
    zero_last_page: bool = False
    #: A draft may be fed behind the last token, if the rank has one: the pages hold it. Where it is
    #: what is sampled, a second token is sampled behind it.
    may_draft: bool = False


class Batch(msgspec.Struct, frozen=True, kw_only=True, tag="batch"):
    """One forward pass. Steps with one token come first, then longer ones, in the scheduler's
    order.
    """

    #: Rises by one with each batch, from 1. Progress words are absolute: see ``pdx.kv.progress``.
    pass_idx: int
    starts: list[RequestStart]
    steps: list[RequestStep]
    #: Requests to forget, before ``starts`` are added.
    removes: list[int]


class ScoredToken(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A token's log-probability by the raw logits, and the most likely tokens in its place."""

    token_id: int
    logprob: float
    #: (token id, log-probability), most likely first.
    top: list[tuple[int, float]]


class PromptScores(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of a request's prompt tokens from ``first_position`` (1 or later) on."""

    request_id: int
    first_position: int
    tokens: list[ScoredToken]


class SampledToken(msgspec.Struct, frozen=True, kw_only=True):
    """One token that the leader rank drew."""

    request_id: int
    token_id: int
    #: Log-probability of the token by the raw logits (before penalties, bias, temperature, top-p).
    logprob: float
    #: (token id, log-probability) of the most likely ones, where the request asks for them.
    top: list[tuple[int, float]] = []


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, tag="output"):
    """The result of a pass, in the order of its rows: requests that decode, then chunks."""

    pass_idx: int
    #: One for each step that samples, and two where the step's draft was right.
    tokens: list[SampledToken]
    #: Drafts that were fed.
    num_drafts: int = 0
    #: What this pass scored of prompts whose requests ask for it.
    prompt_scores: list[PromptScores] = []
    #: Wall time of the pass in the rank, seconds.
    pass_s: float
