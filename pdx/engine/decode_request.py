"""What a decoder knows of one client stream besides its tokens: transfers, times, figures for its
timeline.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from pdx.messenger.decode_link import Arrival, DecodeLink
from pdx.messenger.decode_side import PrefillTimes
from pdx.metrics.timeline import RequestTimeline
from pdx.request.batch import ScoredToken

__all__ = ["DecodeRequest"]


@dataclass(slots=True)
class DecodeRequest:
    """Owned by the decode node's event loop. Times are CLOCK_MONOTONIC seconds."""

    request_id: int
    prompt_len: int
    #: How many alternatives to score the prompt with; None: not asked, or done before a preemption.
    prompt_logprobs_wanted: int | None = None
    prompt_logprobs: list[ScoredToken] = field(default_factory=list)
    arrival_s: float = field(default_factory=time.monotonic)
    #: The transfer that runs now.
    transfer_id: int | None = None
    #: The last transfer that was complete.
    arrived_transfer_id: int | None = None
    prefiller: str | None = None
    provider: str | None = None
    same_host: bool = False
    num_transfers: int = 0
    transfer_bytes: int = 0
    dispatched_s: float | None = None
    arrived_s: float | None = None
    first_token_s: float | None = None
    output_len: int = 0
    arrival: Arrival | None = None
    times: PrefillTimes | None = None

    def dispatch(self, transfer_id: int, link: DecodeLink, num_bytes: int) -> None:
        """A prefiller is asked for the KV cache."""
        self.transfer_id = transfer_id
        self.num_transfers += 1
        self.transfer_bytes += num_bytes
        self.prefiller, self.provider, self.same_host = link.peer, link.provider, link.same_host
        self.dispatched_s = time.monotonic()

    def on_arrived(self, arrival: Arrival) -> None:
        """The KV cache is here."""
        self.arrival = arrival
        self.arrived_s = time.monotonic()

    def on_ready(self) -> None:
        """The request starts."""
        self.arrived_transfer_id, self.transfer_id = self.transfer_id, None
        self.prompt_logprobs_wanted = None

    def take_prompt_logprobs(self) -> list[ScoredToken]:
        """The prompt's scores, once: they go out with the first tokens."""
        scores, self.prompt_logprobs = self.prompt_logprobs, []
        return scores

    def on_tokens(self, num_tokens: int) -> None:
        """The rank has sampled."""
        self.output_len += num_tokens
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()

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
            dispatched_s=self._since(self.dispatched_s),
            prefill_start_s=self._since(times.prefill_start_ns * 1e-9 if times else None),
            last_layer_s=self._since(times.last_layer_ns * 1e-9 if times else None),
            arrived_s=self._since(self.arrived_s),
            first_token_s=self._since(self.first_token_s),
            finished_s=self._since(time.monotonic()),
            num_retries=max(self.num_transfers - 1, 0),
        )

    def _since(self, moment_s: float | None) -> float | None:
        return None if moment_s is None else moment_s - self.arrival_s

    def _hidden_share(self) -> float | None:
        """Share of the atoms that had been counted when the last layer was done. Atoms are equal in
        size.
        """
        if self.times is None or self.arrival is None or not self.same_host:
            return None
        before = int(np.searchsorted(self.arrival.ns, self.times.last_layer_ns, side="right"))
        counted = int(self.arrival.atoms[before - 1]) if before else 0
        return counted / int(self.arrival.atoms[-1])
