"""Stop strings end a choice at the token that completes them, in the answer and in the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pdx.request.request import FinishReason
from pdx.request.stream import Abort, StepFrame, Submit
from pdx.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from conftest import Frontend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
#: Its first "capital" is five tokens or so, whatever the little tokenizer makes of it.
WORDS = "the capital of France is Paris"


def num_tokens_until(tokenizer: Tokenizer, text: str, end: int) -> int:
    """Tokens that are needed for the first ``end`` characters."""
    ids = tokenizer.encode(text)
    return next(n for n in range(len(ids) + 1) if len(tokenizer.decode(ids[:n])) >= end)


def expect_abort(frontend: Frontend) -> None:
    """The stream that was submitted has been aborted."""
    assert frontend.next(Submit).stream_id == frontend.next(Abort).stream_id


@pytest.mark.parametrize("stop", [" of", "of France", ["zzz", "of"], "pital"])
@pytest.mark.parametrize("keep", [False, True])
def test_text_ends_at_the_stop_string(
    frontend: Frontend,
    http: httpx.Client,
    sse: Callable[..., list[Any]],
    make_say: Callable[..., Any],
    tokenizer: Tokenizer,
    stop: str | list[str],
    keep: bool,
) -> None:
    frontend.script = make_say(WORDS, None)
    found = stop if isinstance(stop, str) else stop[-1]
    end = WORDS.index(found) + len(found)
    body = {"prompt": "x", "max_tokens": 99, "stop": stop, "include_stop_str_in_output": keep}
    answer = http.post(COMPLETIONS, json=body).json()
    choice = answer["choices"][0]
    assert choice["text"] == WORDS[: end if keep else end - len(found)]
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == num_tokens_until(tokenizer, WORDS, end)
    expect_abort(frontend)
    events = sse(COMPLETIONS, **body)
    assert "".join(e["choices"][0]["text"] for e in events) == choice["text"]
    assert [e["choices"][0]["finish_reason"] for e in events][-1] == "stop"
    expect_abort(frontend)


def test_chat_has_stop_strings_too(
    frontend: Frontend, http: httpx.Client, make_say: Callable[..., Any]
) -> None:
    frontend.script = make_say(WORDS, None)
    body = {"messages": [{"role": "user", "content": "x"}], "stop": ["France"]}
    choice = http.post(CHAT, json=body).json()["choices"][0]
    assert choice["message"]["content"] == "the capital of "
    assert choice["finish_reason"] == "stop"
    expect_abort(frontend)


def test_stop_ends_one_choice_and_not_the_others(
    frontend: Frontend, http: httpx.Client, tokenizer: Tokenizer, make_update: Any
) -> None:
    frontend.script = lambda s: (
        [
            make_update(s.stream_id, [i])
            for i in tokenizer.encode("a stop b" if list(s.token_ids) == [5] else "a b")
        ]
        + [make_update(s.stream_id, [2], FinishReason.STOP)]
    )
    body = {"prompt": [[5], [6]], "max_tokens": 20, "stop": "stop"}
    answer = http.post(COMPLETIONS, json=body).json()
    assert [choice["text"] for choice in answer["choices"]] == ["a ", "a b"]
    first, second = frontend.next(Submit).stream_id, frontend.next(Submit).stream_id
    assert first != second
    # By the time its abort is written the engine may have ended it: then there is none.
    while not frontend.messages.empty():
        assert frontend.next(Abort).stream_id == first


def test_several_tokens_in_an_update_count_to_the_stop_only(
    frontend: Frontend, http: httpx.Client, tokenizer: Tokenizer, make_update: Any
) -> None:
    ids = tokenizer.encode(WORDS)
    frontend.script = lambda s: [make_update(s.stream_id, ids, FinishReason.LENGTH)]
    body = {"prompt": "x", "max_tokens": 99, "stop": "of", "return_token_ids": True}
    answer = http.post(COMPLETIONS, json=body).json()
    count = num_tokens_until(tokenizer, WORDS, WORDS.index("of") + 2)
    assert answer["choices"][0]["text"] == "the capital "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == count
    assert answer["choices"][0]["token_ids"] == ids[:count]


def test_stop_string_before_min_tokens_is_no_stop(
    frontend: Frontend, http: httpx.Client, make_say: Callable[..., Any], tokenizer: Tokenizer
) -> None:
    frontend.script = make_say("a b a c", None)
    count = num_tokens_until(tokenizer, "a b", 3)
    body = {"prompt": "x", "max_tokens": 99, "stop": "a", "min_tokens": count}
    answer = http.post(COMPLETIONS, json=body).json()
    assert answer["choices"][0]["text"] == "a b "
    expect_abort(frontend)


def test_what_only_looked_like_a_stop_comes_at_the_end(
    frontend: Frontend, sse: Callable[..., list[Any]], make_say: Callable[..., Any]
) -> None:
    frontend.script = make_say("one two", FinishReason.STOP)
    events = sse(COMPLETIONS, prompt="x", stop=["two three", " two t"])
    assert "".join(e["choices"][0]["text"] for e in events) == "one two"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_stop_string_across_the_bytes_of_a_character(
    frontend: Frontend, http: httpx.Client, make_say: Callable[..., Any]
) -> None:
    frontend.script = make_say("Grüße 🙂 日本", None)
    body = {"prompt": "x", "max_tokens": 60, "stop": "🙂 日"}
    assert http.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == "Grüße "
    expect_abort(frontend)


@pytest.mark.parametrize(("keep", "text"), [(False, "ab"), (True, "abc")])
def test_stop_token_may_stay_in_the_text(
    frontend: Frontend,
    http: httpx.Client,
    tokenizer: Tokenizer,
    make_update: Callable[..., StepFrame],
    keep: bool,
    text: str,
) -> None:
    *ids, last = tokenizer.encode("abc")
    frontend.script = lambda s: [make_update(s.stream_id, [*ids, last], FinishReason.STOP)]
    body = {"prompt": "x", "stop_token_ids": [last], "include_stop_str_in_output": keep}
    answer = http.post(COMPLETIONS, json=body).json()
    assert answer["choices"][0]["text"] == text
    assert answer["usage"]["completion_tokens"] == 3


def test_special_tokens_are_shown_where_asked_for(
    frontend: Frontend, http: httpx.Client, tokenizer: Tokenizer, make_update: Any
) -> None:
    ids = [*tokenizer.encode("a"), 1, *tokenizer.encode("b")]
    frontend.script = lambda s: [make_update(s.stream_id, ids, FinishReason.LENGTH)]
    for skip, text in ((True, "ab"), (False, "a<|im_start|>b"), (None, "ab")):
        body = {"prompt": "x", "skip_special_tokens": skip}
        assert http.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == text
