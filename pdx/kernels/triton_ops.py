"""The Triton kernels with the face of :class:`Ops`. Imported only by ranks that run them.

Compiled on a GPU; with ``PDX_KERNELS=interpret`` in Triton's interpreter, on a CPU: tiny models end
to end through the kernels, to show that they are right where they are used. The main thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.batch import ForwardBatch, RequestGroup
from pdx.kernels.expert_mlp import expert_mlp
from pdx.kernels.linear import linear, linear_float8, split_counters
from pdx.kernels.logit_rules import apply_rules
from pdx.kernels.mla_decode import mla_decode
from pdx.kernels.mla_decode_float8 import mla_decode_float8
from pdx.kernels.mla_kv_append import mla_kv_append
from pdx.kernels.mla_prefill import mla_prefill
from pdx.kernels.paged_decode import paged_decode
from pdx.kernels.paged_prefill import paged_prefill
from pdx.kernels.progress_word import publish
from pdx.kernels.rms_norm import add_rms_norm, rms_norm
from pdx.kernels.rope_kv_append import rope
from pdx.kernels.rope_kv_append import rope_kv_append as append
from pdx.kernels.routing import grouped_routing, softmax_routing
from pdx.kernels.sampling import sample
from pdx.kernels.silu_mul import silu_mul

__all__ = [
    "Linear",
    "LinearFloat8",
    "add_rms_norm",
    "apply_rules",
    "expert_mlp",
    "grouped_routing",
    "mla_append",
    "mla_attention",
    "mla_prefill",
    "paged_attention",
    "publish",
    "rms_norm",
    "rope",
    "rope_interleaved",
    "rope_kv_append",
    "sample",
    "silu_mul",
    "softmax_routing",
]


def rope_kv_append(
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    batch: ForwardBatch,
    *,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """See ``kernels/reference/rope_kv_append``."""
    places = batch.token_pages, batch.token_offsets
    append(k[:, :0], k, v, cos, sin, kv, *places, kv_scales=kv_scales)


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ``kernels/reference/rope``."""
    return rope(x, cos, sin, interleaved=True)


def mla_append(
    latent: Tensor,
    k_rope: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    batch: ForwardBatch,
    interleaved: bool,
) -> None:
    """See ``kernels/reference/mla_append``."""
    places = batch.token_pages, batch.token_offsets
    mla_kv_append(latent, k_rope, cos, sin, kv, *places, interleaved=interleaved)


class _Counters:
    """What launches of Split-K count in, by device. Those of a rank are on one stream."""

    def __init__(self) -> None:
        self._made: dict[torch.device, Tensor] = {}

    def of(self, device: torch.device) -> Tensor:
        if device not in self._made:
            self._made[device] = split_counters(device)
        return self._made[device]


class Linear:
    """Few rows through Split-K; many through torch's own library for the device."""

    #: Above it a weight's way from memory is not the time.
    MAX_ROWS = 64

    def __init__(self) -> None:
        self._counters = _Counters()

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See ``kernels/reference/linear``."""
        if len(x) > self.MAX_ROWS:
            return torch.nn.functional.linear(x, weight, bias)
        return linear(x, weight, bias, counters=self._counters.of(x.device))


class LinearFloat8:
    """Weights in float8, inputs as they are."""

    def __init__(self) -> None:
        self._counters = _Counters()

    def __call__(self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """See ``kernels/reference/linear_float8``."""
        return linear_float8(x, weight, scale, bias, counters=self._counters.of(x.device))


def paged_attention(
    q: Tensor,
    kv: Tensor,
    batch: ForwardBatch,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """See ``kernels/reference/paged_attention``: each group of requests through its own kernel."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for attend, group in ((paged_decode, batch.decodes), (paged_prefill, batch.chunks)):
        attend(
            q[group.rows],
            kv,
            group,
            scale,
            window=window,
            soft_cap=soft_cap,
            kv_scales=kv_scales,
            out=out[group.rows],
        )
    return out


def mla_attention(
    q: Tensor, kv: Tensor, group: RequestGroup, scale: float, latent_dim: int
) -> Tensor:
    """See ``kernels/reference/mla_attention``."""
    decode = mla_decode_float8 if kv.dtype == torch.uint8 else mla_decode
    return decode(q, kv, group, scale, latent_dim)
