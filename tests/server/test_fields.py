"""Fields that clients of OpenAI, vLLM and SGLang send and that change nothing here; and fields that
nobody knows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from pdx.server.bodies import ChatBody, CompletionBody
from pdx.server.fields import IGNORED_FIELDS, NEUTRAL_FIELDS

if TYPE_CHECKING:
    from conftest import Frontend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OK: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
}
#: Writes what it is told about thinking, and has tags for it.
THINKING = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "[{{ reasoning_effort | default('-') }} {{ enable_thinking | default('-') }}]<think></think>"
)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "field",
    [
        {"kv_transfer_params": None},
        {"kv_transfer_params": {}},
        {"include_reasoning": True},
        {"include_reasoning": False},
        {"separate_reasoning": False},
        {"stream_reasoning": False},
        {"reasoning_effort": "low"},
        {"reasoning_effort": "none"},
        {"guided_json": None, "guided_decoding_backend": "auto"},
        {"structured_outputs": None, "vllm_xargs": {}, "logits_processors": []},
        {"bad_words": [], "allowed_token_ids": None, "return_tokens_as_token_ids": False},
        {"rid": "x", "lora_path": None, "return_hidden_states": False, "session_params": None},
        {"mm_processor_kwargs": {"x": 1}, "truncation_side": "left", "documents": []},
        {"bootstrap_host": None, "bootstrap_port": None, "bootstrap_room": None},
    ],
)
def test_field_that_changes_nothing_is_taken(
    talking: Frontend, http: httpx.Client, path: str, field: dict[str, Any]
) -> None:
    want = http.post(path, json=OK[path] | {"seed": 1}).json()["choices"]
    response = http.post(path, json=OK[path] | {"seed": 1} | field)
    assert response.status_code == 200, response.text
    assert response.json()["choices"] == want


#: What load generators and evaluation harnesses send, each in the shape of one of its requests.
CLIENT_BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        CHAT,
        {
            "model": "org/tiny",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_completion_tokens": 3,
            "stop": None,
            "ignore_eos": True,
        },
    ),
    (
        COMPLETIONS,
        {
            "model": "org/tiny",
            "prompt": "Hi",
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_tokens": 3,
            "stop": None,
            "ignore_eos": True,
        },
    ),
    (
        CHAT,
        {
            "model": "org/tiny",
            "messages": [{"role": "user", "name": "tester", "content": "Hi"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 3,
            "min_tokens": 3,
        },
    ),
    (
        COMPLETIONS,
        {
            "model": "org/tiny",
            "prompt": [[5, 6, 7]],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        },
    ),
    (
        CHAT,
        {
            "model": "org/tiny",
            "messages": [{"role": "user", "content": "Hi", "type": "text"}],
            "max_tokens": 3,
            "temperature": 0,
            "stop": ["\n"],
            "seed": 1234,
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), CLIENT_BODIES)
def test_what_clients_send_is_taken(
    talking: Frontend, http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.text.count('"error"') == 0


def test_every_field_of_openai_is_known() -> None:
    """Taken, or refused by name; none is "unknown"."""
    known = set(IGNORED_FIELDS) | set(NEUTRAL_FIELDS)
    chat = set(chat_create_params.CompletionCreateParamsBase.__annotations__)
    assert chat - known - set(ChatBody.model_fields) == set()
    completion = set(completion_create_params.CompletionCreateParamsBase.__annotations__)
    assert completion - known - set(CompletionBody.model_fields) == set()


def test_null_is_as_good_as_nothing_for_every_field(talking: Frontend, http: httpx.Client) -> None:
    """Clients that dump their models send it."""
    for path, kind in ((COMPLETIONS, CompletionBody), (CHAT, ChatBody)):
        names = {*kind.model_fields, *NEUTRAL_FIELDS, *IGNORED_FIELDS} - {"prompt", "messages"}
        response = http.post(path, json=dict.fromkeys(names) | OK[path])
        assert response.status_code == 200, response.text


@pytest.fixture(scope="module")
def thinking(
    make_frontend: Callable[..., Frontend], folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Frontend]:
    """A model whose template can be told how much to think."""
    own = tmp_path_factory.mktemp("thinking")
    (own / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (own / "tokenizer_config.json").write_text(json.dumps({"chat_template": THINKING}))
    frontend = make_frontend(own)
    yield frontend
    assert frontend.stop() == 0


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ({}, "[- -]"),
        ({"reasoning_effort": None}, "[- -]"),
        ({"reasoning_effort": "high"}, "[high -]"),
        ({"reasoning_effort": "none"}, "[none False]"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "[none True]",
        ),
    ],
)
def test_template_is_told_the_reasoning_effort(
    thinking: Frontend,
    make_say: Callable[..., Any],
    field: dict[str, Any],
    told: str,
) -> None:
    thinking.script = make_say("x", None)
    body = OK[CHAT] | {"return_token_ids": True, "stop": "x"} | field
    answer = httpx.post(thinking.url + CHAT, json=body, timeout=20).json()
    tokens = {"tokens": answer["prompt_token_ids"]}
    prompt = httpx.post(thinking.url + "/detokenize", json=tokens).json()["prompt"]
    assert prompt == f"Hi{told}<think></think>"


def test_reasoning_is_not_held_back_in_a_stream(
    thinking: Frontend, make_say: Callable[..., Any]
) -> None:
    thinking.script = make_say("<think>why</think>so.", None)
    body = OK[CHAT] | {"stop": ".", "stream_reasoning": False}
    response = httpx.post(thinking.url + CHAT, json=body | {"stream": True})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_reasoning"
    assert httpx.post(thinking.url + CHAT, json=body).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_in_the_content_where_the_client_wants_it_there(
    thinking: Frontend, make_say: Callable[..., Any], stream: bool
) -> None:
    thinking.script = make_say("<think>why</think>so.", None)
    body = OK[CHAT] | {"stop": ".", "separate_reasoning": False, "stream": stream}
    response = httpx.post(thinking.url + CHAT, json=body, timeout=20)
    assert response.status_code == 200
    assert "reasoning" not in response.text
    if not stream:
        message = response.json()["choices"][0]["message"]
        assert message["content"] == "<think>why</think>so"
    left_out = httpx.post(thinking.url + CHAT, json=body | {"include_reasoning": False}, timeout=20)
    assert left_out.status_code == 200
    assert "why" not in left_out.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [None, True, False])
def test_reasoning_is_left_out_where_it_is_not_wanted(
    thinking: Frontend, make_say: Callable[..., Any], stream: bool, include: bool | None
) -> None:
    thinking.script = make_say("<think>why</think>so.", None)
    body = OK[CHAT] | {"stop": ".", "include_reasoning": include, "stream": stream}
    response = httpx.post(thinking.url + CHAT, json=body, timeout=20)
    assert response.status_code == 200
    assert ("reasoning_content" in response.text) == (include is not False)
    assert "so" in response.text


@pytest.mark.parametrize(
    ("path", "field", "near"),
    [
        (COMPLETIONS, {"max_token": 5}, 'did you mean "max_tokens"?'),
        (CHAT, {"reasoning_efort": "low"}, 'did you mean "reasoning_effort"?'),
        (CHAT, {"stream_options": {"include_use": True}}, 'did you mean "include_usage"?'),
        (CHAT, {"stream_options": {"xyz": 1}}, "stream_options may have"),
        (COMPLETIONS, {"xyz": 1}, "--ignore-unknown-fields"),
    ],
)
def test_unknown_field_is_named_with_what_is_meant(
    frontend: Frontend, http: httpx.Client, path: str, field: dict[str, Any], near: str
) -> None:
    error = http.post(path, json=OK[path] | {"stream": True} | field).json()["error"]
    assert error["param"] == next(iter(field))
    assert near in error["message"]


def test_unknown_fields_are_dropped_with_one_line_for_each_name(
    start: Callable[..., Frontend], make_talk: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    frontend = start(ignore_unknown_fields=True)
    frontend.script = make_talk("x")
    post = f"{frontend.url}{COMPLETIONS}"
    options = {"stream": True, "stream_options": {"include_usage": True, "what": 1}}
    for _ in range(3):
        for field in ({"xyz": 1}, {"line\nbreak": 1}, options):
            response = httpx.post(post, json=OK[COMPLETIONS] | field, timeout=20)
            assert response.status_code == 200, response.text
    # What is known and not served, and what is wrong, is refused all the same.
    for field in ({"suffix": "x"}, {"temperature": 3}, {"logprobs": True}):
        assert httpx.post(post, json=OK[COMPLETIONS] | field).status_code == 400
    schemas = httpx.get(frontend.url + "/openapi.json").json()["components"]["schemas"]
    assert schemas["CompletionBody"]["additionalProperties"] is True
    for idx in range(0, 600, 100):
        many = {f"field{each}": 1 for each in range(idx, idx + 100)}
        assert httpx.post(post, json=OK[COMPLETIONS] | many, timeout=20).status_code == 200
    lines = capfd.readouterr().err.splitlines()
    first = ['"xyz"', '"line\\nbreak"', '"stream_options.what"']
    assert [name for line, name in zip(lines, first, strict=False) if name in line] == first
    assert len(lines) == 257
    assert "no more are" in lines[-1]
