"""What a client asks of the sampler is what the engine is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pdx.errors import CheckpointError, InvalidRequest
from pdx.request.request import SamplingParams
from pdx.request.stream import FrontendConfig, Submit
from pdx.server.bodies import CompletionBody
from pdx.server.sampling import SamplingDefaults, sampling_of_choices
from pdx.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from conftest import Frontend

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def asked(frontend: Frontend, http: httpx.Client, **fields: Any) -> SamplingParams:
    response = http.post(COMPLETIONS, json={"prompt": "Hi", "max_tokens": 4} | fields)
    assert response.status_code == 200, response.text
    sampling: SamplingParams = frontend.next(Submit).sampling
    return sampling


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"top_k": 7}, {"top_k": 7}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"min_p": 0.25}, {"min_p": 0.25}),
        ({"presence_penalty": -2}, {"presence_penalty": -2.0}),
        ({"frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"logit_bias": {"5": -100, "7": 2.5}}, {"logit_bias": {5: -100.0, 7: 2.5}}),
        ({"min_tokens": 3}, {"min_tokens": 3}),
        ({"stop_token_ids": [9, 5]}, {"stop_token_ids": (2, 9, 5)}),
        ({"stop_token_ids": [9], "ignore_eos": True}, {"stop_token_ids": (9,)}),
        ({"ignore_eos": True}, {"stop_token_ids": ()}),
        ({"logprobs": 0}, {"logprobs": 0, "prompt_logprobs": None}),
        ({"logprobs": 3, "echo": True}, {"logprobs": 3, "prompt_logprobs": 3}),
        ({"echo": True}, {"logprobs": None, "prompt_logprobs": None}),
        ({}, {"logit_bias": {}, "min_p": 0.0, "repetition_penalty": 1.0, "top_k": 20}),
    ],
)
def test_field_reaches_the_engine(
    talking: Frontend, http: httpx.Client, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    sampling = asked(talking, http, **fields)
    assert {name: getattr(sampling, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 4}, 4),
        ({"logprobs": False}, None),
    ],
)
def test_chat_asks_for_scores_in_its_own_words(
    talking: Frontend, http: httpx.Client, fields: dict[str, Any], logprobs: int | None
) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    http.post(CHAT, json={"messages": messages, "max_tokens": 1} | fields)
    assert talking.next(Submit).sampling.logprobs == logprobs


@pytest.mark.parametrize(
    ("seed", "expected"), [(7, [7, 8, 9]), (2**64 - 2, [2**64 - 2, 2**64 - 1, 0])]
)
def test_choices_draw_from_neighbouring_seeds(
    talking: Frontend, http: httpx.Client, seed: int, expected: list[int]
) -> None:
    body = {"prompt": [[5], [6]], "max_tokens": 2, "n": 3, "seed": seed}
    answer = http.post(COMPLETIONS, json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    submits = [talking.next(Submit) for _ in range(6)]
    assert [list(submit.token_ids) for submit in submits] == [[5]] * 3 + [[6]] * 3
    assert [submit.sampling.seed for submit in submits] == expected * 2
    # A prompt counts once, however many choices it has.
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 12,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_drawn_seeds_differ_between_choices_and_requests(
    talking: Frontend, http: httpx.Client
) -> None:
    for _ in range(2):
        http.post(COMPLETIONS, json={"prompt": "Hi", "n": 4, "max_tokens": 1})
    assert len({talking.next(Submit).sampling.seed for _ in range(8)}) == 8


def test_each_choice_of_a_chat_begins_with_its_role(
    talking: Frontend, sse: Callable[..., list[Any]]
) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    events = sse(CHAT, messages=messages, n=3, max_tokens=3)
    for idx in range(3):
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == idx]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]


GIVEN = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GIVEN | {"do_sample": True}, GIVEN),
        (GIVEN, {}),
        (GIVEN | {"do_sample": False}, {}),
        ({"do_sample": True, "top_k": None, "temperature": 0}, {"temperature": 0.0}),
        ({"do_sample": True}, {}),
        ({}, {}),
    ],
)
def test_defaults_are_the_checkpoints_where_it_samples(
    tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert SamplingDefaults.from_folder(tmp_path) == SamplingDefaults()
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert SamplingDefaults.from_folder(tmp_path) == SamplingDefaults(**expected)


@pytest.mark.parametrize("text", ["{", "[]", '{"do_sample": true, "top_p": 2}'])
def test_damaged_defaults_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match="generation_config"):
        SamplingDefaults.from_folder(tmp_path)


def resolve(tokenizer: Tokenizer, num_eos: int, **fields: Any) -> SamplingParams:
    """Parameters for a model with 512 rows; the first ``num_eos`` tokens end a text."""
    config = FrontendConfig(
        model_folder="",
        model_name="m",
        context_len=99,
        vocab_size=512,
        eos_token_ids=tuple(range(num_eos)),
        host="",
        port=0,
        max_streams=1,
    )
    [sampling] = sampling_of_choices(
        CompletionBody(prompt="x", **fields),
        SamplingDefaults(),
        config,
        tokenizer,
        max_tokens=9,
        logprobs=None,
        prompt_logprobs=None,
    )
    return sampling


def num_tokens(tokenizer: Tokenizer) -> int:
    return sum(map(tokenizer.has_token, range(512)))


def test_a_minimum_that_no_token_can_reach_is_refused(tokenizer: Tokenizer) -> None:
    others = list(range(60, num_tokens(tokenizer)))
    with pytest.raises(InvalidRequest, match="min_tokens cannot be reached") as refused:
        resolve(tokenizer, 60, stop_token_ids=others, min_tokens=1)
    assert refused.value.param == "min_tokens"
    resolve(tokenizer, 60, stop_token_ids=others[:-1], min_tokens=1)
    resolve(tokenizer, 60, stop_token_ids=others, min_tokens=0)
    resolve(tokenizer, 60, stop_token_ids=others, min_tokens=1, ignore_eos=True)


def test_a_bias_of_an_id_without_token_is_refused(tokenizer: Tokenizer) -> None:
    past = num_tokens(tokenizer)
    bias = resolve(tokenizer, 1, logit_bias={str(past - 1): 1.0}).logit_bias
    assert bias == {past - 1: 1.0}
    with pytest.raises(InvalidRequest, match=f"{past} is padding") as refused:
        resolve(tokenizer, 1, logit_bias={str(past): 1.0})
    assert refused.value.param == "logit_bias"
