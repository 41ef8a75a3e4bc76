"""How a node is: as ``/health`` tells it, and a primary's counts as metrics, under the names that
``/metrics`` shows. Used by the frontend, or by a primary that has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec
import prometheus_client
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

__all__ = ["Health", "NodeCounts", "NodeMetrics"]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The node's state, for load balancers and people."""

    status: str
    detail: str
    streams: int
    counts: dict[str, int]


class _Kind(NamedTuple):
    """A metric that the counts of one kind are shown as."""

    name: str
    text: str
    #: None: it has one value.
    label: str | None
    is_counter: bool = True


#: Counts by the beginning of their names; the rest of the name is the label's value.
_BY_PREFIX = {
    "pages_": _Kind(
        "pdx_pages",
        "KV pages by state: free; leased, in_flight and filled belong to requests; cached ones are "
        "free to take and hold known prefixes; quarantined ones wait for proof that no write can "
        "reach them.",
        "state",
        is_counter=False,
    ),
    "requests_": _Kind(
        "pdx_node_requests",
        "Requests in the node now: waiting for pages or a prefiller, or active (they hold pages).",
        "state",
        is_counter=False,
    ),
    "faults_": _Kind(
        "pdx_faults",
        "Faults that this node noticed, each once, by the reason that docs/faults.md explains. "
        "Nothing else counts a fault.",
        "reason",
    ),
    "prefills_": _Kind(
        "pdx_prefills",
        "Prompts by how they were placed: asked of a prefiller, retried because a prefiller failed "
        "them, or computed here because no prefiller could.",
        "how",
    ),
    "failed_": _Kind(
        "pdx_node_failures", "Requests that this node ended with an error, by its kind.", "kind"
    ),
}
_ENDED = _Kind(
    "pdx_node_requests_ended",
    "Requests that ended in this node without an error of its own: finished, aborted (their client "
    "left) or timed_out (--request-timeout).",
    "end",
)
_LEVEL = _Kind("pdx_node_level", "Other levels of the node, now.", "what", is_counter=False)
_EVENT = _Kind(
    "pdx_node_events", "Other events that the node counts. None of them is a fault.", "event"
)
_PREEMPTIONS = _Kind(
    "pdx_preemptions",
    "Times that a running request gave its KV pages to an older one, to be computed again later.",
    None,
)
_BY_NAME = {
    "preemptions": _PREEMPTIONS,
    **dict.fromkeys(("finished", "aborted", "timed_out"), _ENDED),
    **dict.fromkeys(("transfers_open", "slots_taken", "prefillers", "links_open"), _LEVEL),
}
_KINDS = (*_BY_PREFIX.values(), _ENDED, _PREEMPTIONS, _LEVEL, _EVENT)


def _kind_of(name: str) -> tuple[_Kind, str]:
    """What a count is shown as, and its label's value."""
    for prefix, kind in _BY_PREFIX.items():
        if name.startswith(prefix):
            return kind, name.removeprefix(prefix)
    return _BY_NAME.get(name, _EVENT), name


class NodeCounts:
    """The primary's counts as metrics.

    What has been shown of a counter is never taken back, whatever the primary says.
    """

    def __init__(self, counts: Callable[[], Mapping[str, int]]) -> None:
        self._counts = counts
        self._highest: dict[str, int] = {}

    def describe(self) -> list[Metric]:
        """Names that no metric declared elsewhere may take."""
        return list(self._families().values())

    def collect(self) -> Iterable[Metric]:
        """Called at each scrape."""
        families = self._families()
        shown: dict[str, int] = {}
        for name, count in self._counts().items():
            if _kind_of(name)[0].is_counter:
                self._highest[name] = max(count, self._highest.get(name, 0))
            else:
                shown[name] = count
        for name, count in {**shown, **self._highest}.items():
            kind, value = _kind_of(name)
            families[kind.name].add_metric([] if kind.label is None else [value], count)
        return families.values()

    @staticmethod
    def _families() -> dict[str, CounterMetricFamily | GaugeMetricFamily]:
        return {
            kind.name: (CounterMetricFamily if kind.is_counter else GaugeMetricFamily)(
                kind.name, kind.text, labels=[] if kind.label is None else [kind.label]
            )
            for kind in _KINDS
        }


class NodeMetrics:
    """Metrics of a node that has no frontend."""

    content_type = prometheus_client.CONTENT_TYPE_LATEST

    def __init__(self, counts: Callable[[], Mapping[str, int]]) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self._registry.register(NodeCounts(counts))
        ProcessCollector(registry=self._registry)

    def scrape(self) -> bytes:
        """The page for Prometheus."""
        return prometheus_client.generate_latest(self._registry)
