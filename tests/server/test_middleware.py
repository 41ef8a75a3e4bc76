"""What happens to every request, also to one that meets a bug of ours."""

from __future__ import annotations

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdx.metrics.serving import ServingMetrics
from pdx.server.middleware import FollowRequests


async def fail(request: Request) -> Response:
    raise ZeroDivisionError


async def test_an_answer_to_a_bug_has_its_id_and_is_counted_as_what_it_is() -> None:
    metrics = ServingMetrics(version="1", model="m", counts=dict, num_streams=lambda: 0)
    app = FollowRequests(
        Starlette(routes=[Route("/broken", fail)]), metrics, frozenset({"/broken"})
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as http:
        answer = await http.get("/broken", headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
    assert b'pdx_http_requests_total{route="/broken",status="500"} 1.0' in metrics.scrape()
