"""A rank on a GPU, end to end. Run with `-m gpu` on a machine that has one; proved nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdx.kv.progress import end_value
from pdx.request.batch import Batch, RequestStart
from pdx.request.request import SamplingParams
from tests.oracle.transformers_oracle import Oracle
from tests.runner.rank_process import RankProcess, rank_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
MODELS = [
    ("tiny_llama", "tiny_oracle"),
    ("tiny_qwen3", "qwen3_oracle"),
    ("tiny_qwen3_moe", "qwen3_moe_oracle"),
    ("tiny_deepseek", "deepseek_oracle"),
]


@pytest.mark.parametrize(("model", "oracle"), MODELS)
def test_float32_text_is_transformers(
    model: str, oracle: str, tiny_prompt_ids: list[int], request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(model)
    expected: Oracle = request.getfixturevalue(oracle)
    prompt = tiny_prompt_ids[:129]
    config = rank_config(folder, device="cuda", graph_batch=2)
    with RankProcess(config, timeout_s=200) as rank:
        ready = rank.wait_ready()
        assert ready.cuda_device == 0
        assert ready.graph_bytes is not None, "its steps are not captured"
        assert rank.progress_value == 0
        tokens = rank.generate(1, prompt, 24, list(range(64))[::-1])
        assert rank.progress_value == end_value(rank.pass_idx, _num_layers(folder))
    assert expected.greedy(prompt, 24).agrees_with([token.token_id for token in tokens])


@pytest.mark.parametrize(("model", "oracle"), MODELS)
def test_bfloat16_is_as_near_as_on_a_cpu(
    model: str, oracle: str, tiny_prompt_ids: list[int], request: pytest.FixtureRequest
) -> None:
    """Log-probabilities of the likeliest tokens: 0.38 is what bfloat16 costs these models."""
    folder: Path = request.getfixturevalue(model)
    prompt = tiny_prompt_ids[:65]
    sampling = SamplingParams(max_tokens=9, temperature=0.0, logprobs=5)
    found = []
    for device, dtype in (("cpu", "float32"), ("cuda", "bfloat16")):
        config = rank_config(folder, device=device, dtype=dtype)
        with RankProcess(config, timeout_s=200) as rank:
            rank.wait_ready()
            found += rank.generate(1, prompt, 1, list(range(64)), sampling)
    exact, rounded = (dict(token.top) for token in found)
    both = exact.keys() & rounded.keys()
    assert len(both) >= 3
    assert max(abs(exact[i] - rounded[i]) for i in both) < 0.5


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_qwen3"])
def test_a_pass_has_no_wait_but_its_last(model: str, request: pytest.FixtureRequest) -> None:
    from pdx.runner.device import RankDevice
    from tests.runner.kernel_runner import kernel_runner, steps

    device = RankDevice(torch.device("cuda", 0))
    rank = kernel_runner(request.getfixturevalue(model), device)
    rank.runner.warm_up()
    start = RequestStart(
        request_id=0,
        token_ids=list(range(5, 25)),
        num_computed=0,
        first_output_idx=0,
        sampling=SamplingParams(max_tokens=9, temperature=0.7, top_p=0.9, logprobs=2),
    )
    finish, checked = device.finish, []

    def finish_in_peace() -> None:
        torch.cuda.set_sync_debug_mode("default")
        finish()
        checked.append(True)

    device.finish = finish_in_peace  # type: ignore[method-assign]
    for pass_idx, (starts, num_tokens, pages, sample) in enumerate(
        [([start], 19, [4, 9], False), ([], 1, [], True), ([], 1, [], True)], start=1
    ):
        torch.cuda.set_sync_debug_mode("error")
        try:
            rank.runner.execute(
                Batch(
                    pass_idx=pass_idx,
                    starts=starts,
                    steps=steps(num_tokens, [pages], sample=sample),
                    removes=[],
                )
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert checked


def _num_layers(folder: Path) -> int:
    from pdx.checkpoint.model import ModelConfig

    return ModelConfig.load(folder).num_layers
