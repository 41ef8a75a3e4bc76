"""Runs our models on whole sequences and compares their logits with transformers'."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdx.checkpoint.model import ModelConfig
from pdx.kernels.batch import ForwardBatch
from pdx.kernels.ops import REFERENCE_OPS, Ops
from pdx.kv.geometry import kv_layout
from pdx.models.registry import CausalLM, build_drafts, build_model
from pdx.models.sharding import LoneRank, TpGroup
from pdx.runner.memory import kv_tensor
from pdx.weights.load import load_parameters
from tests.oracle.transformers_oracle import Oracle

__all__ = [
    "LENGTHS",
    "LOGIT_TOLERANCE",
    "PAGE_SIZE",
    "altered",
    "difference",
    "empty_float8_kv",
    "empty_kv",
    "loaded",
    "run",
]

PAGE_SIZE = 16
#: float32 sums in another order over a few layers end within 3e-5 here; every mistake that the
#: tests make on purpose is far above.
LOGIT_TOLERANCE = 2e-4
#: The last one is past the original context of every scaling in the tests.
LENGTHS = [1, 9, 33, 64, 170]


def loaded(
    folder: Path,
    ops: Ops = REFERENCE_OPS,
    config: ModelConfig | None = None,
    dtype: torch.dtype = torch.float32,
    tp: TpGroup | None = None,
) -> CausalLM:
    """Our model of a folder, or a rank's part; ``config`` in place of the folder's own."""
    config = config or ModelConfig.load(folder)
    with torch.device("meta"):
        group = tp or LoneRank()
        model, drafts = build_model(config, ops, group), build_drafts(config, ops, group)
    load_parameters(
        *(model, folder, dtype, lambda done, total: None, config.quantization),
        left_on_disk=drafts,
        keeps_float8=ops.keeps_float8,
    )
    return model


def run(
    folder: Path,
    chunks: list[list[int]],
    ops: Ops = REFERENCE_OPS,
    config: ModelConfig | None = None,
    dtype: torch.dtype = torch.float32,
    change: Callable[[CausalLM], None] = lambda model: None,
    float8_kv: bool = False,
) -> tuple[Tensor, list[int]]:
    """Logits [T, V] of one sequence run in chunks over poisoned pages, and the layers reported.

    ``change`` may spoil the loaded model.
    """
    config = config or ModelConfig.load(folder)
    model = loaded(folder, ops, config, dtype)
    change(model)
    total = sum(map(len, chunks))
    pages = list(range(-(-total // PAGE_SIZE)))[::-1]
    kv = empty_float8_kv(config, len(pages)) if float8_kv else empty_kv(config, len(pages), dtype)
    ready: list[int] = []
    logits = []
    begin = 0
    with torch.inference_mode():
        for chunk in chunks:
            batch = ForwardBatch.build(PAGE_SIZE, [(begin, len(chunk), pages)])
            positions = torch.arange(begin, begin + len(chunk))
            hidden = model(torch.tensor(chunk), positions, kv, batch, ready.append)
            logits.append(model.logits(hidden))
            begin += len(chunk)
    return torch.cat(logits), ready


def empty_kv(
    config: ModelConfig, num_pages: int, dtype: torch.dtype = torch.float32, tp_size: int = 1
) -> Tensor:
    """Poisoned pages of a rank, [L, P, Hkv, parts, S, D]."""
    layout = kv_layout(config, PAGE_SIZE, num_pages, "float32", tp_size)
    buffer = bytearray(layout.total_bytes)
    return kv_tensor(buffer, layout, torch.float32).fill_(float("nan")).to(dtype)


def empty_float8_kv(config: ModelConfig, num_pages: int) -> Tensor:
    """Poisoned pages of float8, or of latents' records."""
    layout = kv_layout(config, PAGE_SIZE, num_pages, "float8")
    buffer = bytearray(b"\xff" * layout.total_bytes)
    is_latent = config.mla is not None
    return kv_tensor(buffer, layout, torch.uint8 if is_latent else torch.float8_e4m3fn)


def difference(
    folder: Path,
    oracle: Oracle,
    ids: list[int],
    ops: Ops = REFERENCE_OPS,
    config: ModelConfig | None = None,
    change: Callable[[CausalLM], None] = lambda model: None,
) -> float:
    """The largest difference of a logit at any position."""
    logits, _ = run(folder, [ids], ops, config, change=change)
    return float((logits - oracle.logits(ids)).abs().max())


def altered(folder: Path, copy: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with other fields in its config.json (... takes one out)."""
    shutil.copytree(folder, copy)
    fields = {**json.loads((folder / "config.json").read_text()), **changes}
    kept = {name: value for name, value in fields.items() if value is not ...}
    (copy / "config.json").write_text(json.dumps(kept))
    return copy
