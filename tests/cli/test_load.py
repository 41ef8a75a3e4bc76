"""The load generator's parts: what is sent when, what is counted, what is drawn. No server."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest

from pdx.cli.load_report import percentile, ratios, summary, tables, times_of
from pdx.errors import ConfigError
from pdx.lab.api import ApiError, api_base, error_of, events
from pdx.lab.load.client import Outcome
from pdx.lab.load.plot import distribution_svg
from pdx.lab.load.workload import Lengths, Workload, jobs, read_trace


def workload(**fields: Any) -> Workload:
    defaults: dict[str, Any] = {
        "prompt": Lengths(mean=50, sigma=0.8),
        "output": Lengths(mean=10, sigma=0),
        "rate": 5.0,
        "concurrency": None,
        "num_requests": 200,
        "duration_s": None,
        "token_ids": (100, 500),
        "context_len": None,
        "seed": 0,
    }
    return Workload(**(defaults | fields))


def outcome(**fields: Any) -> Outcome:
    defaults: dict[str, Any] = {
        "prompt_len": 100,
        "late_s": 0.0,
        "ttft_s": 0.1,
        "gaps_s": [0.01, 0.03],
        "e2e_s": 0.14,
        "output_len": 3,
    }
    return Outcome(**(defaults | fields))


def test_a_seed_gives_the_same_requests_and_another_seed_or_round_gives_others() -> None:
    assert list(jobs(workload())) == list(jobs(workload()))
    assert list(jobs(workload())) != list(jobs(workload(seed=1)))
    assert list(jobs(workload())) != list(jobs(workload(), 1))


def test_arrivals_are_poisson_at_the_rate() -> None:
    arrivals = [job.arrival_s for job in jobs(workload(rate=20.0, num_requests=4000))]
    gaps = [b - a for a, b in itertools.pairwise([0.0, *(a for a in arrivals if a is not None)])]
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.05)
    # An exponential distribution's deviation is its mean.
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.1)


def test_lengths_have_the_mean_and_the_spread_asked_for() -> None:
    found = [len(job.prompt_ids) for job in jobs(workload(num_requests=4000))]
    assert statistics.fmean(found) == pytest.approx(50, rel=0.05)
    assert min(found) < 15
    assert max(found) > 200
    assert {job.output_len for job in jobs(workload())} == {10}


def test_prompts_are_from_the_range_and_share_no_beginning() -> None:
    prompts = [job.prompt_ids for job in jobs(workload(prompt=Lengths(mean=20, sigma=0)))]
    assert all(100 <= token <= 500 for prompt in prompts for token in prompt)
    assert len({tuple(prompt[:4]) for prompt in prompts}) == len(prompts)


def test_prompt_and_output_are_cut_to_the_context() -> None:
    for job in jobs(workload(context_len=12)):
        assert 1 <= len(job.prompt_ids) <= 11
        assert 1 <= job.output_len <= 12 - len(job.prompt_ids)


def test_a_duration_ends_the_arrivals() -> None:
    arrivals = [job.arrival_s for job in jobs(workload(num_requests=None, duration_s=3.0))]
    assert 5 < len(arrivals) < 30
    assert all(arrival is not None and arrival < 3.0 for arrival in arrivals)


def test_a_closed_loop_has_no_arrival_times() -> None:
    assert all(job.arrival_s is None for job in jobs(workload(rate=None, concurrency=2)))


def test_a_trace_gives_lengths_and_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"prompt_tokens": 3, "output_tokens": 5, "arrival_s": 10}\n\n'
        '{"prompt_tokens": 4, "output_tokens": 6, "arrival_s": 10.5}\n'
    )
    asked = list(jobs(workload(trace=read_trace(path), rate=None, num_requests=None)))
    assert [(j.arrival_s, len(j.prompt_ids), j.output_len) for j in asked] == [
        (0.0, 3, 5),
        (0.5, 4, 6),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no requests"),
        ('{"prompt_tokens": 3}', "line 1 is no request"),
        ("[1]", "line 1 is no request"),
        ('{"prompt_tokens": 3, "output_tokens": 0}', "line 1: lengths must be at least 1"),
        (
            '{"prompt_tokens": 3, "output_tokens": 1, "arrival_s": 1}\n'
            '{"prompt_tokens": 3, "output_tokens": 1}',
            "arrival_s must be in all lines",
        ),
    ],
)
def test_a_wrong_trace_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert message in caught.value.message


def test_percentiles_lie_between_the_nearest() -> None:
    values = [float(i) for i in range(101)][::-1]
    assert [percentile(values, p) for p in (0, 50, 90, 99, 100)] == [0, 50, 90, 99, 100]
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([7.0], 99) == 7.0


def test_a_summary_counts_what_went_well_and_failures_by_kind() -> None:
    failed = [outcome(error=kind, ttft_s=None, e2e_s=None) for kind in ("timeout", "x", "timeout")]
    found = summary([outcome(), outcome(output_len=1, gaps_s=[]), *failed], wall_s=2.0)
    assert (found["requests"], found["completed"]) == (5, 2)
    assert found["errors"] == {"timeout": 2, "x": 1}
    assert found["output_tokens_per_s"] == 2.0
    assert found["total_tokens_per_s"] == 102.0
    assert found["itl_s"]["mean"] == pytest.approx(0.02)
    assert found["tpot_s"]["p50"] == pytest.approx(0.02)


def test_ratios_are_the_second_over_the_first() -> None:
    slow = outcome(ttft_s=0.2, e2e_s=0.28, gaps_s=[0.02, 0.06])
    over = ratios(summary([outcome()], 1.0), summary([slow], 2.0))
    assert over["ttft_s"]["p50"] == pytest.approx(2)
    assert over["itl_s"]["p99"] == pytest.approx(2, rel=0.01)
    assert over["requests_per_s"] == 0.5


def test_a_round_without_a_success_can_be_reported() -> None:
    nothing = summary([outcome(error="timeout", ttft_s=None, e2e_s=None)], 1.0)
    assert nothing["ttft_s"] is None
    assert ratios(nothing, nothing)["ttft_s"] is None
    assert [len(table.rows) for table in tables(["a", "b"], [[nothing, nothing]])] == [8, 8, 8]


def test_a_plot_is_an_svg_with_a_curve_for_each_server_and_figure() -> None:
    times = times_of([outcome(), outcome(ttft_s=0.5, e2e_s=0.6)])
    svg = ElementTree.fromstring(distribution_svg(["http://a/v1", "b&c"], [times, times]))
    curves = [each for each in svg.iter() if each.tag.endswith("polyline")]
    assert len(curves) == 6
    for curve in curves:
        points = [tuple(map(float, p.split(","))) for p in curve.attrib["points"].split()]
        assert points == sorted(points, key=lambda point: (point[0], -point[1]))
        assert points[-1][1] == 40.0  # all of them took at most so long
    empty = times_of([])
    ElementTree.fromstring(distribution_svg(["a"], [empty]))


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:1/v1", "http://h:1/v1"),
        ("http://h:1/v1/", "http://h:1/v1"),
        ("http://h:1", "http://h:1/v1"),
        ("h:1", "http://h:1/v1"),
        ("https://h/api/v1", "https://h/api/v1"),
        ("[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_addresses_of_an_api(url: str, base: str) -> None:
    assert api_base(url) == base


@pytest.mark.parametrize("url", ["", "ftp://h", "http://", "h:port", "http://[::1"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError):
        api_base(url)


def test_errors_keep_their_status_type_and_message() -> None:
    error = error_of(503, b'{"error": {"message": "full", "type": "overloaded_error"}}')
    assert error.kind == "http_503:overloaded_error"
    assert "503: full" in error.message
    assert error_of(502, b"<html>bad gateway").kind == "http_502"


def stream(text: str) -> httpx.Response:
    return httpx.Response(200, text=text)


def test_a_stream_ends_with_done_and_is_broken_off_without_it() -> None:
    assert list(events(stream(': hi\n\ndata: {"a": 1}\n\ndata: [DONE]\n\n'))) == [{"a": 1}]
    with pytest.raises(ApiError, match="broke off"):
        list(events(stream('data: {"a": 1}\n\n')))
    with pytest.raises(ApiError, match="the stream failed: lost"):
        list(events(stream('data: {"error": {"message": "lost"}}\n\n')))
