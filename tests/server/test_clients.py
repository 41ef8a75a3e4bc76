"""Clients that leave, come in numbers, or share a label."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pdx.metrics.timeline import RequestTimeline
from pdx.request.names import MAX_NAME_LEN
from pdx.request.request import FinishReason
from pdx.request.stream import StepFrame, Submit

if TYPE_CHECKING:
    from conftest import Frontend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]


def send_request(frontend: Frontend, path: str, body: dict[str, Any]) -> socket.socket:
    """A client that has sent its request and read nothing yet."""
    raw = json.dumps(body).encode()
    client = socket.create_connection((frontend.first.host, frontend.first.port), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    client.sendall(head.encode() + raw)
    return client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_client_that_leaves_before_the_first_token_is_aborted(
    frontend: Frontend, path: str, stream: bool
) -> None:
    prompt = {"prompt": "Hi"} if path == COMPLETIONS else {"messages": USER}
    client = send_request(frontend, path, prompt | {"stream": stream})
    submit = frontend.next(Submit)
    client.close()
    frontend.aborted(submit.stream_id)


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_later_is_aborted(
    frontend: Frontend, make_update: Callable[..., StepFrame], stream: bool
) -> None:
    client = send_request(frontend, COMPLETIONS, {"prompt": "Hi", "stream": stream})
    submit = frontend.next(Submit)
    frontend.send(make_update(submit.stream_id, [70]))
    if stream:
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    client.close()
    frontend.aborted(submit.stream_id)
    # An update that was under way hurts nobody.
    frontend.send(make_update(submit.stream_id, [70], FinishReason.LENGTH))


def test_leaving_aborts_every_choice_that_runs(
    frontend: Frontend, make_update: Callable[..., StepFrame]
) -> None:
    client = send_request(frontend, COMPLETIONS, {"prompt": [[5], [6], [7]], "stream": True})
    ids = [frontend.next(Submit).stream_id for _ in range(3)]
    frontend.send(make_update(ids[1], [70], FinishReason.LENGTH))
    frontend.send(make_update(ids[0], [70]), make_update(ids[2], [70]))
    assert client.recv(100).startswith(b"HTTP/1.1 200")
    client.close()
    frontend.aborted(ids[0])
    frontend.aborted(ids[2])


def test_no_byte_is_sent_before_every_choice_has_begun(
    frontend: Frontend, make_update: Callable[..., StepFrame]
) -> None:
    """A 200 says that the KV cache is complete, for all of them."""
    client = send_request(frontend, COMPLETIONS, {"prompt": [[5], [6]], "stream": True})
    first, second = (frontend.next(Submit).stream_id for _ in range(2))
    frontend.send(make_update(first, [70]), make_update(first, [70]))
    # /health is answered after the frame before it has been handled.
    assert httpx.get(frontend.url + "/health").json()["streams"] == 2
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.recv(1)
    client.settimeout(10)
    frontend.send(make_update(second, [70]))
    assert client.recv(100).startswith(b"HTTP/1.1 200")
    client.close()
    frontend.aborted(first)
    frontend.aborted(second)


def test_same_client_ids_at_once_are_two_requests(
    frontend: Frontend, make_update: Callable[..., StepFrame]
) -> None:
    def post(prompt: str) -> httpx.Response:
        return httpx.post(
            frontend.url + COMPLETIONS,
            json={"prompt": prompt, "request_id": "same", "user": "same", "max_tokens": 1},
            headers={"X-Request-Id": "same"},
            timeout=20,
        )

    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(post, prompt) for prompt in ("one", "two two")]
        submits = [frontend.next(Submit) for _ in answers]
        assert len({submit.stream_id for submit in submits}) == 2
        for submit in submits:
            token = [70 if len(submit.token_ids) < 5 else 71]
            frontend.send(make_update(submit.stream_id, token, FinishReason.LENGTH))
        got = [answer.result() for answer in answers]
    assert [answer.status_code for answer in got] == [200, 200]
    assert len({answer.json()["id"] for answer in got}) == 2
    assert all(answer.headers["x-request-id"] == "same" for answer in got)
    assert got[0].json()["choices"][0]["text"] != got[1].json()["choices"][0]["text"]


def test_label_comes_back_on_errors_too(frontend: Frontend, http: httpx.Client) -> None:
    response = http.post(COMPLETIONS, json={}, headers={"X-Request-Id": "mine"})
    assert (response.status_code, response.headers["x-request-id"]) == (400, "mine")


def test_every_answer_has_an_id_its_clients_or_one_made_here(http: httpx.Client) -> None:
    asked = [("GET", "/health"), ("GET", "/no-such"), ("POST", COMPLETIONS), ("PUT", "/metrics")]
    made = [http.request(method, path).headers["x-request-id"] for method, path in asked]
    assert len(set(made)) == len(made)
    assert all(len(each) == 32 and each.isalnum() for each in made)


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        (b"a b\tc\x7f\xff", "abc"),
        (b"x" * 4000, "x" * MAX_NAME_LEN),
        (b"org/one-2_3.4", "org/one-2_3.4"),
    ],
)
def test_an_id_that_would_spoil_a_log_line_is_cleaned(
    http: httpx.Client, sent: bytes, kept: str
) -> None:
    answer = http.post(COMPLETIONS, json={}, headers=[(b"x-request-id", sent)])
    assert answer.headers["x-request-id"] == kept


def test_a_timeline_is_found_by_either_id_and_an_id_sent_twice_means_the_newest(
    frontend: Frontend, http: httpx.Client, make_update: Callable[..., StepFrame]
) -> None:
    lens = iter([1, 2])

    def script(submit: Submit) -> list[StepFrame]:
        timeline = RequestTimeline(prompt_len=1, output_len=next(lens))
        assert submit.names.x_request_id == "team/7"
        return [make_update(submit.stream_id, [70], FinishReason.LENGTH, timeline)]

    frontend.script = script
    headers = {"X-Request-Id": "team/7"}
    ids = [http.post(COMPLETIONS, json={"prompt": [5]}, headers=headers).json()["id"] for _ in "ab"]
    found = [http.get(f"/pdx/requests/{each}").json()["output_len"] for each in (*ids, "team/7")]
    assert found == [1, 2, 2]


def test_streams_over_the_limit_are_a_503(
    frontend: Frontend, http: httpx.Client, make_update: Callable[..., StepFrame]
) -> None:
    waiting = send_request(frontend, COMPLETIONS, {"prompt": [[5]] * 7})
    ids = [frontend.next(Submit).stream_id for _ in range(7)]
    response = http.post(COMPLETIONS, json={"prompt": [[5], [6]]})
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "overloaded_error"
    frontend.script = lambda s: [make_update(s.stream_id, [70], FinishReason.LENGTH)]
    assert http.post(COMPLETIONS, json={"prompt": [5]}).status_code == 200
    frontend.next(Submit)
    waiting.close()
    for stream_id in ids:
        frontend.aborted(stream_id)


def test_many_streams_at_once_are_all_whole(talking: Frontend, text: str) -> None:
    def read(idx: int) -> str:
        body = {"messages": USER, "max_tokens": 40 + idx, "stream": True}
        with httpx.stream("POST", talking.url + CHAT, json=body, timeout=30) as response:
            lines = [line[6:] for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
        return "".join(delta.get("content") or "" for delta in deltas)

    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(read, range(24)):
            assert (text * 9).startswith(got.rstrip("\ufffd"))
            assert len(got) > 15


def test_stream_goes_on_while_a_huge_text_is_tokenized(
    frontend: Frontend, make_update: Callable[..., StepFrame]
) -> None:
    done = threading.Event()
    gaps: list[float] = []

    def feed() -> None:
        submit = frontend.next(Submit)
        while not done.wait(0.005):
            frontend.send(make_update(submit.stream_id, [70]))
        frontend.send(make_update(submit.stream_id, [70], FinishReason.LENGTH))

    def read() -> None:
        body = {"prompt": "Hi", "max_tokens": 99, "stream": True}
        with httpx.stream("POST", frontend.url + COMPLETIONS, json=body, timeout=30) as response:
            last = time.monotonic()
            for _ in response.iter_lines():
                gaps.append(time.monotonic() - last)
                last += gaps[-1]

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(feed), pool.submit(read)]
        start = time.monotonic()
        answer = httpx.post(
            frontend.url + "/tokenize", json={"prompt": "word " * 200_000}, timeout=40
        )
        took = time.monotonic() - start
        done.set()
        for each in running:
            each.result()
    assert answer.json()["count"] >= 200_000
    # On the event loop the stream would wait for all of it.
    assert max(gaps) < took / 2


def test_connection_is_kept_alive(talking: Frontend, http: httpx.Client) -> None:
    ports = set()
    for stream in (False, True, False):
        body = {"prompt": "Hi", "max_tokens": 2, "stream": stream}
        with http.stream("POST", COMPLETIONS, json=body) as response:
            response.read()
            stream_info = response.extensions["network_stream"]
            ports.add(stream_info.get_extra_info("client_addr"))
    assert len(ports) == 1
