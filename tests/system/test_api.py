"""The API over a real pair, as clients use it: OpenAI's own client, plain HTTP, Prometheus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter

from tests.system.conftest import Generate, Pair
from tests.system.prompts import prompt_of

pytestmark = pytest.mark.parametrize("pair", ["tcp"], indirect=True)

CHAT = [{"role": "user", "content": "Write down every ship that passed, and the wind."}]
TEXT = "The lamp burns from dusk to dawn; it needs"


@pytest.fixture
def client(pair: Pair) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=pair.decoder.url, api_key="x", max_retries=0, timeout=60) as client:
        yield client
    pair.decoder.wait_clean()


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    [card] = client.models.list()
    assert client.models.retrieve(card.id) == card
    return card.id


def complete(pair: Pair, **fields: Any) -> dict[str, Any]:
    """A greedy completion of a text, checked against OpenAI's own type."""
    body = {"prompt": TEXT, "max_tokens": 24, "temperature": 0, "ignore_eos": True} | fields
    answer = pair.decoder.client.post(f"{pair.decoder.url}/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def stream(pair: Pair, path: str, **fields: Any) -> list[dict[str, Any]]:
    """All events of a streamed answer, which must end with [DONE]."""
    body = {"temperature": 0, "ignore_eos": True, "stream": True} | fields
    answer = pair.decoder.client.post(f"{pair.decoder.url}{path}", json=body)
    assert answer.status_code == 200, answer.text
    *frames, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def samples(pair: Pair) -> dict[str, float]:
    """Prometheus's samples by name and labels."""
    page = pair.decoder.client.get(pair.decoder.url.removesuffix("/v1") + "/metrics").text
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_streamed_chat_joins_to_the_plain_one(
    pair: Pair, client: openai.OpenAI, model: str
) -> None:
    plain = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Hello"}],
        max_completion_tokens=24,
        temperature=0,
        extra_body={"cache_salt": "plain"},
    )
    TypeAdapter(ChatCompletion).validate_python(plain.model_dump())
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
            max_completion_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"cache_salt": "streamed"},  # both compute the whole prompt
        )
    )
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == plain.choices[0].message.content
    assert plain.usage is not None
    assert chunks[-1].usage == plain.usage
    assert plain.usage.completion_tokens <= 24


@pytest.mark.parametrize("keep", [False, True])
def test_stop_string_ends_the_text_and_the_work(pair: Pair, keep: bool) -> None:
    full = complete(pair, max_tokens=48)["choices"][0]["text"]
    stop = full[9:13]
    fields: dict[str, Any] = {
        "max_tokens": 200,
        "stop": stop,
        "include_stop_str_in_output": keep,
        "return_token_ids": True,
    }
    answer = complete(pair, **fields)
    [choice] = answer["choices"]
    end = full.index(stop) + (len(stop) if keep else 0)
    assert (choice["text"], choice["finish_reason"]) == (full[:end], "stop")
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) < 48
    events = stream(pair, "/completions", prompt=TEXT, **fields)
    streamed = [event["choices"][0] for event in events]
    assert "".join(c["text"] for c in streamed) == choice["text"]
    # Far from done with 200 tokens: the abort has ended it.
    pair.decoder.wait_clean()


def test_choices_differ_and_repeat_with_their_seed(pair: Pair) -> None:
    fields: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 11, "return_token_ids": True}
    answer = complete(pair, **fields)
    TypeAdapter(Completion).validate_python(answer)
    texts = [tuple(choice["token_ids"]) for choice in answer["choices"]]
    assert len(set(texts)) == 3
    assert texts == [tuple(c["token_ids"]) for c in complete(pair, **fields)["choices"]]
    # Choice 1 is what the next seed gives alone.
    alone = complete(pair, **(fields | {"n": 1, "seed": 12}))["choices"][0]["token_ids"]
    assert texts[1] == tuple(alone)
    prompt_len = len(answer["choices"][0].get("prompt_token_ids", ()))
    assert answer["usage"]["prompt_tokens"] == prompt_len
    assert answer["usage"]["completion_tokens"] == 3 * 24


def test_greedy_choices_are_equal(pair: Pair) -> None:
    choices = complete(pair, n=3)["choices"]
    assert len({choice["text"] for choice in choices}) == 1


@pytest.mark.parametrize("stream_it", [False, True])
def test_first_token_that_stops_leaves_an_empty_text(
    pair: Pair, colocated: Generate, tiny_prompt_ids: list[int], stream_it: bool
) -> None:
    prompt = prompt_of(tiny_prompt_ids, 33)
    fields: dict[str, Any] = {"stop_token_ids": colocated(prompt, 1), "max_tokens": 20}
    if stream_it:
        choices = [e["choices"][0] for e in stream(pair, "/completions", prompt=prompt, **fields)]
    else:
        choices = complete(pair, prompt=prompt, **fields)["choices"]
    assert "".join(choice["text"] for choice in choices) == ""
    assert choices[-1]["finish_reason"] == "stop"


def test_bias_decides_every_token(pair: Pair) -> None:
    choice = complete(pair, logit_bias={"30": 100}, return_token_ids=True, logprobs=0)["choices"][0]
    assert choice["token_ids"] == [30] * 24
    assert len(set(choice["logprobs"]["tokens"])) == 1


@pytest.mark.parametrize("prompt", [TEXT, "日本語 🙂 café", "a"])
def test_scores_line_up_with_tokens_and_text(pair: Pair, prompt: str) -> None:
    answer = complete(pair, prompt=prompt, max_tokens=9, logprobs=3, echo=True)
    [choice] = answer["choices"]
    found = choice["logprobs"]
    num_tokens = answer["usage"]["total_tokens"]
    assert {len(entries) for entries in found.values()} == {num_tokens}
    assert choice["text"].startswith(prompt)
    assert found["token_logprobs"][0] is None
    assert all(logprob <= 0 for logprob in found["token_logprobs"][1:])
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert choice["text"].startswith(token, offset)
    # Greedy output is what was most likely.
    output = slice(answer["usage"]["prompt_tokens"], None)
    for top, logprob in zip(
        found["top_logprobs"][output], found["token_logprobs"][output], strict=True
    ):
        assert max(top.values()) == logprob


def test_scoring_alone_gives_the_prompts_scores(pair: Pair) -> None:
    with_output = complete(pair, max_tokens=1, logprobs=1, echo=True)["choices"][0]["logprobs"]
    alone = complete(pair, max_tokens=0, logprobs=1, echo=True)
    assert alone["choices"][0]["text"] == TEXT
    assert alone["usage"]["completion_tokens"] == 0
    scored = alone["choices"][0]["logprobs"]["token_logprobs"]
    assert scored[1:] == pytest.approx(with_output["token_logprobs"][1:-1], abs=1e-4)


def test_chat_scores_have_alternatives_and_bytes(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Hello"}],
        max_completion_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=4,
    )
    [choice] = answer.choices
    assert answer.usage is not None
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    assert all(len(token.top_logprobs) == 4 for token in choice.logprobs.content)
    joined = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
    assert joined.decode(errors="replace").startswith((choice.message.content or "")[:5])


def test_company_does_not_change_a_greedy_text(pair: Pair) -> None:
    prompts = [f"{word} is a kind of" for word in ("A ship", "Oil", "Fog", "A bell", "A gull")]
    alone = [complete(pair, prompt=prompt)["choices"][0]["text"] for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: complete(pair, prompt=prompt), prompts))
    assert [answer["choices"][0]["text"] for answer in answers] == alone


def test_same_client_ids_at_once_both_work(pair: Pair) -> None:
    def ask(prompt: str) -> httpx.Response:
        return httpx.post(
            f"{pair.decoder.url}/completions",
            json={"prompt": prompt, "request_id": "same", "max_tokens": 16, "temperature": 0},
            headers={"X-Request-Id": "same"},
            timeout=60,
        )

    alone = [ask(prompt).json()["choices"][0]["text"] for prompt in (TEXT, "A gull")]
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(ask, (TEXT, "A gull")))
    assert [answer.json()["choices"][0]["text"] for answer in answers] == alone
    assert len({answer.json()["id"] for answer in answers}) == 2
    assert all(answer.headers["x-request-id"] == "same" for answer in answers)


def test_clients_that_leave_free_their_place(pair: Pair) -> None:
    body = {"prompt": TEXT, "max_tokens": 400, "stream": True, "ignore_eos": True}
    for _ in range(8):
        with httpx.stream("POST", f"{pair.decoder.url}/completions", json=body) as answer:
            next(answer.iter_lines())
    assert len(complete(pair, max_tokens=4, return_token_ids=True)["choices"][0]["token_ids"]) == 4
    pair.decoder.wait_clean()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/chat/completions", {"messages": []}, 400),
        ("/chat/completions", {"messages": CHAT, "response_format": {"type": "json_object"}}, 400),
        ("/completions", {"prompt": TEXT, "max_tokens": 10**9}, 400),
        ("/completions", {"prompt": [5] * 100_000}, 400),
        ("/completions", {"prompt": TEXT, "n": 10_000}, 400),
        ("/completions", {"prompt": TEXT, "model": "no-such"}, 404),
    ],
)
@pytest.mark.parametrize("stream_it", [False, True])
def test_refusals_cost_the_prefiller_nothing(
    pair: Pair, path: str, body: dict[str, Any], status: int, stream_it: bool
) -> None:
    before = samples(pair)
    answer = pair.decoder.client.post(pair.decoder.url + path, json=body | {"stream": stream_it})
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    # No stream was made: nobody has been asked for work.
    after = samples(pair)
    streams = {name for name in after if name.startswith("pdx_streams_ended_total")}
    assert {name: before[name] for name in streams} == {name: after[name] for name in streams}
    assert after["pdx_http_requests_total " + f"/v1{path} {status}"] >= 1


def test_prompt_tokens_by_source_add_up(pair: Pair, tiny_prompt_ids: list[int]) -> None:
    before = samples(pair)
    for length in range(1, 21):
        complete(pair, prompt=prompt_of(tiny_prompt_ids, length, shift=length), max_tokens=2)
    after = samples(pair)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    counters = {n for n in grown if n.partition(" ")[0].endswith(("_total", "_count", "_sum"))}
    assert min(grown[name] for name in counters) >= 0
    sources = [v for n, v in grown.items() if n.startswith("pdx_prompt_tokens_by_source_total")]
    assert sum(sources) == grown["pdx_prompt_tokens_total"] == sum(range(1, 21))
    # The decoder computes the last prompt token of each itself.
    assert grown["pdx_prompt_tokens_by_source_total remote"] == sum(range(20))
    assert grown["pdx_generated_tokens_total"] == 40
    assert grown["pdx_transfer_bytes_total"] > 0
