"""The Python API: colocated, and with a prefiller elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdx import LLM, SamplingParams
from pdx.errors import InvalidRequest
from tests.system.nodes import Prefiller

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
SETTINGS = {"dtype": "float32", "kv_memory_bytes": 16 << 20, "num_threads": 1, "chunk_len": 64}


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(tiny_llama, **SETTINGS) as llm:
        yield llm


def test_generations_come_in_the_order_of_their_prompts(llm: LLM) -> None:
    prompts = [[5, 6, 7], [8, 9], list(range(3, 150))]
    together = llm.generate(prompts, GREEDY, ignore_eos=True)
    assert [each.prompt_token_ids for each in together] == prompts
    assert [len(each.token_ids) for each in together] == [6, 6, 6]
    alone = [llm.generate([prompt], GREEDY, ignore_eos=True)[0] for prompt in prompts]
    assert [each.token_ids for each in alone] == [each.token_ids for each in together]


def test_one_text_is_one_prompt(llm: LLM) -> None:
    [output] = llm.generate("Hello there", GREEDY, ignore_eos=True)
    assert output.finish_reason == "length"
    assert output.prefiller is None
    assert isinstance(output.text, str)


def test_a_drawn_generation_repeats_with_its_seed(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=12, seed=7)
    first, again = (llm.generate("Hello", sampling, ignore_eos=True) for _ in range(2))
    assert first == again


def test_a_stop_token_ends_a_generation(llm: LLM) -> None:
    [output] = llm.generate([[5, 6, 7]], GREEDY, ignore_eos=True)
    stop = output.token_ids[2]
    [stopped] = llm.generate(
        [[5, 6, 7]], SamplingParams(max_tokens=6, temperature=0.0, stop_token_ids=(stop,))
    )
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids[-1] == stop
    assert len(stopped.token_ids) <= 3


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([10**6], "token id 1000000 is outside the vocabulary"),
        ([5] * 10**5, "exceed the context"),
    ],
)
def test_what_cannot_be_served_is_refused_and_the_next_prompt_is(
    llm: LLM, prompt: list[int], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate([prompt], GREEDY)
    assert llm.generate([[5]], GREEDY)


def test_a_prefiller_elsewhere_gives_the_colocated_tokens(
    llm: LLM, tiny_llama: Path, any_prefiller: Prefiller
) -> None:
    prompts = [list(range(3, 40)), list(range(60, 190))]
    with LLM(tiny_llama, prefillers=[any_prefiller.address], **SETTINGS) as split:
        outputs = split.generate(prompts, GREEDY, ignore_eos=True)
    assert all(output.prefiller for output in outputs)
    here = llm.generate(prompts, GREEDY, ignore_eos=True)
    assert [each.token_ids for each in outputs] == [each.token_ids for each in here]
