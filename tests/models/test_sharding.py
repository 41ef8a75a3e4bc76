"""A model that is split over ranks gives the logits of the whole one; KV heads lie as planned.

Ranks are threads here that meet at a barrier; tests/system/test_sharding.py runs real ones.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdx.checkpoint.model import ModelConfig
from pdx.errors import ConfigError
from pdx.kernels.batch import ForwardBatch
from pdx.kernels.ops import Ops, ops_for
from pdx.kv.geometry import check_tp_size
from pdx.kv.layout import kv_heads_of_rank
from tests.models.comparison import LOGIT_TOLERANCE, PAGE_SIZE, empty_kv, loaded, run


class ThreadGroup:
    """A TpGroup of threads: everyone puts its part down, and takes all when all are there."""

    def __init__(self, rank: int, parts: list[Tensor], barrier: threading.Barrier) -> None:
        self.rank = rank
        self._parts = parts
        self._barrier = barrier

    @property
    def size(self) -> int:
        return len(self._parts)

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def concat(self, x: Tensor, sizes: list[int]) -> Tensor:
        parts = self._exchange(x)
        assert [part.shape[-1] for part in parts] == sizes
        return torch.cat(parts, -1)

    def from_leader(self, values: Tensor) -> Tensor:
        return self._exchange(values)[0]

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._parts[self.rank] = x
        self._barrier.wait(10)
        parts = list(self._parts)
        self._barrier.wait(10)
        return parts


def run_sharded(
    folder: Path, ids: list[int], tp_size: int, ops: Ops
) -> list[tuple[Tensor, Tensor]]:
    """Logits and KV memory of each rank."""
    config = ModelConfig.load(folder)
    num_pages = -(-len(ids) // PAGE_SIZE)
    parts, barrier = [torch.empty(0)] * tp_size, threading.Barrier(tp_size)

    @torch.inference_mode()
    def one_rank(rank: int) -> tuple[Tensor, Tensor]:
        model = loaded(folder, ops, tp=ThreadGroup(rank, parts, barrier))
        kv = empty_kv(config, num_pages, tp_size=tp_size)
        batch = ForwardBatch.build(PAGE_SIZE, [(0, len(ids), list(range(num_pages)))])
        positions = torch.arange(len(ids))
        hidden = model(torch.tensor(ids), positions, kv, batch, lambda layer_idx: None)
        return model.logits(hidden), kv

    with ThreadPoolExecutor(tp_size) as threads:
        return list(threads.map(one_rank, range(tp_size)))


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize(
    "folder",
    [
        "tiny_llama",
        "tiny_qwen3",
        "tiny_qwen3_untied",
        "tiny_qwen3_moe",
        "tiny_deepseek",
        "tiny_deepseek_plain",
        "tiny_deepseek_float8",
    ],
)
def test_ranks_together_give_the_logits_and_kv_of_one(
    tp_size: int, folder: str, tiny_prompt_ids: list[int], request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(folder)
    config = ModelConfig.load(path)
    ids, ops = tiny_prompt_ids[:33], ops_for("cpu")
    whole, _ = run(path, [ids], ops)
    [(_, whole_kv)] = run_sharded(path, ids, 1, ops)
    for rank, (logits, kv) in enumerate(run_sharded(path, ids, tp_size, ops)):
        assert float((logits - whole).abs().max()) < LOGIT_TOLERANCE
        heads = list(kv_heads_of_rank(config.num_kv_heads, tp_size, rank))
        torch.testing.assert_close(
            kv, whole_kv[:, :, heads], atol=LOGIT_TOLERANCE, rtol=0, equal_nan=True
        )


def test_an_uneven_vocabulary_is_split_all_the_same(
    tiny_llama: Path, tiny_prompt_ids: list[int], tmp_path: Path
) -> None:
    from tests.oracle import tiny_checkpoint

    folder = tmp_path / "odd"
    vocab_size = tiny_checkpoint.VOCAB_SIZE - 3
    _cut_vocabulary(tiny_llama, folder, vocab_size)
    ids = [i % vocab_size for i in tiny_prompt_ids[:9]]
    whole, _ = run(folder, [ids])
    for logits, _ in run_sharded(folder, ids, 4, ops_for("cpu")):
        assert logits.shape == (9, vocab_size)
        assert float((logits - whole).abs().max()) < LOGIT_TOLERANCE


def _cut_vocabulary(source: Path, folder: Path, vocab_size: int) -> None:
    from safetensors.torch import load_file, save_file

    from tests.models.comparison import altered

    altered(source, folder, vocab_size=vocab_size)
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:vocab_size].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_number_of_ranks_that_does_not_divide_the_heads_is_refused(tiny_llama: Path) -> None:
    config = ModelConfig.load(tiny_llama)
    for tp_size in (1, 2, 4):
        check_tp_size(config, tp_size)
    with pytest.raises(ConfigError, match="4 attention heads and 2 KV heads") as caught:
        check_tp_size(config, 3)
    assert caught.value.hint == "use --tp 1, 2, 4"
