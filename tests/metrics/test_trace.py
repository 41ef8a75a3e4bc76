"""The trace is valid at any moment, whole or cut short, and bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdx.errors import ConfigError
from pdx.metrics.timeline import ChunkSpan, RequestTimeline
from pdx.metrics.trace import TraceWriter

TIMELINE = RequestTimeline(
    prompt_len=200,
    output_len=4,
    prefiller="127.0.0.1:9",
    provider="tcp",
    transfer_bytes=4096,
    admitted_s=0.1,
    dispatched_s=0.1,
    prefill_start_s=0.2,
    last_layer_s=0.5,
    posted_s=0.55,
    arrived_s=0.6,
    first_token_s=0.7,
    finished_s=1.0,
    chunks=[
        ChunkSpan(end_position=128, start_s=0.2, end_s=0.4),
        ChunkSpan(end_position=199, start_s=0.4),
    ],
)


def read_cut_short(path: Path) -> list[dict[str, Any]]:
    """The events of a file whose writer may have been killed."""
    events: list[dict[str, Any]] = json.loads(path.read_text().removesuffix("\n]\n") + "]")
    return events


def spans(events: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Begin and end of each request span by name, in seconds."""
    found: dict[str, list[tuple[float, float]]] = {}
    begun: dict[str, float] = {}
    for event in events:
        if event["ph"] == "b":
            begun[event["name"]] = event["ts"] / 1e6
        elif event["ph"] == "e":
            name = event["name"]
            found.setdefault(name, []).append((begun.pop(name), event["ts"] / 1e6))
    assert not begun
    return found


def test_request_is_told_of_in_nested_spans(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(path, "decoder")
    trace.on_request(7, 100.0, TIMELINE, "length")
    trace.close()
    events = json.loads(path.read_text())
    found = spans(events)
    assert found == {
        "request": [(100.0, 101.0)],
        "queue": [(100.0, 100.1)],
        "transfer": [(100.1, 100.6)],
        "prefill chunk": [(100.2, 100.4), (100.4, 100.5)],
        "writes after the last layer": [(100.5, 100.55)],
        "first step": [(100.6, 100.7)],
        "decode": [(100.7, 101.0)],
    }
    [begin] = [e for e in events if e["ph"] == "b" and e["name"] == "request"]
    assert begin["args"] == {"prompt_tokens": 200, "output_tokens": 4, "end": "length"}
    assert begin["id"] == 7


def test_request_without_times_ends_where_it_began(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(path, "decoder")
    trace.on_request(1, 5.0, RequestTimeline(prompt_len=1, output_len=0), "capacity")
    trace.close()
    assert spans(json.loads(path.read_text())) == {"request": [(5, 5)], "queue": [(5, 5)]}


def test_file_of_a_killed_writer_lacks_only_its_bracket(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(path, "decoder")
    assert len(read_cut_short(path)) == 3
    for i in range(1000):
        trace.on_pass(float(i), i + 0.5, num_tokens=9, num_requests=3)
    events = read_cut_short(path)  # nothing was flushed on purpose
    assert len(events) > 500
    trace.close()
    passes = [e for e in json.loads(path.read_text()) if e["ph"] == "X"]
    assert len(passes) == 1000
    assert (passes[1]["ts"], passes[1]["dur"], passes[1]["args"]["tokens"]) == (1e6, 5e5, 9)


def test_trace_ends_at_its_bound_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(path, "decoder", max_bytes=2000)
    for i in range(1000):
        trace.on_pass(float(i), i + 0.5, num_tokens=9, num_requests=3)
    trace.close()
    events = json.loads(path.read_text())
    assert path.stat().st_size < 2200
    assert [e["name"] for e in events].count("the trace is full") == 1
    assert events[-1]["name"] == "the trace is full"


def test_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-folder"):
        TraceWriter(tmp_path / "no-such-folder" / "trace.json", "decoder")
