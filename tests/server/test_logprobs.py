"""Log-probabilities in OpenAI's shapes, of the output and of an echoed prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from pdx.request.stream import Submit
from pdx.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from conftest import Frontend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
#: In no training text: one token a byte.
FACE = "🙂"


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def logprobs_of(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["choices"][0]["logprobs"]
    assert len({len(entries) for entries in found.values()}) == 1
    return found


def test_completion_scores_each_token(
    frontend: Frontend, http: httpx.Client, make_talk: Callable[..., Any], tokenizer: Tokenizer
) -> None:
    frontend.script = make_talk("a b")
    ids = tokenizer.encode("a b")
    answer = complete(http, prompt="x", max_tokens=len(ids), logprobs=2)
    found = logprobs_of(answer)
    assert found["tokens"] == [tokenizer.decode([i]) for i in ids]
    assert found["token_logprobs"] == [-i / 1000 for i in ids]
    assert "".join(found["tokens"]) == answer["choices"][0]["text"]
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert answer["choices"][0]["text"][offset:].startswith(token)
    for top, token, logprob in zip(
        found["top_logprobs"], found["tokens"], found["token_logprobs"], strict=True
    ):
        assert len(top) == 2
        assert top[token] == logprob == max(top.values())


def test_drawn_token_is_there_even_where_none_of_the_likeliest_is_asked_for(
    talking: Frontend, http: httpx.Client
) -> None:
    found = logprobs_of(complete(http, prompt="x", max_tokens=3, logprobs=0))
    assert [list(top) for top in found["top_logprobs"]] == [[t] for t in found["tokens"]]


def test_part_of_a_character_is_shown_as_its_bytes(
    frontend: Frontend, http: httpx.Client, make_talk: Callable[..., Any]
) -> None:
    frontend.script = make_talk(f"é{FACE}!")
    found = logprobs_of(complete(http, prompt="x", max_tokens=7, logprobs=0))
    assert found["tokens"] == [
        "bytes:\\xc3",
        "bytes:\\xa9",
        "bytes:\\xf0",
        "bytes:\\x9f",
        "bytes:\\x99",
        "bytes:\\x82",
        "!",
    ]
    assert found["text_offset"] == [0, 0, 1, 1, 1, 1, 2]


def test_chat_scores_have_bytes(
    frontend: Frontend, http: httpx.Client, make_talk: Callable[..., Any]
) -> None:
    frontend.script = make_talk(f"a{FACE}")
    body = {"messages": USER, "max_tokens": 5, "logprobs": True, "top_logprobs": 3}
    answer = http.post(CHAT, json=body).json()
    TypeAdapter(ChatCompletion).validate_python(answer)
    content = answer["choices"][0]["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == f"a{FACE}"
    assert all(len(token["top_logprobs"]) == 3 for token in content)
    assert content[0]["token"] == "a"
    assert content[0]["top_logprobs"][0] == {
        "token": "a",
        "logprob": content[0]["logprob"],
        "bytes": [97],
    }


def test_streamed_scores_join_to_the_plain_ones(
    frontend: Frontend,
    http: httpx.Client,
    sse: Callable[..., list[Any]],
    make_talk: Callable[..., Any],
) -> None:
    frontend.script = make_talk(f"a {FACE} b")
    body: dict[str, Any] = {"max_tokens": 8, "logprobs": 1, "prompt": "x"}
    plain = logprobs_of(complete(http, **body))
    events = sse(COMPLETIONS, **body)
    for name, entries in plain.items():
        assert [v for e in events for v in e["choices"][0]["logprobs"][name]] == entries
    chat: dict[str, Any] = {"messages": USER, "max_tokens": 8, "logprobs": True}
    whole = http.post(CHAT, json=chat).json()["choices"][0]["logprobs"]["content"]
    chunks = sse(CHAT, **chat)
    for chunk in chunks:
        TypeAdapter(ChatCompletionChunk).validate_python(chunk)
    found = [e["choices"][0]["logprobs"] for e in chunks]
    assert [token for each in found if each for token in each["content"]] == whole


def test_answer_has_no_scores_unless_asked_for(talking: Frontend, http: httpx.Client) -> None:
    assert complete(http, prompt="x", max_tokens=1)["choices"][0]["logprobs"] is None
    chat = http.post(CHAT, json={"messages": USER, "max_tokens": 1}).json()
    assert chat["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["the capital", f"{FACE} is", "a"])
def test_echo_with_scores_scores_the_prompt(
    frontend: Frontend,
    http: httpx.Client,
    sse: Callable[..., list[Any]],
    make_talk: Callable[..., Any],
    tokenizer: Tokenizer,
    prompt: str,
    stream: bool,
) -> None:
    frontend.script = make_talk("xyz")
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 2, "logprobs": 1, "echo": True}
    if stream:
        choices = [e["choices"][0] for e in sse(COMPLETIONS, **body)]
        text = "".join(choice["text"] for choice in choices)
        found: dict[str, list[Any]] = {
            name: [v for c in choices for v in c["logprobs"][name]]
            for name in choices[0]["logprobs"]
        }
    else:
        answer = complete(http, **body)
        text, found = answer["choices"][0]["text"], logprobs_of(answer)
    ids = tokenizer.encode(prompt)
    assert text == prompt + "xy"
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert found["token_logprobs"][1 : len(ids)] == [-i / 1000 for i in ids[1:]]
    assert len(found["tokens"]) == len(ids) + 2
    assert found["text_offset"][len(ids) :] == [len(prompt), len(prompt) + 1]
    assert found["text_offset"] == sorted(found["text_offset"])


def test_echo_alone_puts_the_prompt_in_front(
    talking: Frontend, http: httpx.Client, sse: Callable[..., list[Any]], text: str
) -> None:
    answer = complete(http, prompt=["one", "two"], max_tokens=4, echo=True)
    assert [c["text"] for c in answer["choices"]] == ["one" + text[:3], "two" + text[:3]]
    assert answer["usage"]["completion_tokens"] == 8
    events = sse(COMPLETIONS, prompt="one", max_tokens=4, echo=True)
    assert "".join(e["choices"][0]["text"] for e in events) == "one" + text[:3]


def test_echoed_token_ids_are_shown_as_text(
    talking: Frontend, http: httpx.Client, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("one")
    answer = complete(http, prompt=ids, max_tokens=1, echo=True, logprobs=0)
    assert answer["choices"][0]["text"] == "oneG"
    assert logprobs_of(answer)["tokens"] == [*(tokenizer.decode([i]) for i in ids), "G"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_no_tokens_scores_only(
    talking: Frontend,
    http: httpx.Client,
    sse: Callable[..., list[Any]],
    tokenizer: Tokenizer,
    stream: bool,
) -> None:
    """The engine always generates one; nobody sees it."""
    body: dict[str, Any] = {"prompt": "the end", "max_tokens": 0, "logprobs": 1, "echo": True}
    if stream:
        *events, last = sse(COMPLETIONS, **body, stream_options={"include_usage": True})
        [choice], usage = [e["choices"][0] for e in events], last["usage"]
    else:
        answer = complete(http, **body)
        [choice], usage = answer["choices"], answer["usage"]
    assert (choice["text"], choice["finish_reason"]) == ("the end", "length")
    assert len(choice["logprobs"]["tokens"]) == len(tokenizer.encode("the end"))
    assert usage["completion_tokens"] == 0
    assert talking.next(Submit).sampling.max_tokens == 1


def test_openai_client_reads_scores(talking: Frontend, client: openai.OpenAI) -> None:
    completion = client.completions.create(
        model="org/tiny", prompt="Hi", max_tokens=3, logprobs=2, echo=True
    )
    found = completion.choices[0].logprobs
    assert found is not None and found.tokens is not None and found.token_logprobs is not None
    assert len(found.tokens) == len(found.token_logprobs)
    chat = client.chat.completions.create(
        model="org/tiny",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=3,
        logprobs=True,
        top_logprobs=2,
    )
    scored = chat.choices[0].logprobs
    assert scored is not None and scored.content is not None
    assert [len(token.top_logprobs) for token in scored.content] == [2, 2, 2]
