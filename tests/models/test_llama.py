"""Llama against transformers in float32, and proof that this comparison catches known mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdx.config.model import ModelConfig, RopeConfig
from pdx.kernels.ops import REFERENCE_OPS, Ops, ops_for
from pdx.kernels.paged_batch import PagedBatch
from pdx.models.registry import build_model
from pdx.weights.load import load_parameters
from tests.oracle.transformers_oracle import Oracle

PAGE_SIZE = 16
#: float32 sums in another order over three layers end within 1e-5 here; every mistake below is far
#: above.
LOGIT_TOLERANCE = 2e-4
LENGTHS = [1, 9, 33, 64, 170]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(
    folder: Path,
    chunks: list[list[int]],
    ops: Ops = REFERENCE_OPS,
    config: ModelConfig | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, list[int]]:
    """Logits [T, V] of one sequence run in chunks over poisoned pages, and the layers reported."""
    config = config or ModelConfig.load(folder)
    with torch.device("meta"):
        model = build_model(config, ops)
    load_parameters(model, folder, dtype, lambda done, total: None)
    total = sum(map(len, chunks))
    pages = list(range(-(-total // PAGE_SIZE)))[::-1]
    shape = (config.num_layers, len(pages), config.num_kv_heads, 2, PAGE_SIZE, config.head_dim)
    kv = torch.full(shape, float("nan"), dtype=dtype)
    ready: list[int] = []
    logits = []
    begin = 0
    with torch.inference_mode():
        for chunk in chunks:
            batch = PagedBatch.build(PAGE_SIZE, [(begin, len(chunk), pages)])
            positions = torch.arange(begin, begin + len(chunk))
            hidden = model(torch.tensor(chunk), positions, kv, batch, ready.append)
            logits.append(model.logits(hidden))
            begin += len(chunk)
    return torch.cat(logits), ready


def difference(
    folder: Path,
    oracle: Oracle,
    ids: list[int],
    ops: Ops = REFERENCE_OPS,
    config: ModelConfig | None = None,
) -> float:
    logits, _ = run(folder, [ids], ops, config)
    return float((logits - oracle.logits(ids)).abs().max())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("layout", ["tiny_llama", "tiny_llama_v5"])
@pytest.mark.parametrize("ops", [REFERENCE_OPS, ops_for("cpu")], ids=["reference", "cpu"])
def test_logits_equal_transformers(
    length: int,
    layout: str,
    ops: Ops,
    tiny_oracle: Oracle,
    tiny_prompt_ids: list[int],
    request: pytest.FixtureRequest,
) -> None:
    folder: Path = request.getfixturevalue(layout)
    assert difference(folder, tiny_oracle, tiny_prompt_ids[:length], ops) < LOGIT_TOLERANCE


@pytest.mark.parametrize("sizes", [[64, 64, 42], [1] * 20, [15, 1, 1, 16, 17], [33, 1, 1]])
def test_chunks_give_the_logits_of_the_whole(
    sizes: list[int], tiny_llama: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    ids = tiny_prompt_ids[: sum(sizes)]
    rest = iter(ids)
    chunks = [[next(rest) for _ in range(size)] for size in sizes]
    logits, _ = run(tiny_llama, chunks, ops_for("cpu"))
    assert float((logits - tiny_oracle.logits(ids)).abs().max()) < LOGIT_TOLERANCE


def test_layers_are_reported_in_order_once_a_pass(
    tiny_llama: Path, tiny_prompt_ids: list[int]
) -> None:
    ids = tiny_prompt_ids[:20]
    _, ready = run(tiny_llama, [ids[:16], ids[16:]])
    assert ready == [0, 1, 2, 0, 1, 2]


def test_layer_is_reported_after_its_append_and_before_its_attention(
    tiny_llama: Path, tiny_prompt_ids: list[int]
) -> None:
    events: list[str] = []

    def append(k: Tensor, v: Tensor, kv: Tensor, batch: PagedBatch) -> None:
        REFERENCE_OPS.kv_append(k, v, kv, batch)
        events.append("append")

    def attend(q: Tensor, kv: Tensor, batch: PagedBatch, scale: float) -> Tensor:
        events.append("attend")
        return REFERENCE_OPS.paged_attention(q, kv, batch, scale)

    config = ModelConfig.load(tiny_llama)
    with torch.device("meta"):
        model = build_model(
            config, replace(REFERENCE_OPS, kv_append=append, paged_attention=attend)
        )
    load_parameters(model, tiny_llama, torch.float32, lambda done, total: None)
    with torch.inference_mode():
        model(
            torch.tensor(tiny_prompt_ids[:5]),
            torch.arange(5),
            torch.zeros(3, 1, 2, 2, PAGE_SIZE, 32),
            PagedBatch.build(PAGE_SIZE, [(0, 5, [0])]),
            lambda layer_idx: events.append(f"ready {layer_idx}"),
        )
    assert events == [
        event for layer in range(3) for event in ("append", f"ready {layer}", "attend")
    ]


def test_bfloat16_stays_near(
    tiny_llama: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    ids = tiny_prompt_ids[:170]
    logits, _ = run(tiny_llama, [ids], ops_for("cpu"), dtype=torch.bfloat16)
    # bfloat16 keeps 8 bits; logits are of size 10.
    assert float((logits - tiny_oracle.logits(ids)).abs().max()) < 0.6


def test_rope_scaling_ignored_is_caught(
    tiny_llama: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    config = ModelConfig.load(tiny_llama)
    wrong = replace(config, rope=RopeConfig(theta=config.rope.theta, scaling=None))
    ids = tiny_prompt_ids[:170]
    assert difference(tiny_llama, tiny_oracle, ids, config=wrong) > 1000 * LOGIT_TOLERANCE


def test_rope_theta_missed_is_caught(
    tiny_llama: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    config = ModelConfig.load(tiny_llama)
    wrong = replace(config, rope=replace(config.rope, theta=10000.0))
    ids = tiny_prompt_ids[:170]
    assert difference(tiny_llama, tiny_oracle, ids, config=wrong) > 1000 * LOGIT_TOLERANCE


def test_interleaved_rope_pairs_are_caught(
    tiny_llama: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        halves = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
        return REFERENCE_OPS.rope(halves, cos, sin)

    ids = tiny_prompt_ids[:170]
    wrong = replace(REFERENCE_OPS, rope=interleaved)
    assert difference(tiny_llama, tiny_oracle, ids, wrong) > 1000 * LOGIT_TOLERANCE


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_wrong_norm_epsilon_is_caught(
    factor: float, tiny_llama: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    config = ModelConfig.load(tiny_llama)
    wrong = replace(config, rms_norm_eps=config.rms_norm_eps * factor)
    ids = tiny_prompt_ids[:170]
    assert difference(tiny_llama, tiny_oracle, ids, config=wrong) > 100 * LOGIT_TOLERANCE


def test_tiny_model_can_tell_right_from_wrong(
    tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    # A model that repeats one token, or that hardly decides, would pass any token comparison.
    for length in LENGTHS:
        text = tiny_oracle.greedy(tiny_prompt_ids[:length], 48)
        assert len(set(text.token_ids)) >= 35
        assert min(text.gaps) > 2e-3
