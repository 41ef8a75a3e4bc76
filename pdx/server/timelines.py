"""Timelines of the last requests, by API id or X-Request-Id. Owned by the frontend's event loop."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from pdx.metrics.timeline import RequestTimeline

__all__ = ["RecentTimelines"]


class RecentTimelines:
    """A request with several choices has a timeline for each. That of a choice which a stop string
    ended comes from the engine a little later than its answer's end.
    """

    def __init__(self, max_requests: int = 256) -> None:
        self._max_requests = max_requests
        self._requests: OrderedDict[str, dict[int, asyncio.Future[RequestTimeline]]] = OrderedDict()
        #: API ids by X-Request-Id, of which clients may send one twice: the newest counts.
        self._named: OrderedDict[str, str] = OrderedDict()

    def name(self, request_id: str, x_request_id: str) -> None:
        """The request can be found by its X-Request-Id too."""
        self._named[x_request_id] = request_id
        self._named.move_to_end(x_request_id)
        if len(self._named) > self._max_requests:
            self._named.popitem(last=False)

    def record(self, request_id: str, choice_idx: int, timeline: RequestTimeline) -> None:
        """Keep one; the oldest request makes room."""
        future = self._future(request_id, choice_idx)
        if not future.done():
            future.set_result(timeline)

    def expect(self, request_id: str, choice_idx: int) -> None:
        """One will be recorded soon."""
        self._future(request_id, choice_idx)

    async def find(
        self, request_id: str, choice_idx: int, *, patience_s: float = 1.0
    ) -> RequestTimeline | None:
        """Find a timeline by either id. None: unknown, still running, too old, or not there in
        time.
        """
        found = self._requests.get(request_id) or self._requests.get(
            self._named.get(request_id, ""), {}
        )
        future = found.get(choice_idx)
        if future is None:
            return None
        await asyncio.wait([future], timeout=patience_s)
        return future.result() if future.done() else None

    def _future(self, request_id: str, choice_idx: int) -> asyncio.Future[RequestTimeline]:
        choices = self._requests.setdefault(request_id, {})
        if choice_idx not in choices:
            choices[choice_idx] = asyncio.get_running_loop().create_future()
        if len(self._requests) > self._max_requests:
            self._requests.popitem(last=False)
        return choices[choice_idx]
