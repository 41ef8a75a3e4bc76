from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx
import openai
from openai.types import Model
from pydantic import TypeAdapter

from pdx.request.stream import NodeStatus
from pdx.server.timelines import RecentTimelines

if TYPE_CHECKING:
    from conftest import Frontend
from pdx.metrics.timeline import RequestTimeline


def test_served_model_is_listed_and_found(frontend: Frontend, http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    [card] = listed["data"]
    TypeAdapter(Model).validate_python(card)
    assert card["id"] == "org/tiny"
    assert http.get("/v1/models/org/tiny").json() == card


def test_openai_client_lists_models(frontend: Frontend, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["org/tiny"]
    assert client.models.retrieve("org/tiny").id == "org/tiny"


def test_health_is_what_the_primary_last_said(frontend: Frontend, http: httpx.Client) -> None:
    response = http.get("/health")
    assert response.status_code == 200
    assert response.json() == {"status": "ok", "detail": "", "streams": 0, "counts": {"free": 7}}
    frontend.send(NodeStatus(healthy=False, detail="a worker stalls", counts={"free": 6}))
    while (response := http.get("/health")).status_code == 200:
        pass
    assert response.status_code == 503
    assert response.json()["detail"] == "a worker stalls"
    assert response.json()["counts"] == {"free": 6}
    frontend.send(NodeStatus(healthy=True, detail="", counts={"free": 7}))
    while http.get("/health").status_code != 200:
        pass


def test_timeline_is_found_by_the_api_id(talking: Frontend, http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": [[5], [6, 7]], "max_tokens": 3}).json()
    timeline = http.get(f"/pdx/requests/{answer['id']}").json()
    assert (timeline["prompt_len"], timeline["output_len"]) == (1, 3)
    second = http.get(f"/pdx/requests/{answer['id']}?choice=1").json()
    assert second["prompt_len"] == 2
    assert http.get(f"/pdx/requests/{answer['id']}?choice=2").status_code == 404


async def test_oldest_timelines_are_forgotten() -> None:
    recent = RecentTimelines(max_requests=2)
    timeline = RequestTimeline(prompt_len=1, output_len=1)
    for request_id in ("a", "b", "c"):
        recent.record(request_id, 0, timeline)
        recent.record(request_id, 1, timeline)
    assert await recent.find("a", 0) is None
    assert await recent.find("b", 1) is timeline
    assert await recent.find("c", 0) is timeline


async def test_expected_timeline_is_waited_for() -> None:
    recent = RecentTimelines()
    recent.expect("a", 0)
    assert await recent.find("a", 0, patience_s=0) is None
    found = asyncio.ensure_future(recent.find("a", 0, patience_s=30))
    timeline = RequestTimeline(prompt_len=1, output_len=1)
    recent.record("a", 0, timeline)
    assert await found is timeline
