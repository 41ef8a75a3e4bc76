"""The metrics of a serving node, declared once, under the names that ``/metrics`` shows.

Owned by the frontend's event loop, which sees every request's beginning and end. What only the
primary knows comes with each timeline and with its status. A registry of its own: nothing global.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdx.metrics.node import NodeCounts
from pdx.metrics.timeline import RequestTimeline

__all__ = ["CONTENT_TYPE", "ServingMetrics", "StreamEnd"]

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST

#: How a stream ended: by its own end, by its client's, by the clock, or by a fault.
StreamEnd: TypeAlias = Literal["stop", "length", "tool_calls", "left", "timeout", "failed"]

_LONG_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
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
        new.gauge("pdx_build_info", "1.", "version", "model").labels(version, model).set(1)
        new.gauge("pdx_streams_running", "Streams that run.").set_function(num_streams)
        new.gauge("pdx_frontend_tasks", "Tasks of the frontend's event loop.").set_function(
            lambda: len(asyncio.all_tasks())
        )
        self._registry.register(NodeCounts(counts))
        self._transfers = _TransferMetrics(new)
        self._http = new.counter(
            "pdx_http_requests", "HTTP requests by route and status.", "route", "status"
        )
        self._failures = new.counter(
            "pdx_failures", "Requests that ended in an error, by its kind.", "kind"
        )
        self._ends = new.counter("pdx_streams_ended", "Streams by how they ended.", "end")
        self._first_token = new.histogram(
            "pdx_time_to_first_token_seconds", "From a request's arrival (TTFT).", _LONG_S
        )
        self._gap = new.histogram("pdx_inter_token_seconds", "Between two tokens (ITL).", _SHORT_S)
        self._duration = new.histogram(
            "pdx_request_seconds", "From a request's arrival to the end of its stream.", _LONG_S
        )
        self._prompt_tokens = new.counter(
            "pdx_prompt_tokens", "Prompt tokens of streams that began."
        )
        self._prompt_sources = new.counter(
            "pdx_prompt_tokens_by_source",
            "Prompt tokens by where their KV came from; unknown where a stream was cut short.",
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

    def first_token(self, since_arrival_s: float, prompt_len: int) -> None:
        """A stream has begun."""
        self._first_token.observe(since_arrival_s)
        self._prompt_tokens.inc(prompt_len)

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
        self._transfers.add(timeline)


class _TransferMetrics:
    """The KV's way from prefillers to this node."""

    def __init__(self, new: _Family) -> None:
        self._queue_s = new.histogram(
            "pdx_queue_seconds", "From arrival to asking a prefiller.", _LONG_S
        )
        self._num_bytes = new.counter("pdx_transfer_bytes", "KV bytes received.")
        self._seconds = new.histogram(
            "pdx_transfer_seconds", "From asking a prefiller to the last byte.", _LONG_S
        )
        self._hidden_ratio = new.histogram(
            "pdx_transfer_hidden_ratio", "Share of a transfer hidden behind compute.", _SHARES
        )
        self._retries = new.counter("pdx_transfer_retries", "Transfers that were made again.")

    def add(self, timeline: RequestTimeline) -> None:
        """Count what a finished stream's timeline says."""
        if timeline.dispatched_s is not None:
            self._queue_s.observe(timeline.dispatched_s)
            if timeline.arrived_s is not None:
                self._seconds.observe(timeline.arrived_s - timeline.dispatched_s)
        self._num_bytes.inc(timeline.transfer_bytes)
        if timeline.hidden_share is not None:
            self._hidden_ratio.observe(timeline.hidden_share)
        self._retries.inc(timeline.num_retries)
