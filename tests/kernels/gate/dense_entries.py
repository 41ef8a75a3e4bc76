"""The gate's entries of everything beside attention: norms, gates, experts, products, sampling."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pdx.kernels.expert_mlp import expert_mlp
from pdx.kernels.kv_view import FLOAT8
from pdx.kernels.linear import linear, linear_float8
from pdx.kernels.logit_rules import apply_rules
from pdx.kernels.quantize_rows import quantize_rows
from pdx.kernels.rms_norm import add_rms_norm, rms_norm
from pdx.kernels.routing import grouped_routing, softmax_routing
from pdx.kernels.sampling import sample
from pdx.kernels.silu_mul import silu_mul
from pdx.kernels.verify_drafts import verify_drafts
from tests.kernels.gate.entry import ARCHS, BF16, STREAM, Entry, meta

__all__ = ["DENSE_ENTRIES"]

F32 = torch.float32
_FEW_ROWS = dict.fromkeys(ARCHS, ("mma", "cp_async", "wide_load"))
_MANY_ROWS = {
    80: ("mma", "cp_async", "wide_load"),
    90: ("wgmma", "cp_async", "wide_load"),
    100: ("tcgen05", "cp_async", "wide_load"),
}


def _norm(*shape: int) -> Callable[[], object]:
    return lambda: rms_norm(meta(*shape), meta(shape[-1]), 1e-6)


def _add_norm(size: int) -> Callable[[], object]:
    return lambda: add_rms_norm(meta(64, size), meta(64, size), meta(size), 1e-6)


def _silu_mul() -> object:
    return silu_mul(*meta(64, 2 * 2048).chunk(2, dim=-1))


def _softmax_routing() -> object:
    return softmax_routing(meta(64, 128), 8, renormalise=True)


def _grouped_routing() -> object:
    return grouped_routing(meta(64, 256, dtype=F32), meta(256, dtype=F32), 8, 8, 4, True, 2.5)


def _experts(num_tokens: int) -> Callable[[], object]:
    """Of Qwen3-30B-A3B."""
    return lambda: expert_mlp(
        meta(num_tokens, 2048),
        meta(num_tokens, 8, dtype=F32),
        meta(num_tokens, 8, dtype=torch.int64),
        meta(128, 2 * 768, 2048),
        meta(128, 2048, 768),
    )


def _float8_experts(num_tokens: int) -> Callable[[], object]:
    """Of DeepSeek-V3, split over 8 ranks."""
    return lambda: expert_mlp(
        meta(num_tokens, 7168),
        meta(num_tokens, 8, dtype=F32),
        meta(num_tokens, 8, dtype=torch.int64),
        meta(256, 2 * 256, 7168, dtype=FLOAT8),
        meta(256, 7168, 256, dtype=FLOAT8),
        meta(256, 4, 56, dtype=F32),
        meta(256, 56, 2, dtype=F32),
    )


def _linear(num_rows: int, num_splits: int = 1) -> Callable[[], object]:
    return lambda: linear(meta(num_rows, 4096), meta(6144, 4096), num_splits=num_splits)


def _linear_float8(
    num_rows: int, num_splits: int = 1, *, both: bool = False
) -> Callable[[], object]:
    def call() -> object:
        x_scale = meta(num_rows, 56, dtype=F32) if both else None
        return linear_float8(
            meta(num_rows, 7168, dtype=FLOAT8 if both else BF16),
            meta(2048, 7168, dtype=FLOAT8),
            meta(16, 56, dtype=F32),
            x_scale=x_scale,
            dtype=BF16,
            num_splits=num_splits,
        )

    return call


def _quantize_rows() -> object:
    return quantize_rows(meta(64, 7168))


def _sample() -> object:
    wide, whole = meta(64, dtype=torch.float64), meta(64, dtype=torch.int64)
    sampling = {
        "temperature": wide,
        "top_k": meta(64, dtype=torch.int32),
        "top_p": wide,
        "min_p": wide,
        "seed": whole,
        "output_idx": whole,
    }
    return sample(meta(64, 151936, dtype=F32), **sampling, num_ids=151669)


def _apply_rules() -> object:
    flags, values = meta(4096, dtype=torch.bool), meta(4096, dtype=F32)
    ids, starts = meta(4096, dtype=torch.int32), meta(65, dtype=torch.int32)
    penalties = meta(64, dtype=torch.float64)
    logits = meta(64, 151936, dtype=F32)
    return apply_rules(logits, starts, ids, values, flags, values, flags, penalties)


def _verify_drafts() -> object:
    tokens, rows = meta(256, dtype=torch.int64), meta(64, dtype=torch.int32)
    return verify_drafts(tokens, tokens, rows, rows, 3)


#: Swapped, 64 of the weight's rows fill a warp group's instruction.
_SWAPPED = {80: _FEW_ROWS[80], 90: _MANY_ROWS[90], 100: ("cp_async", "wide_load")}
_NEW = (90, 100)

DENSE_ENTRIES = (
    Entry(name="linear 1 row split", call=_linear(1, 4), needs=_SWAPPED),
    Entry(name="linear 32 rows split", call=_linear(32, 4), needs=_SWAPPED),
    Entry(name="linear 64 rows", call=_linear(64), needs=_SWAPPED),
    Entry(name="linear 256 rows split", call=_linear(256, 2), needs=_MANY_ROWS),
    Entry(name="linear 4096 rows", call=_linear(4096), needs=_MANY_ROWS),
    Entry(name="linear float8 1 row split", call=_linear_float8(1, 4), archs=_NEW),
    Entry(name="linear float8 64 rows", call=_linear_float8(64), archs=_NEW),
    Entry(name="linear float8 4096 rows", call=_linear_float8(4096), archs=_NEW),
    Entry(name="linear both float8 1 row split", call=_linear_float8(1, 4, both=True), archs=_NEW),
    Entry(name="linear both float8 256 rows", call=_linear_float8(256, both=True), archs=_NEW),
    Entry(name="linear both float8 4096 rows", call=_linear_float8(4096, both=True), archs=_NEW),
    Entry(name="sample", call=_sample),
    Entry(name="logit rules", call=_apply_rules),
    Entry(name="verify drafts", call=_verify_drafts),
    Entry(name="quantize rows", call=_quantize_rows, archs=_NEW, needs=STREAM),
    Entry(name="norm of heads 128", call=_norm(64, 32, 128), needs=STREAM),
    Entry(name="norm 7168", call=_norm(64, 7168), needs=STREAM),
    Entry(name="norm of sum 4096", call=_add_norm(4096), needs=STREAM),
    Entry(name="norm of sum 7168", call=_add_norm(7168), needs=STREAM),
    Entry(name="silu mul", call=_silu_mul, needs=STREAM),
    Entry(name="routing 128", call=_softmax_routing),
    Entry(name="routing 256 in groups", call=_grouped_routing),
    Entry(name="experts 64 tokens", call=_experts(64)),
    Entry(name="experts 1024 tokens", call=_experts(1024)),
    Entry(name="experts 4096 tokens", call=_experts(4096)),
    Entry(name="experts 64 tokens float8", call=_float8_experts(64), archs=(90, 100)),
    Entry(name="experts 2048 tokens float8", call=_float8_experts(2048), archs=(90, 100)),
)
