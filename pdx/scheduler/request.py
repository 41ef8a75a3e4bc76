"""One request as the scheduler sees it: tokens, how far they are computed, pages, and what comes
next.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field

import msgspec

from pdx.request.batch import PromptScores, ScoredToken
from pdx.request.ids import IdArray
from pdx.request.request import FinishReason, SamplingParams

__all__ = ["PromptScoring", "Request", "RequestState", "RequestUpdate"]


class RequestState(enum.Enum):
    """Where a request stands."""

    #: In the queue; holds no pages.
    WAITING = "waiting"
    #: Holds pages; its prefill was not started here (a decoder waits for a prefiller's writes).
    ADMITTED = "admitted"
    #: Takes part in passes.
    RUNNING = "running"
    #: Finished or aborted; leaves when the pass that carries it ends.
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScoring:
    """Score the prompt's tokens while it is prefilled."""

    #: How many of the most likely tokens to report at each position.
    num_top: int
    #: The token after the prompt as this node knows it, where another node samples.
    next_token_id: int | None = None


@dataclass(slots=True)
class Request:
    """Owned by the scheduler; others read it."""

    request_id: int
    #: Prompt and output so far.
    token_ids: IdArray
    prompt_len: int
    #: None where this node only prefills the request.
    sampling: SamplingParams | None
    scoring: PromptScoring | None = None
    #: Part of what its pages are known by.
    cache_salt: str = ""
    #: The peer that it is for, as a number.
    group: int = 0
    #: Keys of its first pages, as far as they were asked for.
    page_keys: list[bytes] = field(default_factory=list)
    #: The published pages of the first of these, as far as they were looked up, and which
    #: publications they were: a page may have left the cache since.
    found_pages: IdArray = field(default_factory=IdArray)
    found_publications: array[int] = field(default_factory=lambda: array("q"))
    state: RequestState = RequestState.WAITING
    lease_id: int | None = None
    #: Tokens at the front of ``token_ids`` whose KV is in our pages.
    num_computed: int = 0
    #: How many of these another request has computed.
    num_cached: int = 0
    #: Pages at the front that others may share.
    num_published: int = 0
    #: Tokens of the pass that runs now; 0 when it takes no part.
    num_in_pass: int = 0
    #: Passes in which younger ones took of its tokens, less those that made up for them.
    num_passed_over: int = 0
    #: Pages the rank has been told of.
    num_pages_sent: int = 0
    #: The rank knows the request.
    on_rank: bool = False

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def prefill_len(self) -> int:
        """Tokens that are prefilled in chunks. The last one of a request that samples is left to a
        decode step.
        """
        return len(self.token_ids) - (self.sampling is not None)

    @property
    def prefill_done(self) -> bool:
        return self.num_computed >= self.prefill_len

    @property
    def may_share(self) -> bool:
        """Its prefix may come from the cache. To be scored, a prompt must be computed."""
        sampled = self.sampling is not None and self.sampling.prompt_logprobs is not None
        return self.scoring is None and (not sampled or self.output_len > 0)

    @property
    def max_cached_len(self) -> int:
        """The longest prefix that may come from the cache. A prefiller computes one token at least:
        its pass is what ends the prompt.
        """
        return self.prefill_len - (self.sampling is None)

    def max_len(self) -> int:
        """The longest the request can become."""
        return self.prompt_len + (self.sampling.max_tokens if self.sampling else 0)


class RequestUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass did to a request. A prefill-only request ends with ``prefilled``."""

    request_id: int
    token_ids: list[int] = []
    #: One for each of ``token_ids``, where the request asks for log-probabilities.
    logprobs: list[ScoredToken] = []
    prompt_scores: PromptScores | None = None
    finish_reason: FinishReason | None = None
    prefilled: bool = False
