"""The real frontend process, with a scripted primary on the other end of its socket."""

from __future__ import annotations

import json
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pdx.metrics.timeline import RequestTimeline
from pdx.metrics.transfers import Transfers
from pdx.request.batch import ScoredToken
from pdx.request.frames import (
    MAX_LOCAL_FRAME_BYTES,
    encode_frame,
    frame_decoder,
    recv_frame,
)
from pdx.request.request import FinishReason
from pdx.request.stream import (
    Abort,
    FromFrontend,
    FrontendConfig,
    FrontendReady,
    NodeStatus,
    StepFrame,
    StreamUpdate,
    Submit,
    TransfersAsked,
    TransfersTold,
)
from pdx.text.tokenizer import Tokenizer

CONTEXT_LEN = 128
VOCAB_SIZE = 512
EOS_ID = 2
TEXT = "Grüße, 日本 🙂! "
CHATML = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must be first') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Script = Callable[[Submit], Iterable[msgspec.Struct]]


def write_model_folder(folder: Path) -> Path:
    """Everything of a checkpoint but the weights: a tokenizer in which most characters span
    tokens."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["the capital of France is Paris"] * 3, trainer)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    generation = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def update(
    stream_id: int,
    token_ids: list[int],
    finish: FinishReason | None = None,
    timeline: RequestTimeline | None = None,
) -> StepFrame:
    """A frame with one update."""
    one = StreamUpdate(
        stream_id=stream_id, token_ids=token_ids, finish_reason=finish, timeline=timeline
    )
    return StepFrame(updates=[one])


class Frontend:
    """A started frontend. ``script`` answers submits as they come; without one the test does.
    ``num_files``: how many files it may have open."""

    def __init__(self, folder: Path, num_files: int | None = None, **overrides: Any) -> None:
        ours, theirs = socket.socketpair()
        self.sock = ours
        self.sock.settimeout(30)
        self.script: Script | None = None
        self.messages: queue.Queue[Any] = queue.Queue()
        command = [sys.executable, "-m", "pdx.server", "--fd", str(theirs.fileno())]
        if num_files is not None:
            command = ["sh", "-c", f'ulimit -n {num_files} && exec "$0" "$@"', *command]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self.config = self._config(folder, overrides)
        self.send(self.config)
        decoder = frame_decoder(FromFrontend)
        self.first = recv_frame(self.sock, decoder, MAX_LOCAL_FRAME_BYTES)
        self.sock.settimeout(None)
        self.thread = threading.Thread(target=self._read, args=(decoder,), daemon=True)
        self.thread.start()
        if isinstance(self.first, FrontendReady):
            self.send(NodeStatus(healthy=True, detail="", counts={"free": 7}))

    @staticmethod
    def _config(folder: Path, overrides: dict[str, Any]) -> FrontendConfig:
        fields: dict[str, Any] = {
            "model_folder": str(folder),
            "model_name": "org/tiny",
            "context_len": CONTEXT_LEN,
            "vocab_size": VOCAB_SIZE,
            "eos_token_ids": (EOS_ID,),
            "host": "127.0.0.1",
            "port": 0,
            "max_streams": 8,
        }
        return FrontendConfig(**(fields | overrides))

    @property
    def url(self) -> str:
        host = f"[{self.first.host}]" if ":" in self.first.host else self.first.host
        return f"http://{host}:{self.first.port}"

    def send(self, *messages: msgspec.Struct) -> None:
        self.sock.sendall(b"".join(encode_frame(message) for message in messages))

    def next(self, kind: type[Any], timeout: float = 10) -> Any:
        """The next message from the frontend, which must be of this kind."""
        message = self.messages.get(timeout=timeout)
        assert isinstance(message, kind), message
        return message

    def aborted(self, stream_id: int) -> None:
        assert self.next(Abort).stream_id == stream_id

    def stop(self) -> int:
        """Close the socket, as a primary does at its end; the frontend's exit code."""
        self.sock.shutdown(socket.SHUT_RDWR)
        code = self.process.wait(15)
        self.sock.close()
        self.thread.join(5)
        return code

    def _read(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        try:
            while True:
                message = recv_frame(self.sock, decoder, MAX_LOCAL_FRAME_BYTES)
                if isinstance(message, TransfersAsked):
                    told = Transfers(live=[], recent=[])
                    self.send(TransfersTold(query_id=message.query_id, transfers=told))
                    continue
                script = self.script
                if isinstance(message, Submit) and script is not None:
                    self.messages.put(message)
                    for answer in script(message):
                        self.send(answer)
                else:
                    self.messages.put(message)
        except (EOFError, OSError):
            pass


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="session")
def shared_frontend(folder: Path) -> Iterator[Frontend]:
    frontend = Frontend(folder)
    yield frontend
    assert frontend.stop() == 0


@pytest.fixture(scope="session")
def make_frontend() -> Callable[..., Frontend]:
    """Starts a frontend for a folder; the caller stops it."""
    return Frontend


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Frontend]]:
    """Starts frontends of the test's own, for tests in which they end."""
    started: list[Frontend] = []

    def start(**overrides: Any) -> Frontend:
        started.append(Frontend(overrides.pop("folder", folder), **overrides))
        return started[-1]

    yield start
    for frontend in started:
        if frontend.sock.fileno() >= 0:
            frontend.stop()


@pytest.fixture
def frontend(shared_frontend: Frontend, http: httpx.Client) -> Iterator[Frontend]:
    """The shared frontend, without a script. No test may leave a stream behind."""
    shared_frontend.script = None
    yield shared_frontend
    assert http.get("/health").json()["streams"] == 0
    while not shared_frontend.messages.empty():
        shared_frontend.messages.get()


@pytest.fixture
def talking(frontend: Frontend, tokenizer: Tokenizer) -> Frontend:
    """The shared frontend with a model that repeats TEXT, one token a step, until max_tokens."""
    frontend.script = talk(tokenizer)
    return frontend


@pytest.fixture(scope="session")
def http(shared_frontend: Frontend) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared_frontend.url, timeout=20) as client:
        yield client


@pytest.fixture(scope="session")
def client(shared_frontend: Frontend) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=shared_frontend.url + "/v1", api_key="x", max_retries=0, timeout=20
    ) as client:
        yield client


def talk(tokenizer: Tokenizer, text: str = TEXT) -> Script:
    """Repeats a text, one token an update, until max_tokens; scores what it is asked to score."""
    token_ids = tokenizer.encode(text)

    def script(submit: Submit) -> Iterable[msgspec.Struct]:
        count, prompt_len = submit.sampling.max_tokens, len(submit.token_ids)
        for idx in range(count):
            token_id = token_ids[idx % len(token_ids)]
            is_last = idx + 1 == count
            one = StreamUpdate(
                stream_id=submit.stream_id,
                token_ids=[token_id],
                logprobs=scores([token_id], submit.sampling.logprobs),
                prompt_logprobs=[]
                if idx
                else scores(submit.token_ids[1:], submit.sampling.prompt_logprobs),
                finish_reason=FinishReason.LENGTH if is_last else None,
                timeline=RequestTimeline(prompt_len=prompt_len, output_len=count)
                if is_last
                else None,
            )
            yield StepFrame(updates=[one])

    return script


def scores(token_ids: list[int], num_top: int | None) -> list[ScoredToken]:
    """Each token's log-probability is -its id / 1000; it is the most likely one."""
    if num_top is None:
        return []
    return [
        ScoredToken(
            token_id=i,
            logprob=-i / 1000,
            top=[((i + k) % VOCAB_SIZE, -i / 1000 - k) for k in range(num_top)],
        )
        for i in token_ids
    ]


def say(tokenizer: Tokenizer, text: str, finish: FinishReason | None) -> Script:
    """Says a text once, one token an update, whatever is asked; without a reason it then waits for
    the abort."""

    def script(submit: Submit) -> Iterable[msgspec.Struct]:
        for token_id in tokenizer.encode(text):
            yield update(submit.stream_id, [token_id])
        if finish is not None:
            yield update(submit.stream_id, [EOS_ID] if finish is FinishReason.STOP else [], finish)

    return script


@pytest.fixture(scope="session")
def make_update() -> Callable[..., StepFrame]:
    return update


@pytest.fixture(scope="session")
def text() -> str:
    return TEXT


def read_sse(response: httpx.Response) -> list[Any]:
    """The events of a whole stream; checks every byte of the framing. The last may be "[DONE]"."""
    body = response.read()
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert body.endswith(b"\n\n")
    events: list[Any] = []
    for frame in body.decode().removesuffix("\n\n").split("\n\n"):
        assert frame.startswith("data: "), frame
        assert "\n" not in frame
        payload = frame.removeprefix("data: ")
        events.append(payload if payload == "[DONE]" else json.loads(payload))
    return events


@pytest.fixture
def sse(http: httpx.Client) -> Callable[..., list[Any]]:
    """Posts a streamed request; its events without the [DONE] that must be last."""

    def post(path: str, **body: Any) -> list[Any]:
        with http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            *events, done = read_sse(response)
        assert done == "[DONE]"
        assert "[DONE]" not in events
        return events

    return post


@pytest.fixture(scope="session")
def make_talk(tokenizer: Tokenizer) -> Callable[[str], Script]:
    """Scripts that repeat a text until max_tokens."""
    return lambda text: talk(tokenizer, text)


@pytest.fixture(scope="session")
def make_say(tokenizer: Tokenizer) -> Callable[..., Script]:
    """Scripts that say a text once."""
    return lambda text, finish: say(tokenizer, text, finish)
