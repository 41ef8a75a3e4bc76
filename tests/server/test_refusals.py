"""What is refused, and that it is refused before anyone is asked for work."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
import tokenizers

from pdx.request.stream import StepFrame, StreamFailed, Submit

if TYPE_CHECKING:
    from conftest import Frontend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OK = {"prompt": "Hi"}
USER = {"messages": [{"role": "user", "content": "Hi"}]}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    return error


def msgs(*contents: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": c} for c in contents]}


BAD_VALUES: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": [[5], []]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt"),
    (COMPLETIONS, {"prompt": 5}, "prompt"),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", 5]}, "prompt"),
    (COMPLETIONS, {"prompt": [5, True]}, "prompt"),
    (COMPLETIONS, {"prompt": [5, 1.5]}, "prompt"),
    (COMPLETIONS, {"prompt": [[5, "a"]]}, "prompt"),
    (COMPLETIONS, {"prompt": [5, -1]}, "prompt"),
    (COMPLETIONS, {"prompt": [5, 512]}, "prompt"),
    (COMPLETIONS, {"prompt": [[5]] * 9}, "prompt"),
    (COMPLETIONS, OK | {"max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, OK | {"max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, OK | {"max_tokens": 1.5}, "max_tokens"),
    (COMPLETIONS, OK | {"max_tokens": True}, "max_tokens"),
    (COMPLETIONS, OK | {"max_tokens": "5"}, "max_tokens"),
    (COMPLETIONS, OK | {"max_tokens": 10**9}, "max_tokens"),
    (COMPLETIONS, OK | {"temperature": -0.1}, "temperature"),
    (COMPLETIONS, OK | {"temperature": 2.1}, "temperature"),
    (COMPLETIONS, OK | {"temperature": "hot"}, "temperature"),
    (COMPLETIONS, OK | {"top_p": 0}, "top_p"),
    (COMPLETIONS, OK | {"top_p": 1.1}, "top_p"),
    (COMPLETIONS, OK | {"seed": 1.5}, "seed"),
    (COMPLETIONS, OK | {"stream": "yes"}, "stream"),
    (COMPLETIONS, OK | {"stream": None, "stream_options": {}}, "stream_options"),
    (COMPLETIONS, OK | {"stream": True, "stream_options": {"what": 1}}, "stream_options"),
    (COMPLETIONS, OK | {"model": 5}, "model"),
    (COMPLETIONS, OK | {"max_token": 5}, "max_token"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "x"}, "messages"),
    (CHAT, {"messages": ["x"]}, "messages"),
    (CHAT, {"messages": [{}]}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages"),
    (CHAT, {"messages": [{"role": 5, "content": "x"}]}, "messages"),
    (CHAT, msgs(5), "messages"),
    (CHAT, msgs(["x"]), "messages"),
    (CHAT, msgs([{"type": "image_url", "image_url": {"url": "x"}}]), "messages"),
    (CHAT, {"messages": [*msgs("x")["messages"], {"role": "system", "content": "x"}]}, "messages"),
    (CHAT, USER | {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, USER | {"max_tokens": 0}, "max_tokens"),
    (CHAT, USER | {"prompt": "x"}, "prompt"),
]

TOOL = {"type": "function", "function": {"name": "f"}}


def call(name: Any, arguments: Any) -> dict[str, Any]:
    """A history in which the assistant has called."""
    calls = [{"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}]
    return {"messages": [{"role": "assistant", "content": None, "tool_calls": calls}]}


BAD_VALUES += [
    (COMPLETIONS, OK | {"n": 0}, "n"),
    (COMPLETIONS, OK | {"n": 9}, "n"),
    (COMPLETIONS, OK | {"n": True}, "n"),
    (COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 3}, "n"),
    (COMPLETIONS, OK | {"best_of": 2}, "best_of"),
    (COMPLETIONS, OK | {"n": 2, "best_of": 1}, "best_of"),
    (COMPLETIONS, OK | {"stop": ""}, "stop"),
    (COMPLETIONS, OK | {"stop": ["a", ""]}, "stop"),
    (COMPLETIONS, OK | {"stop": [5]}, "stop"),
    (COMPLETIONS, OK | {"stop": ["a"] * 33}, "stop"),
    (COMPLETIONS, OK | {"stop": "a" * 1025}, "stop"),
    (COMPLETIONS, OK | {"stop_token_ids": [512]}, "stop_token_ids"),
    (COMPLETIONS, OK | {"stop_token_ids": [-1]}, "stop_token_ids"),
    (COMPLETIONS, OK | {"min_tokens": -1}, "min_tokens"),
    (COMPLETIONS, OK | {"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
    (COMPLETIONS, OK | {"top_k": -2}, "top_k"),
    (COMPLETIONS, OK | {"min_p": 1.1}, "min_p"),
    (COMPLETIONS, OK | {"presence_penalty": 2.1}, "presence_penalty"),
    (COMPLETIONS, OK | {"frequency_penalty": -2.1}, "frequency_penalty"),
    (COMPLETIONS, OK | {"repetition_penalty": 0}, "repetition_penalty"),
    (COMPLETIONS, OK | {"logit_bias": {"512": 1}}, "logit_bias"),
    (COMPLETIONS, OK | {"logit_bias": {"-1": 1}}, "logit_bias"),
    (COMPLETIONS, OK | {"logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETIONS, OK | {"logit_bias": {"5" * 5000: 1}}, "logit_bias"),
    (COMPLETIONS, OK | {"logit_bias": {"5": 101}}, "logit_bias"),
    (COMPLETIONS, OK | {"logit_bias": [5]}, "logit_bias"),
    (COMPLETIONS, OK | {"logprobs": 21}, "logprobs"),
    (COMPLETIONS, OK | {"logprobs": True}, "logprobs"),
    (CHAT, USER | {"logprobs": 3}, "logprobs"),
    (CHAT, USER | {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, USER | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, USER | {"tools": [{"type": "function"}]}, "tools"),
    (CHAT, USER | {"tools": [{"type": "x", "function": {"name": "f"}}]}, "tools"),
    (CHAT, USER | {"tools": [{"type": "function", "function": {"name": 5}}]}, "tools"),
    (CHAT, USER | {"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    (CHAT, USER | {"tools": [TOOL], "tool_choice": TOOL}, "tool_choice"),
    (CHAT, USER | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (CHAT, call(5, "{}"), "messages"),
    (CHAT, call("f", "{"), "messages"),
    (CHAT, call("f", "[]"), "messages"),
    (CHAT, call("f", None), "messages"),
    (CHAT, {"messages": [{"role": "assistant", "content": "x", "tool_calls": 5}]}, "messages"),
]

NOT_SERVED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"suffix": "x"}),
    (COMPLETIONS, {"prompt_logprobs": 1}),
    (COMPLETIONS, {"use_beam_search": True}),
    (COMPLETIONS, {"response_format": {"type": "json_object"}}),
    (CHAT, {"add_generation_prompt": False}),
    (CHAT, {"echo": True}),
    (CHAT, {"response_format": {"type": "json_object"}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
    (CHAT, {"kv_transfer_params": {"do_remote_prefill": True}}),
    (COMPLETIONS, {"guided_json": {"type": "object"}}),
    (COMPLETIONS, {"allowed_token_ids": [5]}),
    (CHAT, {"regex": "a+"}),
    (CHAT, {"lora_path": "x"}),
    (CHAT, {"reasoning_effort": "hard"}),
    (CHAT, {"modalities": ["text", "audio"]}),
]


@pytest.mark.parametrize(
    ("stop", "told"),
    [
        (["a"] * 33, "stop: List should have at most 32 items"),
        (["a", ""], "stop.1: String should have at least 1 character"),
        (5, "stop: Input should be a valid string, or a valid list, got 5"),
    ],
)
def test_what_is_told_of_a_field_of_several_types_is_what_is_wrong(
    http: httpx.Client, stop: object, told: str
) -> None:
    assert error_of(http.post(COMPLETIONS, json=OK | {"stop": stop}), 400)["message"].startswith(
        told
    )


@pytest.mark.parametrize("stream", [None, True])
@pytest.mark.parametrize(("path", "body", "param"), BAD_VALUES)
def test_bad_value_is_a_400_that_names_the_field(
    frontend: Frontend,
    http: httpx.Client,
    path: str,
    body: dict[str, Any],
    param: str,
    stream: bool | None,
) -> None:
    error = error_of(http.post(path, json={"stream": stream} | body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert frontend.messages.empty()


@pytest.mark.parametrize(("path", "field"), NOT_SERVED)
def test_field_that_is_not_served_is_a_400_that_names_it(
    frontend: Frontend, http: httpx.Client, path: str, field: dict[str, Any]
) -> None:
    [name] = field
    error = error_of(http.post(path, json=(OK if path == COMPLETIONS else USER) | field), 400)
    assert error["param"] == name
    assert name in error["message"]
    assert frontend.messages.empty()


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens"), [(128, 1), (127, 2), (1, 128), (100_000, 1), (128, None)]
)
def test_prompt_past_the_context_is_a_400_with_the_numbers(
    frontend: Frontend, http: httpx.Client, prompt_len: int, max_tokens: int | None
) -> None:
    body = {"prompt": [5] * prompt_len, "max_tokens": max_tokens}
    message = error_of(http.post(COMPLETIONS, json=body), 400)["message"]
    assert str(prompt_len) in message
    assert "128" in message
    assert frontend.messages.empty()


@pytest.mark.parametrize(
    "raw", [b"", b"{not json", b"[]", b'"x"', b"\xff", b'{"prompt": "\\ud800"}', b"[" * 100_000]
)
def test_body_that_is_no_json_object_is_a_400(
    frontend: Frontend, http: httpx.Client, raw: bytes
) -> None:
    error_of(http.post(COMPLETIONS, content=raw), 400)


def test_body_over_the_limit_is_a_413(frontend: Frontend, http: httpx.Client) -> None:
    raw = json.dumps({"prompt": "x" * (16 << 20)}).encode()
    error_of(http.post(COMPLETIONS, content=raw), 413)
    error_of(http.post(COMPLETIONS, content=iter([raw[: 1 << 20]] * 17)), 413)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_huge_text_is_refused_by_its_beginning(
    talking: Frontend, http: httpx.Client, path: str
) -> None:
    huge = "word " * 200_000
    error = error_of(
        http.post(path, json={"prompt": huge} if path == COMPLETIONS else msgs(huge)), 400
    )
    assert "first 2048 characters" in error["message"]
    assert "128" in error["message"]
    assert talking.messages.empty()
    assert http.post(COMPLETIONS, json=OK).status_code == 200


def test_long_text_of_few_tokens_is_not_refused_by_its_beginning(
    talking: Frontend, start: Callable[..., Frontend], folder: Path, tmp_path: Path
) -> None:
    """A text may have many characters and few tokens: here "a" times 128 is one."""
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_tokens(["a" * 128])
    inner.save(str(tmp_path / "tokenizer.json"))
    frontend = start(folder=tmp_path)
    frontend.script = talking.script
    with httpx.Client() as http:
        response = http.post(frontend.url + COMPLETIONS, json={"prompt": "a" * 128 * 50})
    assert response.json()["usage"]["prompt_tokens"] == 50


def test_ten_huge_prompts_at_once_are_refused_and_the_server_goes_on(
    talking: Frontend, http: httpx.Client
) -> None:
    body = {"prompt": "word " * (1 << 18)}
    with ThreadPoolExecutor(10) as pool:
        answers = [pool.submit(httpx.post, talking.url + COMPLETIONS, json=body) for _ in range(10)]
        for answer in answers:
            error_of(answer.result(), 400)
    assert talking.messages.empty()
    assert http.post(COMPLETIONS, json=OK).status_code == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": [[5]] * 100_000}, "more than 65536 lists and objects"),
        ({"prompt": "x", "metadata": [{"a": '[\\"['}] * 100_000}, "lists and objects"),
        ({"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(70_000)), 1)}, "65536 keys"),
        ({"prompt": [5] * (1 << 20) + [5, 5]}, "more than 1048576 values"),
        ({"prompt": ["a, b"] * (1 << 20) + ["c", "d"]}, "more than 1048576 values"),
        ({"prompt": [5] * 300_000}, "the prompt has 300000 tokens"),
        ({"prompt": '{"[\\,:' * 200_000}, "characters of the prompt"),  # in a text they are no JSON
    ],
)
def test_millions_of_values_are_refused_before_they_are_made(
    frontend: Frontend, http: httpx.Client, body: dict[str, Any], message: str
) -> None:
    assert message in error_of(http.post(COMPLETIONS, json=body), 400)["message"]
    assert frontend.messages.empty()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_other_model_is_a_404(
    frontend: Frontend, http: httpx.Client, path: str, stream: bool
) -> None:
    body = OK if path == COMPLETIONS else USER
    response = http.post(path, json=body | {"model": "no-such", "stream": stream})
    error = error_of(response, 404)
    assert error["code"] == "model_not_found"
    assert "no-such" in error["message"]
    assert frontend.messages.empty()


def test_paths_and_methods_have_errors_in_the_same_shape(
    frontend: Frontend, http: httpx.Client
) -> None:
    error_of(http.get("/v1/nothing"), 404)
    error_of(http.get("/"), 404)
    error_of(http.post(COMPLETIONS + "/", json=OK), 404)
    error_of(http.get(COMPLETIONS), 405)
    response = http.post("/v1/models", json={})
    error_of(response, 405)
    assert "GET" in response.headers["allow"]
    error_of(http.get("/v1/models/no-such"), 404)
    error_of(http.get("/pdx/requests/cmpl-nothing"), 404)
    error_of(http.get("/pdx/requests/cmpl-nothing?choice=x"), 400)


def test_openai_client_raises_its_own_errors(frontend: Frontend, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="no-such", prompt="Hi")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="org/tiny", messages=[])
    assert caught.value.param == "messages"


FAILURES = [(400, "invalid_request_error"), (499, "aborted"), (503, "transfer_failed")]


@pytest.mark.parametrize(("status", "kind"), FAILURES)
@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_token_has_its_status(
    frontend: Frontend, http: httpx.Client, status: int, kind: str, stream: bool
) -> None:
    frontend.script = lambda s: [
        StreamFailed(stream_id=s.stream_id, http_status=status, kind=kind, message="because")
    ]
    error = error_of(http.post(COMPLETIONS, json=OK | {"stream": stream}), status)
    assert (error["type"], error["message"]) == (kind, "because")
    frontend.next(Submit)
    assert frontend.messages.empty(), "a failed stream must not be aborted"


def test_failure_after_the_first_token_ends_a_stream_without_done(
    frontend: Frontend, http: httpx.Client, make_update: Callable[..., StepFrame]
) -> None:
    frontend.script = lambda s: [
        make_update(s.stream_id, [70]),
        StreamFailed(stream_id=s.stream_id, http_status=503, kind="worker_error", message="died"),
    ]
    response = http.post(COMPLETIONS, json=OK | {"stream": True})
    assert response.status_code == 200
    *_, last = [line for line in response.text.split("\n\n") if line]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["type"], error["message"]) == ("worker_error", "died")
    assert "[DONE]" not in response.text
    # A plain answer has not begun by then.
    error_of(http.post(COMPLETIONS, json=OK), 503)


def test_failure_of_one_choice_aborts_the_others(
    frontend: Frontend, http: httpx.Client, make_update: Callable[..., StepFrame]
) -> None:
    ids: list[int] = []

    def script(submit: Submit) -> list[Any]:
        ids.append(submit.stream_id)
        if len(ids) == 1:
            return [make_update(ids[0], [70])]
        return [StreamFailed(stream_id=ids[1], http_status=503, kind="x", message="because")]

    frontend.script = script
    error_of(http.post(COMPLETIONS, json={"prompt": [[5], [6]], "stream": True}), 503)
    assert [frontend.next(Submit).stream_id for _ in ids] == ids
    frontend.aborted(ids[0])
