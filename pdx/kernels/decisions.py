"""Which tile sizes, warps, stages and splits a launch gets. Tables, never a search at run time.

A search would compile and time kernels in front of a request, and a captured graph forbids it. The
values come from the compile gate (no spills, two loads in flight); the splits from arithmetic.
Every configuration that these tables can choose is an entry of the gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from pdx.kernels.attention_tiles import next_power_of_2

__all__ = [
    "TileConfig",
    "decode_config",
    "num_splits_for",
    "prefill_config",
]

#: Fewer tokens than this in a split cost more to merge than they gain.
_MIN_SPLIT_LEN = 256
_MAX_SPLITS = 64
#: Programs for each multiprocessor that a decode launch aims at: two resident blocks hide each
#: other's latencies.
_PROGRAMS_PER_SM = 2
#: What the interpreter's launches are sized for.
_INTERPRETED_SMS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """One way to compile a kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def decode_config(num_rows: int, head_dim: int, kv_dtype: torch.dtype) -> TileConfig:
    """``num_rows``: query heads of a KV head times rows of a request."""
    block_m = max(16, next_power_of_2(num_rows))
    wide = next_power_of_2(head_dim) > 128 or kv_dtype == torch.float32
    return TileConfig(
        block_m=block_m,
        block_n=32 if wide else 64,
        num_warps=4,
        num_stages=2 if wide else 3,
    )


def prefill_config(num_groups: int, head_dim: int, dtype: torch.dtype) -> TileConfig:
    """A tile of rows holds as many whole tokens (of ``num_groups`` heads each) as fit."""
    wide = next_power_of_2(head_dim) > 128 or dtype == torch.float32
    return TileConfig(
        block_m=64 if wide else 128,
        block_n=32 if wide else 64,
        num_warps=4 if wide else 8,
        num_stages=2 if wide else 3,
    )


def num_splits_for(num_programs: int, context_len: int, device: torch.device) -> int:
    """Parts for each of ``num_programs`` (request, head) pairs, so that the GPU is filled once."""
    wanted = -(-_PROGRAMS_PER_SM * _num_sms(device) // num_programs)
    return max(1, min(wanted, context_len // _MIN_SPLIT_LEN, _MAX_SPLITS))


@cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count
