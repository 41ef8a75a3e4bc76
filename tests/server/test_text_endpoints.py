from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest

from pdx import __version__
from pdx.metrics.serving import ServingMetrics
from pdx.request.frames import encode_frame
from pdx.request.stream import FrontendConfig
from pdx.server.answer import Service
from pdx.server.app import build_app
from pdx.server.bodies import MAX_TEXT_CHARS
from pdx.server.channel import EngineChannel
from pdx.server.checks import RequestChecker
from pdx.server.sampling import SamplingDefaults
from pdx.server.timelines import RecentTimelines
from pdx.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from conftest import Frontend

USER = [{"role": "user", "content": "Hi"}]
RENDERED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_text_is_tokenized_as_a_completions_prompt(
    frontend: Frontend, http: httpx.Client, tokenizer: Tokenizer
) -> None:
    answer = http.post("/tokenize", json={"model": "org/tiny", "prompt": "the 🙂"}).json()
    ids = tokenizer.encode("the 🙂")
    assert answer == {"count": len(ids), "max_model_len": 128, "tokens": ids, "token_strs": None}
    assert frontend.messages.empty()


def test_longer_than_the_context_is_no_error_here(frontend: Frontend, http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "word " * 20_000}).json()
    assert answer["count"] > 20_000
    text = http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert text == {"prompt": "word " * 20_000}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, RENDERED),
        ({"add_generation_prompt": False}, RENDERED.removesuffix("<|im_start|>assistant\n")),
    ],
)
def test_chat_is_tokenized_as_its_prompt(
    frontend: Frontend, http: httpx.Client, fields: dict[str, Any], text: str
) -> None:
    body = {"messages": USER, "return_token_strs": True} | fields
    answer = http.post("/tokenize", json=body).json()
    assert len(answer["token_strs"]) == answer["count"]
    assert answer["token_strs"][0] == "<|im_start|>"
    back = http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "x", "messages": USER}, 400),
        ("/tokenize", {"prompt": 5}, 400),
        ("/tokenize", {"messages": []}, 400),
        ("/tokenize", {"prompt": "x", "what": 1}, 400),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": ["x"]}, 400),
        ("/detokenize", {"tokens": [512]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [10**30]}, 400),
    ],
)
def test_bad_input_is_refused(
    frontend: Frontend, http: httpx.Client, path: str, body: dict[str, Any], status: int
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == status
    assert response.json()["error"]["message"]


def test_empty_text_has_no_tokens(frontend: Frontend, http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"prompt": ""}).json()["count"] == 0
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_version_is_told(frontend: Frontend, http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": __version__}


def test_text_of_more_tokens_than_are_sent_back_is_refused(
    frontend: Frontend, http: httpx.Client
) -> None:
    response = http.post("/tokenize", json={"prompt": "\x01" * (1 << 20) + "\x01"})
    assert response.status_code == 400
    assert "the text has 1048577 tokens; at most 1048576" in response.json()["error"]["message"]


def test_huge_texts_take_little_memory(start: Callable[..., Frontend]) -> None:
    """Four at once, of a token a byte; the library takes more than a hundred bytes for a token."""
    frontend = start()
    with httpx.Client(base_url=frontend.url, timeout=60) as client, ThreadPoolExecutor(4) as pool:

        def post(path: str, body: dict[str, Any]) -> httpx.Response:
            return client.post(path, json=body)

        before = peak_kib(frontend)
        prompt = "~" * (4 << 20)
        chat = {"messages": [{"role": "user", "content": prompt}]}
        for path, body in (
            ("/tokenize", {"prompt": prompt}),
            ("/tokenize", chat),
            ("/v1/completions", {"prompt": prompt}),
            ("/v1/completions", {"prompt": ["x", prompt]}),
            ("/v1/chat/completions", chat),
        ):
            for answer in [pool.submit(post, path, body) for _ in range(4)]:
                assert answer.result().status_code == 400
                assert "characters of the" in answer.result().json()["error"]["message"]
    assert peak_kib(frontend) - before < 300 << 10


def test_text_is_bounded_in_characters_too(frontend: Frontend, http: httpx.Client) -> None:
    """A run of blanks has few tokens, and the library takes a hundred bytes for each character."""
    text = " " * (MAX_TEXT_CHARS + 1)
    chat = {"messages": [{"role": "user", "content": text}]}
    for path, body in (
        ("/tokenize", {"prompt": text}),
        ("/tokenize", chat),
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": ["x", text]}),
        ("/v1/chat/completions", chat),
    ):
        response = http.post(path, json=body)
        assert response.status_code == 400
        assert "characters; at most 6291456 characters and" in response.json()["error"]["message"]


def test_text_of_as_many_tokens_as_are_sent_back_is_none_too_long(
    frontend: Frontend, http: httpx.Client
) -> None:
    for prompt in ("~" * (1 << 20), "the capital " * 200_000):
        assert http.post("/tokenize", json={"prompt": prompt}).status_code == 200


def peak_kib(frontend: Frontend) -> int:
    status = Path(f"/proc/{frontend.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def test_body_that_does_not_come_in_time_is_a_408(start: Callable[..., Frontend]) -> None:
    frontend = start(request_timeout_s=0.3)
    address = (frontend.first.host, frontend.first.port)
    for path in ("/tokenize", "/detokenize"):
        with socket.create_connection(address, timeout=10) as client:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{"
            client.sendall(head.encode())
            assert client.recv(1000).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"prompt": "word " * 1000}), ("/detokenize", {"tokens": [5] * 5000})],
)
def test_work_that_takes_too_long_is_a_504(
    frontend: Frontend, tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    """The threads for long texts are busy for as long as the test lasts."""
    done = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(done.wait)
        try:
            response = asyncio.run(ask_an_app(frontend.config, tokenizer, pool, path, body))
        finally:
            done.set()
    assert response.status_code == 504
    assert response.json()["error"]["type"] == "timeout"


async def ask_an_app(
    config: FrontendConfig,
    tokenizer: Tokenizer,
    pool: ThreadPoolExecutor,
    path: str,
    body: dict[str, Any],
) -> httpx.Response:
    """The application in this process, in which a request may take 0.5 s."""
    config = msgspec.structs.replace(config, request_timeout_s=0.5)
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    with theirs:
        theirs.sendall(encode_frame(config))
        channel = EngineChannel(reader, writer)
        await channel.receive_config()
        checker = RequestChecker(
            config=config,
            tokenizer=tokenizer,
            template=None,
            defaults=SamplingDefaults(),
            pool=pool,
        )
        metrics = ServingMetrics(version="", model="", counts=dict, num_streams=int)
        service = Service(
            checker=checker, channel=channel, timelines=RecentTimelines(), metrics=metrics
        )
        transport = httpx.ASGITransport(build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
            response = await client.post(path, json=body)
        channel.close()
        await writer.wait_closed()
        return response
