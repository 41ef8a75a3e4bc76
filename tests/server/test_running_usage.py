"""``stream_options.continuous_usage_stats``: each chunk of a stream tells its choice's usage."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Frontend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
BOTH = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_usage_grows_from_chunk_to_chunk(
    talking: Frontend, sse: Callable[..., list[Any]], path: str
) -> None:
    prompt = {"prompt": [5, 6, 7]} if path == COMPLETIONS else {"messages": USER}
    body = {**prompt, "max_tokens": 9, "return_token_ids": True}
    *chunks, last = sse(path, **body, stream_options=BOTH)
    num_told = 0
    for chunk in chunks:
        num_told += len(chunk["choices"][0].get("token_ids", []))
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert usage["completion_tokens"] == num_told
        assert usage["total_tokens"] == usage["prompt_tokens"] + num_told
    assert num_told == 9
    assert last["choices"] == []
    assert last["usage"] == chunks[-1]["usage"]


def test_each_choice_tells_its_own_usage(talking: Frontend, sse: Callable[..., list[Any]]) -> None:
    *chunks, last = sse(COMPLETIONS, prompt=[[5], [6, 7]], max_tokens=4, stream_options=BOTH)
    told = {chunk["choices"][0]["index"]: chunk["usage"] for chunk in chunks}
    assert [told[idx]["prompt_tokens"] for idx in (0, 1)] == [1, 2]
    assert [told[idx]["completion_tokens"] for idx in (0, 1)] == [4, 4]
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (3, 8)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"continuous_usage_stats": True}, "nothing"),
        ({"include_usage": False, "continuous_usage_stats": True}, "nothing"),
        ({"include_usage": True, "continuous_usage_stats": False}, "null"),
        ({"include_usage": True, "continuous_usage_stats": None}, "null"),
    ],
)
def test_it_only_adds_to_include_usage(
    talking: Frontend, sse: Callable[..., list[Any]], options: dict[str, Any], told: str
) -> None:
    chunks = sse(COMPLETIONS, prompt="Hi", max_tokens=3, stream_options=options)
    if told == "nothing":
        assert all("usage" not in chunk for chunk in chunks)
    else:
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert chunks[-1]["usage"]["completion_tokens"] == 3
