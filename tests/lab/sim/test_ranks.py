"""What simulated ranks compute comes from the KV that lies in their pages, all of it."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from pdx.kv.layout import KvLayout, NodeLayout, kv_heads_of_rank
from pdx.lab.sim.loop import VirtualLoop
from pdx.lab.sim.model import SimulatedModel
from pdx.lab.sim.ranks import PassTimes, SimulatedMemory, SimulatedRanks
from pdx.lab.simulated_fabric import AddressSpace
from pdx.request.batch import Batch, RequestStart, RequestStep, StepOutput
from pdx.request.ids import IdArray

PROMPT = [7, 3, 9, 11, 5, 2]
PAGES = [4, 1]
NUM_HEADS = 2


def second_token(tp_size: int, spoil: Callable[[SimulatedMemory], None]) -> int:
    """What is sampled behind a prompt and its first token, after something was done to the KV."""
    rank = KvLayout(
        num_layers=2,
        num_kv_heads=len(kv_heads_of_rank(NUM_HEADS, tp_size, 0)),
        head_dim=2,
        page_size=4,
        num_pages=6,
        itemsize=4,
    )
    layout = NodeLayout(rank=rank, tp_size=tp_size, num_kv_heads=NUM_HEADS, alignment=64)
    memory = SimulatedMemory(AddressSpace(), layout)
    memory.words[:] = 12345  # whatever lay there before must not count
    start = RequestStart(
        request_id=1,
        token_ids=IdArray(PROMPT),
        num_computed=0,
        first_output_idx=0,
        sampling=None,
    )

    def batch(pass_idx: int, num_tokens: int) -> Batch:
        step = RequestStep(
            request_id=1,
            num_tokens=num_tokens,
            new_page_indices=PAGES if pass_idx == 1 else [],
            sample=True,
        )
        starts = [start] if pass_idx == 1 else []
        return Batch(pass_idx=pass_idx, starts=starts, steps=[step], removes=[])

    async def main() -> StepOutput:
        ranks = SimulatedRanks(loop, model(), memory, layout, PassTimes(), random.Random(1))
        first = await ranks.run(batch(1, len(PROMPT)))
        assert first.tokens[0].token_id == expected()[0]
        spoil(memory)
        return await ranks.run(batch(2, 1))

    loop = VirtualLoop(lambda process, what: pytest.fail(what))  # type: ignore[abstract]
    task = loop.create_task(main())
    assert loop.run_until(10**9, task.done)
    output: StepOutput = task.result()
    return output.tokens[0].token_id


def model() -> SimulatedModel:
    return SimulatedModel(num_layers=2, num_kv_heads=NUM_HEADS, context_len=64)


def expected() -> tuple[int, int]:
    first = model().token(model().state_after(PROMPT))
    return first, model().token(model().state_after([*PROMPT, first]))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_tokens_are_the_models(tp_size: int) -> None:
    assert second_token(tp_size, lambda memory: None) == expected()[1]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_each_word_of_a_requests_kv_counts_replicas_too(tp_size: int) -> None:
    page_words = 4 * 2 * max(1, NUM_HEADS // tp_size)
    num_words = 2 * 6 * page_words * tp_size
    used = 0
    for place in range(num_words):

        def spoil(memory: SimulatedMemory, place: int = place) -> None:
            memory.words[place] += np.uint64(1)

        used += second_token(tp_size, spoil) != expected()[1]
    assert used == len(PROMPT) * 2 * 2 * max(NUM_HEADS, tp_size)
