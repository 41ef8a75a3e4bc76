"""What a decoder knows of one client stream besides its tokens: transfers, times, figures for its
timeline.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

import numpy as np

from pdx.errors import RequestError
from pdx.messenger.actions import PrefillTimes
from pdx.messenger.decode_link import Arrival, DecodeLink
from pdx.messenger.messages import ChunkTimes, Prefill
from pdx.metrics.clock import now_s
from pdx.metrics.timeline import LandedShare, PrefillChunk, RequestTimeline
from pdx.request.batch import PromptScores, ScoredToken
from pdx.request.ids import IdArray
from pdx.request.names import RequestNames
from pdx.scheduler.request import Request

__all__ = ["DecodeRequest"]

#: Moments of a transfer that its timeline shows.
_MAX_LANDED = 16


@dataclass(slots=True)
class DecodeRequest:
    """Owned by the decode node's event loop. Times are CLOCK_MONOTONIC seconds."""

    request_id: int
    prompt_len: int
    #: How many alternatives to score the prompt with; None: not asked, or done before a preemption.
    prompt_logprobs_wanted: int | None = None
    #: The ids by which its client knows it.
    names: RequestNames = field(default_factory=RequestNames)
    prompt_logprobs: list[ScoredToken] = field(default_factory=list)
    arrival_s: float = field(default_factory=now_s)
    #: Tokens of the prompt that a prefix cache held, here or on the prefiller.
    num_cached: int = 0
    #: The transfer that runs now, and its link.
    transfer_id: int | None = None
    link: DecodeLink | None = None
    #: The last transfer that was complete.
    arrived_transfer_id: int | None = None
    prefiller: str | None = None
    provider: str | None = None
    same_host: bool = False
    #: Which prefiller was asked last; None: none ever was.
    prefiller_idx: int | None = None
    #: Prefillers that have failed it, and the latest reason.
    failed_prefillers: list[int] = field(default_factory=list)
    last_error: RequestError | None = None
    #: When it first had to wait for a prefiller.
    waiting_since_s: float | None = None
    #: Of the transfer that runs now, and of all that arrived.
    asked_bytes: int = 0
    transfer_bytes: int = 0
    admitted_s: float | None = None
    #: What this node itself prefilled.
    own_chunks: list[ChunkTimes] = field(default_factory=list)
    dispatched_s: float | None = None
    arrived_s: float | None = None
    first_token_s: float | None = None
    output_len: int = 0
    arrival: Arrival | None = None
    times: PrefillTimes | None = None

    def on_admitted(self, num_cached: int) -> None:
        """Its pages are leased. After a preemption that is told of the first time only."""
        if self.admitted_s is None:
            self.admitted_s = now_s()
            self.num_cached = num_cached

    def on_prefix_found(self, num_tokens: int) -> None:
        """The prefiller need not compute the first tokens. Told after a preemption, it is no news
        of the prompt.
        """
        if self.first_token_s is None:
            self.num_cached = max(self.num_cached, num_tokens)

    def on_own_chunk(self, end_position: int, start_s: float, end_s: float) -> None:
        """A pass of this node has computed a part of the prompt."""
        start_ns, end_ns = int(start_s * 1e9), int(end_s * 1e9)
        chunk = ChunkTimes(end_position=end_position, start_ns=start_ns, end_ns=end_ns)
        self.own_chunks.append(chunk)

    def dispatch(
        self, transfer_id: int, prefiller_idx: int, link: DecodeLink, num_bytes: int
    ) -> None:
        """A prefiller is asked for the KV cache."""
        self.transfer_id, self.link = transfer_id, link
        self.prefiller_idx = prefiller_idx
        self.asked_bytes = num_bytes
        self.waiting_since_s = None
        if self.prompt_logprobs_wanted is not None:
            self.prompt_logprobs.clear()  # of a transfer that failed
        self.prefiller, self.provider, self.same_host = link.peer, link.provider, link.same_host
        self.dispatched_s = now_s()

    def prefill_of(
        self,
        sequence: Request,
        pair: tuple[int, int],
        *,
        pages: abc.Sequence[int],
        atoms_by_rank: list[int],
    ) -> Prefill:
        """What to ask the prefiller of the transfer that runs now for: all that the decoder's cache
        lacks, but for the last token.

        Args:
            pair: slot and generation.
            pages: this node's pages from the first lacking position on.
            atoms_by_rank: what each of this node's ranks will count.
        """
        assert self.transfer_id is not None
        return Prefill(
            transfer_id=self.transfer_id,
            token_ids=IdArray(sequence.token_ids[:-1]),
            first_position=sequence.num_cached,
            page_indices=IdArray(pages),
            slot=pair[0],
            generation=pair[1],
            atoms_by_rank=atoms_by_rank,
            prompt_logprobs=self.prompt_logprobs_wanted,
            last_token_id=sequence.token_ids[-1],
            cache_salt=sequence.cache_salt,
            names=self.names,
        )

    def on_lost(self, error: RequestError) -> None:
        """The KV cache will not come from whoever was asked."""
        assert self.prefiller_idx is not None
        self.transfer_id = self.link = None
        self.prefiller = self.provider = None
        self.failed_prefillers.append(self.prefiller_idx)
        self.last_error = error

    def on_own_scores(self, scores: PromptScores) -> None:
        """This node has scored a part of the prompt. A request that was preempted is scored once
        more; its scores go out once.
        """
        if self.first_token_s is None:
            del self.prompt_logprobs[scores.first_position - 1 :]
            self.prompt_logprobs += scores.tokens

    def on_arrived(self, arrival: Arrival) -> None:
        """The KV cache is here."""
        self.arrival = arrival
        self.transfer_bytes += self.asked_bytes
        self.arrived_s = now_s()

    def on_ready(self) -> None:
        """The request starts."""
        self.arrived_transfer_id, self.transfer_id = self.transfer_id, None
        self.link = None

    def take_prompt_logprobs(self) -> list[ScoredToken]:
        """The prompt's scores, once: they go out with the first tokens."""
        scores, self.prompt_logprobs = self.prompt_logprobs, []
        return scores

    def on_tokens(self, num_tokens: int) -> None:
        """The rank has sampled."""
        self.output_len += num_tokens
        if self.first_token_s is None:
            self.first_token_s = now_s()
            self.prompt_logprobs_wanted = None

    def timeline(self) -> RequestTimeline:
        """The finished request's timeline."""
        times = self.times if self.same_host else None
        return RequestTimeline(
            prompt_len=self.prompt_len,
            output_len=self.output_len,
            prefiller=self.prefiller,
            provider=self.provider,
            transfer_bytes=self.transfer_bytes,
            hidden_share=self._hidden_share(),
            admitted_s=self._since(self.admitted_s),
            dispatched_s=self._since(self.dispatched_s),
            prefill_start_s=self._since_ns(times.prefill_start_ns if times else 0),
            last_layer_s=self._since_ns(times.last_layer_ns if times else 0),
            posted_s=self._since_ns(times.posted_ns if times else 0),
            arrived_s=self._since(self.arrived_s),
            first_token_s=self._since(self.first_token_s),
            finished_s=self._since(now_s()),
            num_retries=len(self.failed_prefillers),
            chunks=self._chunks(times),
            landed=self._landed(),
        )

    def _since(self, moment_s: float | None) -> float | None:
        return None if moment_s is None else moment_s - self.arrival_s

    def _since_ns(self, moment_ns: int) -> float | None:
        return moment_ns * 1e-9 - self.arrival_s if moment_ns else None

    def _chunks(self, times: PrefillTimes | None) -> list[PrefillChunk]:
        chunks = [*(times.chunks if times else ()), *self.own_chunks]
        return [
            PrefillChunk(
                end_position=chunk.end_position,
                start_s=chunk.start_ns * 1e-9 - self.arrival_s,
                end_s=self._since_ns(chunk.end_ns),
            )
            for chunk in chunks
        ]

    def _landed(self) -> list[LandedShare]:
        if self.arrival is None or not len(self.arrival.ns):
            return []
        ns, atoms = self.arrival.ns, self.arrival.atoms
        total = int(atoms[-1])
        if len(ns) > _MAX_LANDED:
            picks = np.arange(_MAX_LANDED) * (len(ns) - 1) // (_MAX_LANDED - 1)
            ns, atoms = ns[picks], atoms[picks]
        return [
            LandedShare(at_s=at_ns * 1e-9 - self.arrival_s, share=count / total)
            for at_ns, count in zip(ns.tolist(), atoms.tolist(), strict=True)
        ]

    def _hidden_share(self) -> float | None:
        """Share of the atoms that had been counted when the last layer was done. Atoms are equal in
        size.
        """
        if self.times is None or self.arrival is None or not self.same_host:
            return None
        before = int(np.searchsorted(self.arrival.ns, self.times.last_layer_ns, side="right"))
        counted = int(self.arrival.atoms[before - 1]) if before else 0
        return counted / int(self.arrival.atoms[-1])
