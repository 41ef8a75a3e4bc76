from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from openai.types import Completion
from pydantic import TypeAdapter

from pdx.request.request import FinishReason
from pdx.request.stream import StepFrame, StreamUpdate, Submit
from pdx.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from conftest import Frontend

URL = "/v1/completions"


def strict(body: dict[str, Any]) -> Completion:
    """OpenAI's own type wants a finish reason in streamed chunks too, where its server sends
    null."""
    filled = [{**c, "finish_reason": c["finish_reason"] or "stop"} for c in body["choices"]]
    return TypeAdapter(Completion).validate_python({**body, "choices": filled})


def post(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post(URL, json=body)
    assert response.status_code == 200, response.text
    strict(response.json())
    return response.json()


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_exactly_max_tokens_come_out(
    talking: Frontend,
    http: httpx.Client,
    sse: Callable[..., list[Any]],
    max_tokens: int,
    stream: bool,
) -> None:
    body: dict[str, Any] = {"prompt": "Hi", "max_tokens": max_tokens, "return_token_ids": True}
    if stream:
        events = sse(URL, **body, stream_options={"include_usage": True})
        ids = [i for e in events for c in e["choices"] for i in c["token_ids"]]
        reasons = [c["finish_reason"] for e in events for c in e["choices"]]
        usage = events[-1]["usage"]
    else:
        answer = post(http, **body)
        ids, usage = answer["choices"][0]["token_ids"], answer["usage"]
        reasons = [answer["choices"][0]["finish_reason"]]
    assert len(ids) == max_tokens == usage["completion_tokens"]
    assert [r for r in reasons if r] == ["length"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + max_tokens
    assert talking.next(Submit).sampling.max_tokens == max_tokens


def test_stream_joins_to_the_plain_text(
    talking: Frontend, http: httpx.Client, sse: Callable[..., list[Any]], text: str
) -> None:
    plain = post(http, prompt="Hi", max_tokens=40)["choices"][0]["text"]
    events = sse(URL, prompt="Hi", max_tokens=40)
    for event in events:
        strict(event)
        assert "usage" not in event
    pieces = [event["choices"][0]["text"] for event in events]
    assert "".join(pieces) == plain
    assert plain.startswith(text)
    # Only what max_tokens cut in half at the very end may be broken.
    assert not any("\ufffd" in piece for piece in pieces[:-1])
    assert len({event["id"] for event in events}) == 1


def test_usage_is_in_the_last_event_only(talking: Frontend, sse: Callable[..., list[Any]]) -> None:
    *events, last = sse(URL, prompt=[5, 6, 7], max_tokens=3, stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_each_prompt_of_a_list_is_a_choice(
    talking: Frontend, http: httpx.Client, sse: Callable[..., list[Any]], tokenizer: Tokenizer
) -> None:
    answer = post(http, prompt=["One", "Two two"], max_tokens=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    prompts = [list(talking.next(Submit).token_ids) for _ in range(2)]
    assert prompts == [tokenizer.encode("One"), tokenizer.encode("Two two")]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert answer["usage"]["completion_tokens"] == 6
    events = sse(URL, prompt=[[5], [6, 7]], max_tokens=3)
    for idx in (0, 1):
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == idx]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
        assert "".join(c["text"] for c in mine) == answer["choices"][0]["text"]


@pytest.mark.parametrize(
    ("prompt", "expected"), [([5, 6, 7, 511], [[5, 6, 7, 511]]), ([[5], [6, 7]], [[5], [6, 7]])]
)
def test_token_ids_are_taken_as_they_are(
    talking: Frontend, http: httpx.Client, prompt: list[Any], expected: list[list[int]]
) -> None:
    answer = post(http, prompt=prompt, max_tokens=1, return_token_ids=True)
    assert [list(talking.next(Submit).token_ids) for _ in expected] == expected
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == expected


def test_streamed_ids_come_with_the_prompts(
    talking: Frontend, sse: Callable[..., list[Any]], tokenizer: Tokenizer, text: str
) -> None:
    events = sse(URL, prompt=[[5], [6]], max_tokens=4, return_token_ids=True)
    prompts: dict[int, list[int]] = {}
    ids: dict[int, list[int]] = {0: [], 1: []}
    for event in events:
        [choice] = event["choices"]
        ids[choice["index"]] += choice["token_ids"]
        if "prompt_token_ids" in choice:
            prompts[choice["index"]] = choice["prompt_token_ids"]
    assert prompts == {0: [5], 1: [6]}
    assert ids[0] == ids[1] == tokenizer.encode(text)[:4]


def test_frames_of_several_tokens_are_one_event_each(
    frontend: Frontend,
    sse: Callable[..., list[Any]],
    tokenizer: Tokenizer,
    make_update: Callable[..., StepFrame],
) -> None:
    ids = tokenizer.encode("one two")
    frontend.script = lambda s: [
        make_update(s.stream_id, ids[:3]),
        make_update(s.stream_id, ids[3:], FinishReason.LENGTH),
    ]
    events = sse(URL, prompt="Hi", max_tokens=len(ids), return_token_ids=True)
    assert [e["choices"][0]["token_ids"] for e in events] == [[], ids[:3], ids[3:]]


@pytest.mark.parametrize("num_before", [0, 3])
@pytest.mark.parametrize("stop_id", [2, 70])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_token_counts_but_has_no_text(
    start: Callable[..., Frontend],
    tokenizer: Tokenizer,
    make_update: Callable[..., StepFrame],
    num_before: int,
    stop_id: int,
    stream: bool,
) -> None:
    """70 is an ordinary token with a text of its own: some models end with one."""
    frontend = start(eos_token_ids=(2, 70))
    ids = tokenizer.encode("abc")[:num_before]
    frontend.script = lambda s: [
        *(make_update(s.stream_id, [i]) for i in ids),
        make_update(s.stream_id, [stop_id], FinishReason.STOP),
    ]
    client = openai.OpenAI(base_url=frontend.url + "/v1", api_key="x", max_retries=0)
    with client:
        if stream:
            chunks = list(
                client.completions.create(
                    model="org/tiny",
                    prompt="Hi",
                    stream=True,
                    stream_options={"include_usage": True},
                )
            )
            got = "".join(c.choices[0].text for c in chunks if c.choices)
            reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
            usage = chunks[-1].usage
        else:
            answer = client.completions.create(model="org/tiny", prompt="Hi")
            got, usage = answer.choices[0].text, answer.usage
            reasons = [answer.choices[0].finish_reason]
    assert got == tokenizer.decode(ids)
    assert [r for r in reasons if r] == ["stop"]
    assert usage is not None
    assert usage.completion_tokens == num_before + 1
    assert frontend.next(Submit).sampling.stop_token_ids == (2, 70)


def test_ignored_eos_is_no_stop_token(
    frontend: Frontend,
    http: httpx.Client,
    tokenizer: Tokenizer,
    make_update: Callable[..., StepFrame],
) -> None:
    a, b = tokenizer.encode("ab")
    frontend.script = lambda s: [make_update(s.stream_id, [a, 2, b], FinishReason.LENGTH)]
    answer = post(http, prompt="Hi", max_tokens=3, ignore_eos=True, return_token_ids=True)
    assert answer["choices"][0]["text"] == "ab"
    assert answer["choices"][0]["token_ids"] == [a, 2, b]
    assert frontend.next(Submit).sampling.stop_token_ids == ()


def test_what_the_client_leaves_out_comes_from_the_checkpoint(
    talking: Frontend, http: httpx.Client
) -> None:
    post(http, prompt="Hi")
    sampling = talking.next(Submit).sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (16, 0.6, 0.95)
    post(http, prompt="Hi")
    assert talking.next(Submit).sampling.seed != sampling.seed
    post(http, prompt="Hi", temperature=0, top_p=1, seed=None, max_tokens=None)
    sampling = talking.next(Submit).sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (16, 0, 1)


@pytest.mark.parametrize("seed", [0, 7, -1, 2**64 - 1, 2**70 + 3])
def test_seed_may_be_any_integer(talking: Frontend, http: httpx.Client, seed: int) -> None:
    post(http, prompt="Hi", max_tokens=1, seed=seed)
    assert talking.next(Submit).sampling.seed == seed % 2**64


def test_prompt_may_fill_the_context_but_for_one_token(
    talking: Frontend, http: httpx.Client
) -> None:
    post(http, prompt=[5] * 127, max_tokens=1)
    assert len(talking.next(Submit).token_ids) == 127
    # A default is cut to what fits, instead of refusing what was never asked for.
    post(http, prompt=[5] * 120)
    assert talking.next(Submit).sampling.max_tokens == 8


def test_fields_that_change_nothing_are_accepted(talking: Frontend, http: httpx.Client) -> None:
    post(
        http,
        model="org/tiny",
        prompt="Hi",
        max_tokens=2,
        n=1,
        best_of=1,
        echo=False,
        stop=None,
        logprobs=None,
        suffix=None,
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        top_k=-1,
        user="me",
        request_id="mine",
        stream=False,
        stream_options=None,
    )


def test_openai_client_reads_completions(
    talking: Frontend, client: openai.OpenAI, text: str
) -> None:
    answer = client.completions.create(model="org/tiny", prompt="Hi", max_tokens=8)
    chunks = client.completions.create(model="org/tiny", prompt="Hi", max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    assert text.startswith(answer.choices[0].text.rstrip("\ufffd"))


def test_streams_of_one_frame_do_not_mix(
    frontend: Frontend, http: httpx.Client, tokenizer: Tokenizer
) -> None:
    """One frame carries the updates of all streams of a step."""
    waiting: list[int] = []
    a, b = tokenizer.encode("ab")

    def script(submit: Submit) -> list[StepFrame]:
        waiting.append(submit.stream_id)
        if len(waiting) < 2:
            return []
        updates = [
            StreamUpdate(stream_id=sid, token_ids=[i], finish_reason=FinishReason.LENGTH)
            for sid, i in zip(reversed(waiting), (b, a), strict=True)
        ]
        return [StepFrame(updates=updates)]

    frontend.script = script
    answer = post(http, prompt=[[5], [6]], max_tokens=1)
    assert [choice["text"] for choice in answer["choices"]] == ["a", "b"]
