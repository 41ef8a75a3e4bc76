"""Which implementation of each op a device runs; chosen once, when a rank loads its model."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdx.errors import ConfigError
from pdx.kernels.cpu.expert_mlp import expert_mlp as cpu_expert_mlp
from pdx.kernels.cpu.linear import linear as cpu_linear
from pdx.kernels.cpu.mla_attention import mla_attention as cpu_mla_attention
from pdx.kernels.cpu.mla_attention import mla_chunk_attention as cpu_mla_chunk_attention
from pdx.kernels.cpu.paged_attention import paged_attention as cpu_paged_attention
from pdx.kernels.cpu.rms_norm import rms_norm as cpu_rms_norm
from pdx.kernels.cpu.rope import rope as cpu_rope
from pdx.kernels.cpu.rope_kv_append import rope_kv_append as cpu_rope_kv_append
from pdx.kernels.cpu.silu_mul import silu_mul as cpu_silu_mul
from pdx.kernels.paged_batch import PagedBatch
from pdx.kernels.reference.add_rms_norm import add_rms_norm
from pdx.kernels.reference.expert_mlp import expert_mlp
from pdx.kernels.reference.linear import linear
from pdx.kernels.reference.linear_float8 import linear_float8
from pdx.kernels.reference.logit_rules import apply_rules
from pdx.kernels.reference.mla_append import mla_append
from pdx.kernels.reference.mla_attention import mla_attention, mla_chunk_attention
from pdx.kernels.reference.mla_contexts import mla_contexts
from pdx.kernels.reference.paged_attention import paged_attention
from pdx.kernels.reference.rms_norm import rms_norm
from pdx.kernels.reference.rope import rope, rope_interleaved
from pdx.kernels.reference.rope_kv_append import rope_kv_append
from pdx.kernels.reference.routing import grouped_routing, softmax_routing
from pdx.kernels.reference.sampling import sample
from pdx.kernels.reference.silu_mul import silu_mul

__all__ = ["REFERENCE_OPS", "Ops", "ops_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One implementation of each op; shapes and formulas stand in ``kernels/reference``."""

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    linear_float8: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    silu_mul: Callable[[Tensor, Tensor], Tensor]
    #: These two with ``kv_scales`` by name where the KV memory is float8.
    rope_kv_append: Callable[..., None]
    paged_attention: Callable[..., Tensor]
    rope_interleaved: Callable[[Tensor, Tensor, Tensor], Tensor]
    mla_append: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, PagedBatch, bool], None]
    mla_attention: Callable[[Tensor, Tensor, PagedBatch, float, int], Tensor]
    mla_contexts: Callable[[Tensor, PagedBatch, int, torch.dtype], Tensor]
    mla_chunk_attention: Callable[[Tensor, Tensor, Tensor, Tensor, PagedBatch, float], Tensor]
    softmax_routing: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]
    grouped_routing: Callable[[Tensor, Tensor, int, int, int, bool, float], tuple[Tensor, Tensor]]
    #: With two more where the weights are float8: their scales.
    expert_mlp: Callable[..., Tensor]
    #: Where batches come on the device: rows' rules on their logits, in place
    #: (``kernels/reference/logit_rules``), and a row's token (``kernels/reference/sampling``).
    apply_rules: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    sample: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    #: Whether batches come to them with their tensors on the device (``device_batch``).
    reads_device_batch: bool = False
    #: Whether weights stay in float8 as they are stored (``linear_float8``); else in the dtype.
    keeps_float8: bool = False


REFERENCE_OPS = Ops(
    linear=linear,
    linear_float8=linear_float8,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rope=rope,
    silu_mul=silu_mul,
    rope_kv_append=rope_kv_append,
    paged_attention=paged_attention,
    rope_interleaved=rope_interleaved,
    mla_append=mla_append,
    mla_attention=mla_attention,
    mla_contexts=mla_contexts,
    mla_chunk_attention=mla_chunk_attention,
    softmax_routing=softmax_routing,
    grouped_routing=grouped_routing,
    expert_mlp=expert_mlp,
    apply_rules=apply_rules,
    sample=sample,
)


def _cpu_add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, cpu_rms_norm(total, weight, eps)


_CPU_OPS = replace(
    REFERENCE_OPS,
    linear=cpu_linear,
    rms_norm=cpu_rms_norm,
    add_rms_norm=_cpu_add_rms_norm,
    rope=cpu_rope,
    silu_mul=cpu_silu_mul,
    rope_kv_append=cpu_rope_kv_append,
    paged_attention=cpu_paged_attention,
    mla_attention=cpu_mla_attention,
    mla_chunk_attention=cpu_mla_chunk_attention,
    expert_mlp=cpu_expert_mlp,
)


def ops_for(device: str) -> Ops:
    """The ops of a device.

    Args:
        device: "cuda" or "cuda:N": Triton's kernels, compiled. "cpu": this host's own ops; with
            ``PDX_KERNELS=interpret`` the same kernels, in Triton's interpreter.

    Raises:
        ConfigError: the device is not served, ``PDX_KERNELS`` says something else, or Triton is
            missing.
    """
    kind, kernels = device.partition(":")[0], os.environ.get("PDX_KERNELS", "")
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r} is not served", hint="use --device cpu or cuda")
    if kernels not in ("", "interpret"):
        raise ConfigError(f"PDX_KERNELS is {kernels!r}", hint="set it to interpret, or unset it")
    if kind == "cuda":
        if kernels:
            raise ConfigError(
                "PDX_KERNELS=interpret is for ranks on a CPU",
                hint="unset it, or use --device cpu",
            )
        return _triton_ops()
    return _interpreted_ops() if kernels else _CPU_OPS


def _interpreted_ops() -> Ops:
    ops = _triton_ops()
    from pdx.kernels import interpreter

    interpreter.install()
    return ops


def _triton_ops() -> Ops:
    # Here, because only these ranks want Triton, which takes a second to import.
    try:
        from pdx.kernels import triton_ops
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        raise ConfigError(
            "the kernels of GPUs need Triton, which is not installed", hint="pip install triton"
        ) from error
    return replace(
        REFERENCE_OPS,
        rms_norm=triton_ops.rms_norm,
        add_rms_norm=triton_ops.add_rms_norm,
        silu_mul=triton_ops.silu_mul,
        linear=triton_ops.Linear(),
        linear_float8=triton_ops.LinearFloat8(),
        rope=triton_ops.rope,
        rope_kv_append=triton_ops.rope_kv_append,
        paged_attention=triton_ops.paged_attention,
        rope_interleaved=triton_ops.rope_interleaved,
        mla_append=triton_ops.mla_append,
        mla_attention=triton_ops.mla_attention,
        mla_chunk_attention=triton_ops.mla_chunk_attention,
        softmax_routing=triton_ops.softmax_routing,
        grouped_routing=triton_ops.grouped_routing,
        expert_mlp=triton_ops.expert_mlp,
        apply_rules=triton_ops.apply_rules,
        sample=triton_ops.sample,
        reads_device_batch=True,
        keeps_float8=True,
    )
