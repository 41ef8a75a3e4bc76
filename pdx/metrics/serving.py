"""The metrics of a serving node, declared once, under the names that ``/metrics`` shows.

Owned by the frontend's event loop, which sees every request's beginning and end. What only the
primary knows comes with each timeline and with its status. A registry of its own: nothing global.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from pdx.metrics.node import NodeCounts
from pdx.metrics.timeline import RequestTimeline

__all__ = ["CONTENT_TYPE", "ServingMetrics", "StreamEnd"]

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST

#: How a stream ended: by its own end, by its client's, by the clock, or by a fault.
StreamEnd: TypeAlias = Literal["stop", "length", "tool_calls", "left", "timeout", "failed"]

#: Requests: from a short prompt on a GPU to a long answer on a CPU.
_LONG_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000),
)
#: One token.
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
#: Transfers and handovers, which take a millisecond where the network is good.
_TRANSFER_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 50, 100),
)
_TOKENS = tuple(float(1 << power) for power in range(21))
_SHARES = tuple(tenth / 10 for tenth in range(1, 11))


class _Family:
    """Declares metrics in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self._registry)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, registry=self._registry, buckets=buckets)


class ServingMetrics:
    """``counts`` gives the primary's latest counts, ``num_streams`` how many streams run."""

    def __init__(
        self,
        *,
        version: str,
        model: str,
        counts: Callable[[], Mapping[str, int]],
        num_streams: Callable[[], int],
    ) -> None:
        # Series that nobody plots.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry(auto_describe=True)
        new = _Family(self._registry)
        info = "Always 1. Its labels say which version of pdx serves which model."
        new.gauge("pdx_build_info", info, "version", "model_name").labels(version, model).set(1)
        running = "Streams (choices of requests) that run now."
        new.gauge("pdx_streams_running", running).set_function(num_streams)
        new.gauge(
            "pdx_frontend_tasks", "Tasks of the frontend's event loop; they grow with connections."
        ).set_function(lambda: len(asyncio.all_tasks()))
        self._registry.register(NodeCounts(counts))
        # One for this process, which speaks HTTP, and one for the primary, which started it.
        ProcessCollector(registry=self._registry)
        ProcessCollector("pdx_primary", os.getppid, registry=self._registry)
        self._times = _RequestMetrics(new)
        self._http = new.counter(
            "pdx_http_requests",
            "HTTP requests by route and status; status 499: the client left before the answer.",
            "route",
            "status",
        )
        self._failures = new.counter(
            "pdx_failures",
            "Requests that ended in an error, by its kind (the error's type in the answer).",
            "kind",
        )
        self._ends = new.counter(
            "pdx_streams_ended",
            "Streams by how they ended: stop, length or tool_calls by themselves, left by their "
            "client, timeout by --request-timeout, failed by an error.",
            "end",
        )
        self._first_token = new.histogram(
            "pdx_time_to_first_token_seconds",
            "From a request's arrival at the frontend to its first token (TTFT).",
            _LONG_S,
        )
        self._gap = new.histogram(
            "pdx_inter_token_seconds",
            "Between two tokens of a stream (ITL); of tokens that came together, their mean.",
            _SHORT_S,
        )
        self._duration = new.histogram(
            "pdx_request_seconds", "From a request's arrival to the end of its stream.", _LONG_S
        )
        self._prompt_tokens = new.counter(
            "pdx_prompt_tokens", "Prompt tokens of streams that have begun."
        )
        self._cached_tokens = new.counter(
            "pdx_prompt_tokens_cached",
            "Prompt tokens of streams that have begun which a prefix cache held, here or on the "
            "prefiller: nobody computed them.",
        )
        self._prompt_sources = new.counter(
            "pdx_prompt_tokens_by_source",
            "Prompt tokens by where their KV came from: a prefiller (remote), this node (local), "
            "or unknown where a stream was cut short.",
            "source",
        )
        self._generated = new.counter("pdx_generated_tokens", "Tokens generated.")

    def scrape(self) -> bytes:
        """The page for Prometheus; called on the frontend's event loop."""
        return prometheus_client.generate_latest(self._registry)

    def http(self, route: str, status: int) -> None:
        """A request was answered; 499: its client left first."""
        self._http.labels(route, status).inc()

    def failed(self, kind: str) -> None:
        """A request ended in an error of this kind."""
        self._failures.labels(kind).inc()

    def first_token(self, since_arrival_s: float, prompt_len: int, num_cached: int) -> None:
        """A stream has begun."""
        self._first_token.observe(since_arrival_s)
        self._prompt_tokens.inc(prompt_len)
        self._cached_tokens.inc(num_cached)

    def tokens(self, count: int, gap_s: float | None) -> None:
        """``count`` more tokens of a stream, ``gap_s`` after those before."""
        self._generated.inc(count)
        if gap_s is not None and count:
            self._gap.observe(gap_s / count)

    def ended(self, end: StreamEnd, since_arrival_s: float) -> None:
        """A stream has ended."""
        self._ends.labels(end).inc()
        self._duration.observe(since_arrival_s)

    def prompt_of_unknown_source(self, prompt_len: int) -> None:
        """A stream that had begun was cut short: its timeline never comes."""
        self._prompt_sources.labels("unknown").inc(prompt_len)

    def timeline(self, timeline: RequestTimeline) -> None:
        """The engine's account of a finished stream."""
        # The decoder computes the last prompt token itself.
        remote = timeline.prompt_len - 1 if timeline.prefiller is not None else 0
        self._prompt_sources.labels("remote").inc(remote)
        self._prompt_sources.labels("local").inc(timeline.prompt_len - remote)
        self._times.add(timeline)


class _RequestMetrics:
    """What the engine's timelines tell: the phases of a request, and its KV's way to this node."""

    def __init__(self, new: _Family) -> None:
        self._prompt_len = new.histogram(
            "pdx_request_prompt_tokens", "Prompt tokens of a stream.", _TOKENS
        )
        self._output_len = new.histogram(
            "pdx_request_output_tokens", "Tokens that a stream has generated.", _TOKENS
        )
        self._queue_s = new.histogram(
            "pdx_queue_seconds",
            "From a request's arrival to asking a prefiller, or to the lease of its pages where "
            "none is asked.",
            _LONG_S,
        )
        self._prefill_s = new.histogram(
            "pdx_prefill_seconds",
            "From the lease of a request's pages to its first token: prefill, transfer and the "
            "first step.",
            _LONG_S,
        )
        self._decode_s = new.histogram(
            "pdx_decode_seconds", "From a stream's first token to its last.", _LONG_S
        )
        self._per_token_s = new.histogram(
            "pdx_time_per_output_token_seconds",
            "A stream's decode time by its tokens after the first one (TPOT).",
            _SHORT_S,
        )
        self._handover_s = new.histogram(
            "pdx_handover_seconds",
            "From the end of the prefiller's last layer to the first token; only where both nodes "
            "are on one host and share its clock.",
            _TRANSFER_S,
        )
        self._num_bytes = new.counter("pdx_transfer_bytes", "Bytes of KV cache received.")
        self._seconds = new.histogram(
            "pdx_transfer_seconds",
            "From asking a prefiller to the last byte of the KV cache; it spans the prefill.",
            _TRANSFER_S,
        )
        self._hidden_ratio = new.histogram(
            "pdx_transfer_hidden_ratio",
            "Share of a KV cache that had arrived before the last layer was computed.",
            _SHARES,
        )
        self._retries = new.counter(
            "pdx_transfer_retries",
            "Transfers of finished streams that a prefiller had failed before.",
        )

    def add(self, timeline: RequestTimeline) -> None:
        """Count what a finished stream's timeline says."""
        self._prompt_len.observe(timeline.prompt_len)
        self._output_len.observe(timeline.output_len)
        self._add_phases(timeline)
        if timeline.dispatched_s is not None and timeline.arrived_s is not None:
            self._seconds.observe(timeline.arrived_s - timeline.dispatched_s)
        self._num_bytes.inc(timeline.transfer_bytes)
        if timeline.hidden_share is not None:
            self._hidden_ratio.observe(timeline.hidden_share)
        self._retries.inc(timeline.num_retries)

    def _add_phases(self, timeline: RequestTimeline) -> None:
        asked_s = timeline.admitted_s if timeline.dispatched_s is None else timeline.dispatched_s
        if asked_s is not None:
            self._queue_s.observe(asked_s)
        first_s = timeline.first_token_s
        if first_s is None:
            return
        if timeline.admitted_s is not None:
            self._prefill_s.observe(first_s - timeline.admitted_s)
        if timeline.last_layer_s is not None:
            self._handover_s.observe(max(0.0, first_s - timeline.last_layer_s))
        if timeline.finished_s is not None:
            decode_s = timeline.finished_s - first_s
            self._decode_s.observe(decode_s)
            if timeline.output_len > 1:
                self._per_token_s.observe(decode_s / (timeline.output_len - 1))
