"""Llama against transformers in float32: whole, in chunks, layer by layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdx.kernels.batch import ForwardBatch
from pdx.kernels.ops import REFERENCE_OPS, Ops, ops_for
from tests.models.comparison import (
    LENGTHS,
    LOGIT_TOLERANCE,
    PAGE_SIZE,
    difference,
    loaded,
    run,
)
from tests.oracle.transformers_oracle import Oracle


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

    def append(
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv: Tensor,
        batch: ForwardBatch,
        *,
        kv_scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        REFERENCE_OPS.rope_kv_append(k, v, cos, sin, kv, batch, kv_scales=kv_scales)
        events.append("append")

    def attend(q: Tensor, kv: Tensor, batch: ForwardBatch, scale: float, **options: Any) -> Tensor:
        events.append("attend")
        return REFERENCE_OPS.paged_attention(q, kv, batch, scale, **options)

    ops = replace(REFERENCE_OPS, rope_kv_append=append, paged_attention=attend)
    model = loaded(tiny_llama, ops)
    with torch.inference_mode():
        model(
            torch.tensor(tiny_prompt_ids[:5]),
            torch.arange(5),
            torch.zeros(3, 1, 2, 2, PAGE_SIZE, 32),
            ForwardBatch.build(PAGE_SIZE, [(0, 5, [0])]),
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


def test_tiny_model_can_tell_right_from_wrong(
    tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    # A model that repeats one token, or that hardly decides, would pass any token comparison.
    for length in LENGTHS:
        text = tiny_oracle.greedy(tiny_prompt_ids[:length], 48)
        assert len(set(text.token_ids)) >= 35
        assert min(text.gaps) > 2e-3
