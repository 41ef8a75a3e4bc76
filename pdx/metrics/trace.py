"""A trace of a node for Perfetto or chrome://tracing: requests, transfers, passes.

Owned by the primary's event loop, which writes whole lines every now and then: the file can be
opened at any moment, also when the process was killed (both viewers take an array without its
closing bracket). Bounded in size: what comes after that is dropped, and the last event says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pdx.errors import OutputError
from pdx.metrics.timeline import RequestTimeline

__all__ = ["TraceWriter"]

logger = logging.getLogger(__name__)

#: Tracks of the viewer: this node, and what it knows of its prefiller's work.
_NODE, _PREFILLER = 1, 2
_PASSES = 1
_MAX_BYTES = 256 << 20
#: Events wait for others this long, or until so many bytes have come together.
_FLUSH_S = 0.5
_FLUSH_BYTES = 64 << 10


class TraceWriter:
    """Times are CLOCK_MONOTONIC seconds.

    Args:
        path: overwritten.
        node: what the node is called in the viewer.

    Raises:
        OutputError: the file cannot be written.
    """

    def __init__(self, path: Path, node: str, *, max_bytes: int = _MAX_BYTES) -> None:
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _cannot_write(path, error) from error
        self._path = path
        self._room = max_bytes
        self._pending = bytearray(b"[\n")
        self._is_first = True
        #: It could not be written, which has been said.
        self._is_broken = False
        self._last_flush_s = time.monotonic()
        for pid, name in ((_NODE, node), (_PREFILLER, "its prefiller")):
            self._add({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        thread = {"name": "passes"}
        self._add({"ph": "M", "name": "thread_name", "pid": _NODE, "tid": _PASSES, "args": thread})
        try:
            self._write()
        except OSError as error:
            os.close(self._fd)
            raise _cannot_write(path, error) from error

    def on_pass(self, start_s: float, end_s: float, *, num_tokens: int, num_requests: int) -> None:
        """The rank has run a pass."""
        event = _span("pass", start_s, end_s, {"tokens": num_tokens, "requests": num_requests})
        self._add({"pid": _NODE, "tid": _PASSES, **event})
        self._flush_now_and_then()

    def on_request(
        self, request_id: int, arrival_s: float, timeline: RequestTimeline, end: str
    ) -> None:
        """A request has ended; ``end`` says how."""
        for pid, name, start_s, end_s, args in _request_spans(timeline, end):
            # Nested by time, on a track of the request's own.
            common = {"cat": "request", "id": request_id, "pid": pid, "tid": 0, "name": name}
            begin, finish = arrival_s + start_s, arrival_s + end_s
            self._add({"ph": "b", "ts": _us(begin), "args": args, **common})
            self._add({"ph": "e", "ts": _us(max(begin, finish)), **common})
        self._flush_now_and_then()

    def close(self) -> None:
        """Write the rest."""
        self._pending += b"\n]\n"
        self._flush()
        with contextlib.suppress(OSError):
            os.close(self._fd)

    def _add(self, event: dict[str, Any]) -> None:
        if self._room <= 0:
            return
        line = msgspec.json.encode(event)
        self._room -= len(line) + 2
        if self._room <= 0:
            now = _us(time.monotonic())
            full = {"ph": "i", "s": "g", "name": "the trace is full", "pid": _NODE, "ts": now}
            line = msgspec.json.encode(full)
        # The comma comes first, so that a closing bracket makes it whole at any time.
        self._pending += line if self._is_first else b",\n" + line
        self._is_first = False

    def _flush_now_and_then(self) -> None:
        late = time.monotonic() - self._last_flush_s >= _FLUSH_S
        if self._pending and (late or len(self._pending) >= _FLUSH_BYTES):
            self._flush()

    def _flush(self) -> None:
        """A full disk ends the trace, not the node."""
        if self._is_broken:
            self._pending.clear()
            return
        try:
            self._write()
        except OSError as error:
            self._is_broken, self._room = True, 0
            logger.warning(
                "the trace in %s is cut short, the node goes on: %s", self._path, error.strerror
            )

    def _write(self) -> None:
        """Write what is pending; whatever becomes of it, nothing is pending any more."""
        rest = memoryview(bytes(self._pending))
        self._pending.clear()
        self._last_flush_s = time.monotonic()
        while rest:
            rest = rest[os.write(self._fd, rest) :]


def _cannot_write(path: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot write the trace to {path}: {error.strerror}")


_Span = tuple[int, str, float, float, dict[str, Any]]


def _request_spans(timeline: RequestTimeline, end: str) -> Iterator[_Span]:
    """Process, name, begin and end since arrival, and details."""
    finished = timeline.finished_s or 0.0
    lens = {"prompt_tokens": timeline.prompt_len, "output_tokens": timeline.output_len}
    yield _NODE, "request", 0.0, finished, {**lens, "end": end}
    admitted = timeline.admitted_s
    yield _NODE, "queue", 0.0, finished if admitted is None else admitted, {}
    if timeline.dispatched_s is not None:
        arrived = finished if timeline.arrived_s is None else timeline.arrived_s
        yield _NODE, "transfer", timeline.dispatched_s, arrived, _transfer(timeline)
    chunk_pid = _NODE if timeline.prefiller is None else _PREFILLER
    for chunk in timeline.chunks:
        ends = [t for t in (chunk.end_s, timeline.last_layer_s) if t is not None]
        details = {"end_position": chunk.end_position}
        yield chunk_pid, "prefill chunk", chunk.start_s, ends[0] if ends else chunk.start_s, details
    if timeline.last_layer_s is not None and timeline.posted_s is not None:
        yield _PREFILLER, "writes after the last layer", *_pair(timeline), {}
    if timeline.arrived_s is not None and timeline.first_token_s is not None:
        yield _NODE, "first step", timeline.arrived_s, timeline.first_token_s, {}
    if timeline.first_token_s is not None:
        yield _NODE, "decode", timeline.first_token_s, finished, {}


def _pair(timeline: RequestTimeline) -> tuple[float, float]:
    assert timeline.last_layer_s is not None and timeline.posted_s is not None
    return timeline.last_layer_s, timeline.posted_s


def _transfer(timeline: RequestTimeline) -> dict[str, Any]:
    return {
        "bytes": timeline.transfer_bytes,
        "hidden_share": timeline.hidden_share,
        "prefiller": timeline.prefiller,
        "provider": timeline.provider,
        "retries": timeline.num_retries,
    }


def _span(name: str, start_s: float, end_s: float, args: dict[str, Any]) -> dict[str, Any]:
    duration = round((end_s - start_s) * 1e6, 1)
    return {"ph": "X", "name": name, "ts": _us(start_s), "dur": duration, "args": args}


def _us(moment_s: float) -> float:
    return round(moment_s * 1e6, 1)
