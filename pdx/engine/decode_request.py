"""What a serving node knows of one client's request besides its tokens: its transfer, times, and
figures for its timeline.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pdx.errors import RequestError
from pdx.messenger.actions import PrefillTimes
from pdx.messenger.decode_link import Arrival
from pdx.messenger.messages import ChunkTimes
from pdx.metrics.clock import now_s
from pdx.metrics.timeline import ChunkSpan, LandedShare, RequestTimeline
from pdx.request.batch import PromptScores, ScoredToken
from pdx.request.names import RequestNames

if TYPE_CHECKING:
    from pdx.engine.prefillers import Prefiller
    from pdx.engine.transfers import Transfer

__all__ = ["DecodeRequest"]

#: Moments of a transfer that its timeline shows.
_MAX_LANDED = 16


@dataclass(slots=True, eq=False)
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
    #: The latest transfer, under way or arrived; None: it needed none yet, or the last was lost.
    transfer: Transfer | None = None
    #: Prefillers that have failed it, and the latest reason.
    failed_prefillers: list[Prefiller] = field(default_factory=list)
    last_error: RequestError | None = None
    #: When it first had to wait for a prefiller.
    waiting_since_s: float | None = None
    #: The size of all transfers that arrived.
    transfer_bytes: int = 0
    admitted_s: float | None = None
    #: What this node itself prefilled.
    own_chunks: list[ChunkTimes] = field(default_factory=list)
    dispatched_s: float | None = None
    arrived_s: float | None = None
    first_token_s: float | None = None
    output_len: int = 0

    @property
    def prefiller(self) -> str | None:
        """The prefiller whose KV cache it has or waits for; None: this node computes it."""
        return None if self.transfer is None else self.transfer.link.peer

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

    def on_asked(self, transfer: Transfer) -> None:
        """A prefiller is asked for the KV cache."""
        self.transfer = transfer
        self.waiting_since_s = None
        if self.prompt_logprobs_wanted is not None:
            self.prompt_logprobs.clear()  # of a transfer that failed
        self.dispatched_s = now_s()

    def on_lost(self, transfer: Transfer, error: RequestError) -> None:
        """The KV cache will not come from whoever was asked."""
        self.transfer = None
        self.failed_prefillers.append(transfer.prefiller)
        self.last_error = error

    def on_own_scores(self, scores: PromptScores) -> None:
        """This node has scored a part of the prompt. A request that was preempted is scored once
        more; its scores go out once.
        """
        if self.first_token_s is None:
            del self.prompt_logprobs[scores.first_position - 1 :]
            self.prompt_logprobs += scores.tokens

    def on_arrived(self, transfer: Transfer) -> None:
        """The KV cache is here."""
        self.transfer_bytes += transfer.num_bytes
        self.arrived_s = now_s()

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
        link = None if self.transfer is None else self.transfer.link
        times = self._prefill_times()
        return RequestTimeline(
            prompt_len=self.prompt_len,
            output_len=self.output_len,
            prefiller=self.prefiller,
            provider=None if link is None else link.provider,
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

    def _prefill_times(self) -> PrefillTimes | None:
        """When the prefiller worked; None where its clock is another host's."""
        transfer = self.transfer
        return None if transfer is None or not transfer.link.same_host else transfer.times

    def _arrival(self) -> Arrival | None:
        return None if self.transfer is None else self.transfer.arrival

    def _since(self, moment_s: float | None) -> float | None:
        return None if moment_s is None else moment_s - self.arrival_s

    def _since_ns(self, moment_ns: int) -> float | None:
        return moment_ns * 1e-9 - self.arrival_s if moment_ns else None

    def _chunks(self, times: PrefillTimes | None) -> list[ChunkSpan]:
        chunks = [*(times.chunks if times else ()), *self.own_chunks]
        return [
            ChunkSpan(
                end_position=chunk.end_position,
                start_s=chunk.start_ns * 1e-9 - self.arrival_s,
                end_s=self._since_ns(chunk.end_ns),
            )
            for chunk in chunks
        ]

    def _landed(self) -> list[LandedShare]:
        arrival = self._arrival()
        if arrival is None or not len(arrival.ns):
            return []
        ns, atoms = arrival.ns, arrival.atoms
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
        times, arrival = self._prefill_times(), self._arrival()
        if times is None or arrival is None:
            return None
        before = int(np.searchsorted(arrival.ns, times.last_layer_ns, side="right"))
        counted = int(arrival.atoms[before - 1]) if before else 0
        return counted / int(arrival.atoms[-1])
