from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import openai
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from pdx.request.stream import Submit
from pdx.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from conftest import Frontend

URL = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
RENDERED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def post(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post(URL, json=body)
    assert response.status_code == 200, response.text
    TypeAdapter(ChatCompletion).validate_python(response.json())
    return response.json()


def test_messages_go_through_the_template(
    talking: Frontend, http: httpx.Client, tokenizer: Tokenizer
) -> None:
    answer = post(http, messages=USER, max_tokens=4, return_token_ids=True)
    expected = tokenizer.encode(RENDERED, add_special_tokens=False)
    assert list(talking.next(Submit).token_ids) == expected == answer["prompt_token_ids"]
    assert len(answer["choices"][0]["token_ids"]) == 4
    assert answer["id"].startswith("chatcmpl-")
    assert answer["system_fingerprint"].startswith("pdx-")
    assert answer["usage"]["prompt_tokens"] == len(expected)


def test_text_parts_are_the_same_as_their_text(talking: Frontend, http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    post(http, messages=[{"role": "user", "content": parts}], max_tokens=1)
    post(http, messages=USER, max_tokens=1)
    assert talking.next(Submit).token_ids == talking.next(Submit).token_ids


def test_default_max_tokens_is_the_rest_of_the_context(
    talking: Frontend, http: httpx.Client
) -> None:
    post(http, messages=USER)
    submit = talking.next(Submit)
    assert submit.sampling.max_tokens == 128 - len(submit.token_ids)


def test_max_completion_tokens_is_the_newer_name(talking: Frontend, http: httpx.Client) -> None:
    assert post(http, messages=USER, max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    both = post(http, messages=USER, max_completion_tokens=3, max_tokens=9)
    assert both["usage"]["completion_tokens"] == 3


def test_stream_begins_with_the_role_and_joins_to_the_plain_text(
    talking: Frontend, http: httpx.Client, sse: Callable[..., list[Any]]
) -> None:
    plain = post(http, messages=USER, max_tokens=30)["choices"][0]
    events = sse(URL, messages=USER, max_tokens=30)
    chunks = [TypeAdapter(ChatCompletionChunk).validate_python(event) for event in events]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert all(delta.role is None for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == plain["message"]["content"]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert [reason for reason in reasons if reason] == ["length"] == [plain["finish_reason"]]
    assert reasons[-1] == "length"
    assert {(c.id, c.model, c.object) for c in chunks} == {
        (chunks[0].id, "org/tiny", "chat.completion.chunk")
    }


def test_streamed_ids_are_all_ids(
    talking: Frontend, sse: Callable[..., list[Any]], tokenizer: Tokenizer, text: str
) -> None:
    first, *events = sse(URL, messages=USER, max_tokens=9, return_token_ids=True)
    assert first["prompt_token_ids"] == tokenizer.encode(RENDERED, add_special_tokens=False)
    ids = [i for event in events for i in event["choices"][0]["token_ids"]]
    assert ids == tokenizer.encode(text)[:9]


def test_half_a_character_makes_no_event(
    talking: Frontend, sse: Callable[..., list[Any]], tokenizer: Tokenizer, text: str
) -> None:
    num_tokens = len(tokenizer.encode(text))
    events = sse(URL, messages=USER, max_tokens=num_tokens)
    contents = [e["choices"][0]["delta"].get("content") for e in events[1:]]
    assert "".join(contents) == text
    assert all(contents)
    assert len(contents) < num_tokens


def test_openai_client_streams_a_chat(talking: Frontend, client: openai.OpenAI, text: str) -> None:
    stream = client.chat.completions.create(
        model="org/tiny",
        messages=[{"role": "user", "content": "Hi"}],
        max_completion_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        user="me",
    )
    chunks = list(stream)
    got = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert got.startswith(text[:8])
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
