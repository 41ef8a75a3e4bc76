"""A request that loses its pages half-way draws the same tokens as one that keeps them."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from pdx.config.engine import EngineConfig
from pdx.engine.colocated_node import ColocatedNode
from pdx.engine.loading import load_model
from pdx.engine.local_frontend import LocalFrontend
from pdx.request.batch import ScoredToken
from pdx.request.request import SamplingParams
from pdx.scheduler.passes import ScheduledPass

NUM_PAGES, PAGE_SIZE, CHUNK = 10, 16, 32
PARAMS = [
    SamplingParams(max_tokens=60, temperature=1.2, top_p=0.95, seed=1, logprobs=2),
    SamplingParams(max_tokens=60, temperature=1.2, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(max_tokens=60, temperature=1.2, repetition_penalty=1.3, seed=3),
    SamplingParams(max_tokens=60, temperature=0.0, repetition_penalty=1.3, prompt_logprobs=1),
    SamplingParams(max_tokens=60, temperature=1.0, min_tokens=50, stop_token_ids=(7, 8), seed=5),
]


class Output:
    """What one request gave."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[ScoredToken] = []
        #: From position 1 on.
        self.prompt_scores: list[ScoredToken] = []


async def collect(frontend: LocalFrontend, prompt: list[int], sampling: SamplingParams) -> Output:
    output = Output()
    async for update in frontend.generate(prompt, sampling):
        output.token_ids += update.token_ids
        output.logprobs += update.logprobs
        output.prompt_scores += update.prompt_logprobs
    return output


async def test_preempted_requests_draw_what_they_would_have_drawn(
    tiny_llama: Path, tiny_prompt_ids: list[int]
) -> None:
    config = EngineConfig(
        dtype="float32",
        page_size=PAGE_SIZE,
        chunk_len=CHUNK,
        num_pages=NUM_PAGES,
        reserve_output_len=1,
        num_threads=1,
        poison=True,
    )
    prompts = [tiny_prompt_ids[5 * i : 5 * i + 20 + 9 * i] for i in range(len(PARAMS))]
    works = list(zip(prompts, PARAMS, strict=True))
    loaded = await load_model(tiny_llama, config, lambda message: None)
    try:
        frontend = LocalFrontend()
        node = ColocatedNode(loaded, model_name="tiny", frontend=frontend)
        async with frontend.serving(node):
            alone = [await collect(frontend, *work) for work in works]
            resumed = count_resumed(node)
            together = await asyncio.gather(*(collect(frontend, *work) for work in works))
    finally:
        await loaded.close()
    assert len(resumed) >= 3, "the pool is too large for this test"
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        assert [s.token_id for s in other.logprobs] == [s.token_id for s in one.logprobs]
    assert [s.token_id for s in together[3].prompt_scores] == prompts[3][1:]


def count_resumed(node: ColocatedNode) -> Counter[int]:
    """How often each request comes back with output, counted from now on."""
    counter: Counter[int] = Counter()
    schedule = node.scheduler.schedule

    def counting() -> ScheduledPass | None:
        scheduled = schedule()
        if scheduled is not None:
            starts = scheduled.batch.starts
            counter.update(start.request_id for start in starts if start.first_output_idx > 0)
        return scheduled

    node.scheduler.schedule = counting  # type: ignore[method-assign]
    return counter
