"""Request and API cases that users of disaggregated systems have met, on real nodes. A test's name
carries its case: C hangs and failures, F details of requests, G addresses and ports.
"""

from __future__ import annotations

import time

import pytest

from tests.system.conftest import Generate, Pair
from tests.system.prompts import prompt_of

PAGE, CONTEXT = 16, 512
#: A refusal may take this long, from request to answer.
REFUSED_S = 2.0


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33])
def test_prompt_around_the_length_of_a_page(
    pair: Pair, colocated: Generate, tiny_prompt_ids: list[int], length: int
) -> None:
    prompt = prompt_of(tiny_prompt_ids, length, shift=40)
    assert pair.decoder.complete(prompt, 64) == colocated(prompt, 64)
    pair.decoder.wait_clean()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("empty", [[], "", None])
def test_empty_prompt_is_a_400(pair: Pair, empty: list[int] | str | None, stream: bool) -> None:
    answer = pair.decoder.post(empty, 4, stream=stream)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("length", "max_tokens"), [(CONTEXT + 1, 1), (CONTEXT, 1), (CONTEXT - 12, 13)]
)
def test_prompt_or_output_over_the_context_is_refused_at_once(
    pair: Pair, tiny_prompt_ids: list[int], length: int, max_tokens: int
) -> None:
    began_s = time.monotonic()
    answer = pair.decoder.post(prompt_of(tiny_prompt_ids, length), max_tokens)
    assert time.monotonic() - began_s < REFUSED_S
    assert answer.status_code == 400
    assert f"{CONTEXT} tokens" in answer.json()["error"]["message"]
    fits = pair.decoder.post(prompt_of(tiny_prompt_ids, CONTEXT - 12), 12)
    assert fits.status_code == 200
    pair.decoder.wait_clean()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 2])
def test_exactly_max_tokens_come(
    pair: Pair, colocated: Generate, tiny_prompt_ids: list[int], max_tokens: int, stream: bool
) -> None:
    prompt = prompt_of(tiny_prompt_ids, 40)
    options = {"stream_options": {"include_usage": True}} if stream else {}
    status, body = pair.decoder.call(prompt, max_tokens, stream=stream, **options).answer()
    assert status == 200
    chunks = body if stream else [body]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    token_ids = [token for choice in choices for token in choice["token_ids"]]
    assert token_ids == colocated(prompt, max_tokens)
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 40,
        "completion_tokens": max_tokens,
        "total_tokens": 40 + max_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_are_a_400(pair: Pair, tiny_prompt_ids: list[int], stream: bool) -> None:
    answer = pair.decoder.post(prompt_of(tiny_prompt_ids, 40), 0, stream=stream)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_tokens"


def test_one_request_id_for_two_live_requests(
    pair: Pair, colocated: Generate, tiny_prompt_ids: list[int]
) -> None:
    """A client's id is a label: the ids in use are the server's own."""
    first, second = prompt_of(tiny_prompt_ids, 70), prompt_of(tiny_prompt_ids, 90, shift=9)
    same = {"x-request-id": "twice"}
    calls = [
        pair.decoder.call(prompt, 64, same, request_id="twice", stream=True)
        for prompt in (first, second)
    ]
    assert calls[0].token_ids() == colocated(first, 64)
    assert calls[1].token_ids() == colocated(second, 64)
    pair.decoder.wait_clean()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"max_tokens": CONTEXT}, 400, "invalid_request_error"),
        ({"model": "another"}, 404, "not_found_error"),
        ({"temperature": -1}, 400, "invalid_request_error"),
        ({"prompt": [1, 10**6]}, 400, "invalid_request_error"),
    ],
    ids=["max_tokens", "model", "temperature", "token id"],
)
def test_errors_have_their_status_and_shape_before_the_first_byte(
    pair: Pair,
    tiny_prompt_ids: list[int],
    fields: dict[str, object],
    status: int,
    kind: str,
    stream: bool,
) -> None:
    good = {"prompt": prompt_of(tiny_prompt_ids, 20), "max_tokens": 4, "stream": stream}
    answer = pair.decoder.client.post(f"{pair.decoder.url}/completions", json=good | fields)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == kind
    assert error["param"] in fields
