"""Timelines of the last requests, by API id. Owned by the frontend's event loop."""

from __future__ import annotations

from collections import OrderedDict

from pdx.metrics.timeline import RequestTimeline

__all__ = ["RecentTimelines"]


class RecentTimelines:
    """A request with several choices has a timeline for each."""

    def __init__(self, max_requests: int = 1000) -> None:
        self._max_requests = max_requests
        self._requests: OrderedDict[str, dict[int, RequestTimeline]] = OrderedDict()

    def record(self, request_id: str, choice_idx: int, timeline: RequestTimeline) -> None:
        """Keep one; the oldest request makes room."""
        self._requests.setdefault(request_id, {})[choice_idx] = timeline
        if len(self._requests) > self._max_requests:
            self._requests.popitem(last=False)

    def find(self, request_id: str, choice_idx: int) -> RequestTimeline | None:
        """None: unknown, still running, or too long ago."""
        return self._requests.get(request_id, {}).get(choice_idx)
