"""How a node is: as ``/health`` tells it, and a primary's counts as metrics, under the names that
``/metrics`` shows. Used by the frontend, or by a primary that has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec
import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

__all__ = ["Health", "NodeCounts", "NodeMetrics"]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The node's state, for load balancers and people."""

    status: str
    detail: str
    streams: int
    counts: dict[str, int]


class NodeCounts:
    """The primary's counts: ``pages_*`` are states of pages, ``requests_*`` states of requests, a
    few others levels; the rest only rise.

    What has been shown of a counter is never taken back, whatever the primary says.
    """

    _LEVELS = frozenset({"transfers_open", "slots_taken", "prefillers", "links_open"})

    def __init__(self, counts: Callable[[], Mapping[str, int]]) -> None:
        self._counts = counts
        self._highest: dict[str, int] = {}

    def describe(self) -> list[Metric]:
        """Names that no metric declared elsewhere may take."""
        return [GaugeMetricFamily(name, "") for name in ("pdx_pages", "pdx_node_requests")]

    def collect(self) -> Iterable[Metric]:
        """Called at each scrape."""
        pages = GaugeMetricFamily("pdx_pages", "KV pages by state.", labels=["state"])
        requests = GaugeMetricFamily(
            "pdx_node_requests", "Requests by where they are in the node.", labels=["state"]
        )
        events = CounterMetricFamily(
            "pdx_node_events", "Faults and events that the primary counts.", labels=["event"]
        )
        levels = GaugeMetricFamily("pdx_node_level", "Other levels.", labels=["what"])
        for name, count in self._counts().items():
            kind, _, state = name.partition("_")
            if kind == "pages":
                pages.add_metric([state], count)
            elif kind == "requests":
                requests.add_metric([state], count)
            elif name in self._LEVELS:
                levels.add_metric([name], count)
            else:
                self._highest[name] = max(count, self._highest.get(name, 0))
        for name, count in self._highest.items():
            events.add_metric([name], count)
        return [pages, requests, levels, events]


class NodeMetrics:
    """Of a node that has no frontend."""

    content_type = prometheus_client.CONTENT_TYPE_LATEST

    def __init__(self, counts: Callable[[], Mapping[str, int]]) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self._registry.register(NodeCounts(counts))

    def scrape(self) -> bytes:
        """The page for Prometheus."""
        return prometheus_client.generate_latest(self._registry)
