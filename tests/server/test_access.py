"""Keys, origins and limits."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from pdx.request.stream import Abort, StepFrame, Submit

if TYPE_CHECKING:
    from conftest import Frontend

Start = Callable[..., "Frontend"]
COMPLETIONS = "/v1/completions"
KEY = "sk-secret-ü"


@pytest.mark.parametrize("given", [None, "Bearer wrong", f"Basic {KEY}", KEY, "Bearer x"])
def test_without_the_key_nothing_but_health_answers(start: Start, given: str | None) -> None:
    frontend = start(api_key=KEY)
    headers = {} if given is None else {"Authorization": given.encode()}
    with httpx.Client(base_url=frontend.url, headers=headers) as http:
        for method, path in (("POST", COMPLETIONS), ("GET", "/v1/models"), ("GET", "/metrics")):
            response = http.request(method, path, json={"prompt": "Hi"})
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            assert KEY not in response.text
        for path in ("/health", "/livez", "/readyz"):
            assert http.get(path).status_code == 200
    assert frontend.messages.empty()


def test_a_node_that_would_take_no_request_is_alive_and_not_ready(start: Start) -> None:
    frontend = start(max_streams=0)
    with httpx.Client(base_url=frontend.url) as http:
        answers = [http.get(path) for path in ("/livez", "/readyz", "/health")]
    assert [answer.status_code for answer in answers] == [200, 503, 200]
    assert answers[1].text == "0 streams run, and no more are allowed\n"


def test_with_the_key_all_is_as_without(start: Start) -> None:
    frontend = start(api_key="sk-secret")
    raw = {"Authorization": f"Bearer {KEY}".encode()}
    assert httpx.get(start(api_key=KEY).url + "/v1/models", headers=raw).status_code == 200
    with openai.OpenAI(base_url=frontend.url + "/v1", api_key="sk-secret", max_retries=0) as good:
        assert [model.id for model in good.models.list()] == ["org/tiny"]
    with (
        openai.OpenAI(base_url=frontend.url + "/v1", api_key="sk-other", max_retries=0) as bad,
        pytest.raises(openai.AuthenticationError),
    ):
        bad.models.list()


def test_key_may_come_as_x_api_key(start: Start) -> None:
    url = start(api_key=KEY).url + "/v1/models"
    right, wrong = ({"x-api-key": key.encode()} for key in (KEY, "Bearer " + KEY))
    assert httpx.get(url, headers=right).status_code == 200
    assert httpx.get(url, headers=right | {"Authorization": b"Bearer other"}).status_code == 200
    assert httpx.get(url, headers=wrong).status_code == 401
    assert httpx.get(url, headers={"x-api-key": b""}).status_code == 401
    # Of several the first counts, as for the bearer token.
    assert httpx.get(url, headers=[("x-api-key", b"x"), *right.items()]).status_code == 401
    assert "x-api-key" in httpx.get(url).json()["error"]["message"]


def test_scripts_of_web_pages_are_off_by_default(frontend: Frontend, http: httpx.Client) -> None:
    response = http.get("/v1/models", headers={"Origin": "http://page.example"})
    assert "access-control-allow-origin" not in response.headers


def test_allowed_origin_may_ask_also_with_a_key(start: Start) -> None:
    frontend = start(cors_origins=("http://page.example",), api_key="k")
    asks = {
        "Origin": "http://page.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    preflight = httpx.options(frontend.url + COMPLETIONS, headers=asks)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "http://page.example"
    other = httpx.options(frontend.url + COMPLETIONS, headers=asks | {"Origin": "http://other"})
    assert other.status_code == 400
    # A refusal must be readable by the page, or its author sees nothing but a network error.
    refused = httpx.get(frontend.url + "/v1/models", headers={"Origin": "http://page.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "http://page.example"


@pytest.mark.parametrize("stream", [False, True])
def test_request_without_a_token_in_time_is_a_504_and_aborted(start: Start, stream: bool) -> None:
    frontend = start(request_timeout_s=0.3)
    body = {"prompt": "Hi", "stream": stream}
    response = httpx.post(frontend.url + COMPLETIONS, json=body, timeout=20)
    assert response.status_code == 504
    assert response.json()["error"]["type"] == "timeout"
    assert frontend.next(Submit).stream_id == frontend.next(Abort).stream_id


def test_stream_that_takes_too_long_ends_with_an_error(
    start: Start, make_update: Callable[..., StepFrame]
) -> None:
    frontend = start(request_timeout_s=1.0)
    frontend.script = lambda s: [make_update(s.stream_id, [70])]
    body = {"prompt": "Hi", "stream": True}
    response = httpx.post(frontend.url + COMPLETIONS, json=body, timeout=20)
    assert response.status_code == 200
    assert '"type":"timeout"' in response.text.split("\n\n")[-2]
    assert "[DONE]" not in response.text
    assert frontend.next(Submit).stream_id == frontend.next(Abort).stream_id


def test_body_that_does_not_come_in_time_is_a_408(start: Start) -> None:
    frontend = start(request_timeout_s=0.3)
    address = (frontend.first.host, frontend.first.port)
    with socket.create_connection(address, timeout=10) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        assert client.recv(1000).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize", "/detokenize"])
def test_body_limit_is_the_configured_one(start: Start, path: str) -> None:
    frontend = start(max_body_bytes=1000)
    body: dict[str, Any] = {"prompt": "x" * 1000, "tokens": []}
    response = httpx.post(frontend.url + path, json=body)
    assert response.status_code == 413
    assert "1000" in response.json()["error"]["message"]
