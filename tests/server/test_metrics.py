"""What Prometheus sees. Numbers add up, and counters never fall."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdx.metrics.timeline import RequestTimeline
from pdx.request.request import FinishReason
from pdx.request.stream import Abort, AbortReason, NodeStatus, StepFrame, StreamFailed, Submit

if TYPE_CHECKING:
    from conftest import Frontend

COMPLETIONS = "/v1/completions"
Samples = dict[str, float]


def scrape(http: httpx.Client) -> Samples:
    """Every sample by its name and labels."""
    response = http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    found: Samples = {}
    for family in text_string_to_metric_families(response.text):
        assert family.name.startswith(("pdx_", "process_"))
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def grown(before: Samples, after: Samples, name: str) -> float:
    return after.get(name, 0) - before.get(name, 0)


def test_prompt_tokens_add_up_and_nothing_falls(
    frontend: Frontend, http: httpx.Client, make_update: Callable[..., StepFrame]
) -> None:
    def script(submit: Submit) -> list[StepFrame]:
        timeline = RequestTimeline(
            prompt_len=len(submit.token_ids),
            output_len=2,
            prefiller="peer" if submit.stream_id % 2 else None,
            transfer_bytes=1000 if submit.stream_id % 2 else 0,
            hidden_share=0.5 if submit.stream_id % 2 else None,
            dispatched_s=0.25,
            arrived_s=0.75,
            num_retries=1,
        )
        return [
            make_update(submit.stream_id, [70]),
            make_update(submit.stream_id, [71], FinishReason.LENGTH, timeline),
        ]

    frontend.script = script
    scrapes = [scrape(http)]
    for length in range(1, 21):
        body = {"prompt": [5] * length, "max_tokens": 2, "stop": "zzz"}
        assert http.post(COMPLETIONS, json=body).status_code == 200
        scrapes.append(scrape(http))
    for before, after in itertools.pairwise(scrapes):
        for name, value in before.items():
            if name.partition("{")[0].endswith(("_total", "_count", "_bucket", "_sum")):
                assert after[name] >= value, name
    first, last = scrapes[0], scrapes[-1]
    by_source = [
        grown(first, last, f"pdx_prompt_tokens_by_source_total{{source={source}}}")
        for source in ("local", "remote", "unknown")
    ]
    assert sum(by_source) == grown(first, last, "pdx_prompt_tokens_total") == 210
    assert min(by_source[:2]) > 0
    assert by_source[2] == 0
    assert grown(first, last, "pdx_generated_tokens_total") == 40
    assert grown(first, last, "pdx_time_to_first_token_seconds_count") == 20
    assert grown(first, last, "pdx_inter_token_seconds_count") == 20
    assert grown(first, last, "pdx_request_seconds_count") == 20
    assert grown(first, last, "pdx_transfer_bytes_total") == 10_000
    assert grown(first, last, "pdx_transfer_seconds_sum") == 10
    assert grown(first, last, "pdx_queue_seconds_sum") == 5
    assert grown(first, last, "pdx_transfer_hidden_ratio_count") == 10
    assert grown(first, last, "pdx_transfer_retries_total") == 20
    assert grown(first, last, "pdx_streams_ended_total{end=length}") == 20


def test_stream_that_a_stop_string_cut_short_adds_up_too(
    frontend: Frontend,
    http: httpx.Client,
    make_say: Callable[..., object],
    make_update: Callable[..., StepFrame],
) -> None:
    frontend.script = make_say("ab", None)  # type: ignore[assignment]
    before = scrape(http)
    answer = http.post(COMPLETIONS, json={"prompt": [5, 6, 7], "stop": "b"}).json()
    stream_id = frontend.next(Submit).stream_id
    abort = frontend.next(Abort)
    assert (abort.stream_id, abort.why) == (stream_id, AbortReason.COMPLETE)
    timeline = RequestTimeline(prompt_len=3, output_len=2, prefiller="peer", transfer_bytes=70)
    frontend.send(make_update(stream_id, [], FinishReason.STOP, timeline))
    assert http.get(f"/pdx/requests/{answer['id']}").json()["output_len"] == 2
    after = scrape(http)
    assert grown(before, after, "pdx_prompt_tokens_total") == 3
    assert grown(before, after, "pdx_prompt_tokens_by_source_total{source=remote}") == 2
    assert grown(before, after, "pdx_prompt_tokens_by_source_total{source=local}") == 1
    assert grown(before, after, "pdx_prompt_tokens_by_source_total{source=unknown}") == 0
    assert grown(before, after, "pdx_transfer_bytes_total") == 70
    assert grown(before, after, "pdx_streams_ended_total{end=stop}") == 1


def test_failures_are_counted_once_by_their_kind(frontend: Frontend, http: httpx.Client) -> None:
    frontend.script = lambda s: [
        StreamFailed(stream_id=s.stream_id, http_status=503, kind="transfer_failed", message="x")
    ]
    before = scrape(http)
    http.post(COMPLETIONS, json={"prompt": [5]})
    http.post(COMPLETIONS, json={"prompt": []})
    after = scrape(http)
    assert grown(before, after, "pdx_failures_total{kind=transfer_failed}") == 1
    assert grown(before, after, "pdx_failures_total{kind=invalid_request_error}") == 1
    assert grown(before, after, "pdx_streams_ended_total{end=failed}") == 1
    counted = "pdx_http_requests_total{{route=/v1/completions,status={}}}"
    assert grown(before, after, counted.format(503)) == 1
    assert grown(before, after, counted.format(400)) == 1


def test_client_that_leaves_is_no_failure(frontend: Frontend, http: httpx.Client) -> None:
    before = scrape(http)
    with pytest.raises(httpx.ReadTimeout):
        http.post(COMPLETIONS, json={"prompt": [5]}, timeout=0.3)
    frontend.next(Submit)
    frontend.messages.get(timeout=10)  # its abort
    after = scrape(http)
    assert grown(before, after, "pdx_streams_ended_total{end=left}") == 1
    assert grown(before, after, "pdx_http_requests_total{route=/v1/completions,status=499}") == 1
    assert not any(grown(before, after, n) for n in after if n.startswith("pdx_failures_total"))


def test_unknown_paths_share_one_label(frontend: Frontend, http: httpx.Client) -> None:
    before = scrape(http)
    for path in ("/a", "/b/c", "/v1/nothing"):
        http.get(path)
    http.get("/pdx/requests/x")
    after = scrape(http)
    assert grown(before, after, "pdx_http_requests_total{route=other,status=404}") == 3
    routes = {name for name in after if name.startswith("pdx_http_requests_total")}
    assert not any("/b" in name or "nothing" in name for name in routes)
    assert any("/pdx/requests/{request_id:path}" in name for name in routes)
    http.get("/v1/models/org/tiny")
    assert scrape(http)["pdx_http_requests_total{route=/v1/models/{model:path},status=200}"] > 0


def test_counts_of_the_primary_are_shown_and_never_fall(
    frontend: Frontend, http: httpx.Client
) -> None:
    counts = {"pages_free": 7, "pages_leased": 2, "requests_waiting": 3, "imms_stale": 5}
    frontend.send(NodeStatus(healthy=True, detail="", counts=counts))
    while http.get("/health").json()["counts"] != counts:
        pass
    found = scrape(http)
    assert found["pdx_pages{state=free}"] == 7
    assert found["pdx_pages{state=leased}"] == 2
    assert found["pdx_node_requests{state=waiting}"] == 3
    assert found["pdx_node_events_total{event=imms_stale}"] == 5
    frontend.send(NodeStatus(healthy=True, detail="", counts={"free": 7, "imms_stale": 4}))
    while "imms_stale" in (now := http.get("/health").json()["counts"]) and now != {
        "free": 7,
        "imms_stale": 4,
    }:
        pass
    assert scrape(http)["pdx_node_events_total{event=imms_stale}"] == 5
    frontend.send(NodeStatus(healthy=True, detail="", counts={"free": 7}))
    while http.get("/health").json()["counts"] != {"free": 7}:
        pass
