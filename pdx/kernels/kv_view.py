"""What kernels take as a layer's KV memory [P, Hkv, 2, S, D], and what they compute it in."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from pdx.errors import ConfigError

__all__ = ["FLOAT8", "check_float8", "check_kv", "compute_dtype", "triton_dtype"]

FLOAT8 = torch.float8_e4m3fn
_TRITON = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
    FLOAT8: tl.float8e4nv,
}
#: The oldest GPU whose conversions from float8 are instructions.
_FLOAT8_CAPABILITY = (9, 0)


def check_kv(q: Tensor, kv: Tensor) -> None:
    """Our own invariants: the pages are dense, the query heads are grouped, the last axis is 1."""
    _, num_kv_heads, _, page_size, head_dim = kv.shape
    assert kv.stride()[1:] == (2 * page_size * head_dim, page_size * head_dim, head_dim, 1)
    assert q.shape[1] % num_kv_heads == 0 and q.shape[2] == head_dim and q.stride(2) == 1
    assert kv.dtype in (q.dtype, FLOAT8)


def compute_dtype(q: Tensor, kv: Tensor) -> tl.dtype:
    """float8 holds exactly in float16, whose conversion is one instruction; bfloat16's is three."""
    return tl.float16 if kv.dtype == FLOAT8 else triton_dtype(q.dtype)


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """The kernels' name of a dtype."""
    return _TRITON[dtype]


def check_float8(
    capability: tuple[int, int],
    what: str = "float8 KV",
    hint: str = "use the model's dtype for the KV cache",
) -> None:
    """Refuse float8 on a GPU of this compute capability, when a rank starts.

    Raises:
        ConfigError: it is older than sm_90.
    """
    if capability < _FLOAT8_CAPABILITY:
        major, minor = capability
        raise ConfigError(
            f"{what} needs a GPU of compute capability 9.0 or newer, not {major}.{minor}",
            hint=hint,
        )
