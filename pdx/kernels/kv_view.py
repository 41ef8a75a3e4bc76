"""What kernels take as a layer's KV memory [P, Hkv, 2, S, D]. Needs no Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.errors import ConfigError

__all__ = ["FLOAT8", "check_float8", "check_kv"]

FLOAT8 = torch.float8_e4m3fn
#: The oldest GPU whose conversions from float8 are instructions.
_FLOAT8_CAPABILITY = (9, 0)


def check_kv(q: Tensor, kv: Tensor) -> None:
    """Our own invariants: the pages are dense, the query heads are grouped, the last axis is 1."""
    _, num_kv_heads, _, page_size, head_dim = kv.shape
    assert kv.stride()[1:] == (2 * page_size * head_dim, page_size * head_dim, head_dim, 1)
    assert q.shape[1] % num_kv_heads == 0 and q.shape[2] == head_dim and q.stride(2) == 1
    assert kv.dtype in (q.dtype, FLOAT8)


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
