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
    "LinearConfig",
    "TileConfig",
    "arch_of",
    "decode_config",
    "expert_config",
    "linear_config",
    "mla_decode_config",
    "num_k_splits_for",
    "num_splits_for",
    "prefill_config",
    "row_config",
]

#: Fewer tokens than this in a split cost more to merge than they gain.
_MIN_SPLIT_LEN = 256
_MAX_SPLITS = 64
#: The same for sums of matrix products, in blocks.
_MIN_SPLIT_BLOCKS = 4
_MAX_K_SPLITS = 16
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
    #: A tile's part of the summed axis, where tiles have a part of it.
    block_k: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearConfig(TileConfig):
    """One way to compile a matrix product."""

    #: Whether the weight is the left operand.
    is_swapped: bool = False


def arch_of(device: torch.device) -> int:
    """The architecture that a device's code is chosen for: 80, 90 or 100.

    The interpreter (and whatever has no GPU) gets sm_90's choices.
    """
    if device.type != "cuda":
        return 90
    major, _ = torch.cuda.get_device_capability(device)
    return {9: 90, 10: 100}.get(major, 80)


def decode_config(num_rows: int, head_dim: int, kv_dtype: torch.dtype) -> TileConfig:
    """``num_rows``: query heads of a KV head times rows of a request."""
    block_m = max(16, next_power_of_2(num_rows))
    wide = _is_wide(head_dim, kv_dtype)
    return TileConfig(
        block_m=block_m,
        block_n=32 if wide else 64,
        num_warps=4 if block_m < 64 else 8,
        num_stages=2 if wide else 3,
    )


def prefill_config(arch: int, head_dim: int, kv_dtype: torch.dtype) -> TileConfig:
    """A tile of rows holds as many whole tokens (of all heads of a KV head) as fit."""
    wide = _is_wide(head_dim, kv_dtype)
    # sm_100 adds up in a memory of its own.
    is_small = kv_dtype == torch.float32 or (wide and arch != 100)
    return TileConfig(
        block_m=64 if is_small else 128,
        # sm_80 keeps the operands of its matrix instructions in registers.
        block_n=32 if wide or arch == 80 else 64,
        num_warps=8,
        num_stages=2 if wide else 3,
    )


def mla_decode_config(arch: int, num_rows: int, kv_dtype: torch.dtype) -> TileConfig:
    """``num_rows``: heads times rows of a request. uint8: float8 records.

    Sums of 512 columns take the registers of 8 warps from 32 rows on. On sm_90, records are
    converted in fewer instructions for 64 rows, even if half of them are empty; on sm_100, Triton
    3.6 makes nothing of that configuration.
    """
    is_record = kv_dtype == torch.uint8
    largest = 32 if arch == 80 or (is_record and arch == 100) else 64
    block_m = min(largest, max(16, next_power_of_2(num_rows)))
    if is_record and block_m == 32:
        block_m = largest
    return TileConfig(
        block_m=block_m,
        block_n=16 if kv_dtype == torch.float32 else 32,
        num_warps=4 if block_m == 16 else 8,
        num_stages=3 if block_m == 16 else 2,
    )


def expert_config(
    arch: int, num_pairs: int, num_experts: int, x_dtype: torch.dtype, weight_dtype: torch.dtype
) -> TileConfig:
    """``num_pairs``: of tokens and experts. Rows of a block are what an expert gets on average:
    smaller blocks read a weight several times, larger ones compute what is padding. Weights that
    are converted on their way (float8 beside wider activations) leave no registers for 128 rows.
    """
    wide = x_dtype == torch.float32
    converts = weight_dtype != x_dtype
    rows = num_pairs // num_experts
    if rows < 32:
        return TileConfig(
            block_m=16, block_n=64, block_k=32 if wide else 64, num_warps=4, num_stages=5
        )
    if rows < 128 or wide or converts:
        return TileConfig(
            block_m=64,
            block_n=64 if wide else 128,
            block_k=64,
            num_warps=8 if converts else 4,
            num_stages=3,
        )
    return TileConfig(
        block_m=128, block_n=128, block_k=32 if arch == 80 else 64, num_warps=8, num_stages=3
    )


def linear_config(
    arch: int, num_rows: int, x_dtype: torch.dtype, weight_dtype: torch.dtype
) -> LinearConfig:
    """``num_rows``: of the input. Up to 64 rows are one tile, beside which the weight's 64 rows are
    the matrix unit's; sm_80's takes 16 from either side.
    """
    is_wide, converts = x_dtype == torch.float32, weight_dtype != x_dtype
    is_float8 = weight_dtype.itemsize == 1
    if num_rows <= 64:
        return LinearConfig(
            block_m=max(16, next_power_of_2(num_rows)),
            block_n=64,
            block_k=32 if is_wide and not is_float8 else 128,
            num_warps=4,
            num_stages=3 if num_rows > 32 else 4,
            is_swapped=arch != 80,
        )
    is_small = num_rows <= 256 or is_wide or converts
    # Scales are registers: a sum of its own for each block of 128, and the scales themselves.
    is_narrow = is_wide or (is_float8 and not is_small)
    return LinearConfig(
        block_m=64 if is_small else 128,
        block_n=64 if is_narrow else 128,
        block_k=128 if is_float8 else 32 if is_wide or arch == 80 else 64,
        num_warps=4 if is_small and not converts else 8,
        num_stages=3,
    )


def num_k_splits_for(num_tiles: int, size: int, block_k: int, device: torch.device) -> int:
    """Parts of a sum over ``size``, so that tiles times parts fill the GPU once; none is empty.

    A part is four blocks at least: its float32 sums are written and read again.
    """
    wanted = _PROGRAMS_PER_SM * _num_sms(device) // num_tiles
    num_blocks = -(-size // block_k)
    num_splits = max(1, min(wanted, num_blocks // _MIN_SPLIT_BLOCKS, _MAX_K_SPLITS))
    return -(-num_blocks // -(-num_blocks // num_splits))


def row_config(size: int) -> TileConfig:
    """Whole rows of ``size`` for one program, so many that each thread has at least 8 elements."""
    block_n = next_power_of_2(size)
    return TileConfig(
        block_m=max(1, 1024 // block_n),
        block_n=block_n,
        num_warps=4 if block_n <= 4096 else 8,
        num_stages=1,
    )


def _is_wide(head_dim: int, kv_dtype: torch.dtype) -> bool:
    """float32 is for tests: exact, slow and not in the gate."""
    return next_power_of_2(head_dim) > 128 or kv_dtype == torch.float32


def num_splits_for(num_programs: int, context_len: int, device: torch.device) -> int:
    """Parts for each of ``num_programs`` (request, head) pairs, so that the GPU is filled once."""
    wanted = -(-_PROGRAMS_PER_SM * _num_sms(device) // num_programs)
    return max(1, min(wanted, context_len // _MIN_SPLIT_LEN, _MAX_SPLITS))


@cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count
