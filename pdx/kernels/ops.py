"""Which implementation of each op a device runs; chosen once, when a rank loads its model."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from pdx.errors import ConfigError
from pdx.kernels.batch import ForwardBatch, RequestGroup
from pdx.kernels.cpu.expert_mlp import expert_mlp as cpu_expert_mlp
from pdx.kernels.cpu.likeliest import likeliest as cpu_likeliest
from pdx.kernels.cpu.linear import linear as cpu_linear
from pdx.kernels.cpu.mla_attention import mla_attention as cpu_mla_attention
from pdx.kernels.cpu.mla_attention import mla_prefill as cpu_mla_prefill
from pdx.kernels.cpu.paged_attention import paged_attention as cpu_paged_attention
from pdx.kernels.cpu.progress import publish
from pdx.kernels.cpu.rms_norm import rms_norm as cpu_rms_norm
from pdx.kernels.cpu.rope import rope as cpu_rope
from pdx.kernels.cpu.rope_kv_append import rope_kv_append as cpu_rope_kv_append
from pdx.kernels.cpu.sampling import sample as cpu_sample
from pdx.kernels.cpu.silu_mul import silu_mul as cpu_silu_mul
from pdx.kernels.reference.add_rms_norm import add_rms_norm
from pdx.kernels.reference.expert_mlp import expert_mlp
from pdx.kernels.reference.likeliest import likeliest
from pdx.kernels.reference.linear import linear
from pdx.kernels.reference.linear_float8 import linear_float8
from pdx.kernels.reference.logit_rules import apply_rules
from pdx.kernels.reference.mla_append import mla_append
from pdx.kernels.reference.mla_attention import mla_attention, mla_prefill
from pdx.kernels.reference.mla_contexts import mla_contexts
from pdx.kernels.reference.paged_attention import paged_attention
from pdx.kernels.reference.rms_norm import rms_norm
from pdx.kernels.reference.rope import rope, rope_interleaved
from pdx.kernels.reference.rope_kv_append import rope_kv_append
from pdx.kernels.reference.routing import grouped_routing, softmax_routing
from pdx.kernels.reference.sampling import sample
from pdx.kernels.reference.silu_mul import silu_mul

__all__ = ["REFERENCE_OPS", "Ops", "ops_for"]


class LinearOp(Protocol):
    """x w^T + bias."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...


class LinearFloat8Op(Protocol):
    """The same with a weight in float8, and the scales of its blocks."""

    def __call__(self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor: ...


class RmsNormOp(Protocol):
    """The norm of each row."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...


class AddRmsNormOp(Protocol):
    """A sum, and the norm of its rows."""

    def __call__(
        self, x: Tensor, y: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...


class RopeOp(Protocol):
    """Rotary positions."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...


class SiluMulOp(Protocol):
    """The gate of a SwiGLU MLP."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor: ...


class RopeKvAppendOp(Protocol):
    """The append of K and V, after which a layer's KV is final."""

    def __call__(
        self,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv: Tensor,
        batch: ForwardBatch,
        *,
        kv_scales: tuple[float, float] = (1.0, 1.0),
    ) -> None: ...


class PagedAttentionOp(Protocol):
    """Causal attention over pages."""

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        batch: ForwardBatch,
        scale: float,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
        kv_scales: tuple[float, float] = (1.0, 1.0),
    ) -> Tensor: ...


class MlaAppendOp(Protocol):
    """The append of latents and rotated keys, after which a layer's KV is final."""

    def __call__(
        self,
        latent: Tensor,
        k_rope: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv: Tensor,
        batch: ForwardBatch,
        interleaved: bool,
    ) -> None: ...


class MlaAttentionOp(Protocol):
    """Attention of a group of requests over paged latents."""

    def __call__(
        self, q: Tensor, kv: Tensor, group: RequestGroup, scale: float, latent_dim: int
    ) -> Tensor: ...


class MlaContextsOp(Protocol):
    """A group's latents and rotated keys, gathered from their pages."""

    def __call__(
        self, kv: Tensor, group: RequestGroup, latent_dim: int, dtype: torch.dtype
    ) -> Tensor: ...


class MlaPrefillOp(Protocol):
    """Attention of a group of requests over keys and values that were made from their latents."""

    def __call__(
        self,
        q: Tensor,
        k_nope: Tensor,
        k_rope: Tensor,
        v: Tensor,
        group: RequestGroup,
        scale: float,
    ) -> Tensor: ...


class SoftmaxRoutingOp(Protocol):
    """A token's most likely experts, and their weights."""

    def __call__(
        self, logits: Tensor, num_chosen: int, renormalise: bool
    ) -> tuple[Tensor, Tensor]: ...


class GroupedRoutingOp(Protocol):
    """A token's experts within its best groups, and their weights."""

    def __call__(
        self,
        logits: Tensor,
        bias: Tensor,
        num_chosen: int,
        num_groups: int,
        num_chosen_groups: int,
        renormalise: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]: ...


class ExpertMlpOp(Protocol):
    """The MLPs of a sparse layer; with scales where their weights are float8."""

    def __call__(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_scale: Tensor | None = None,
        down_scale: Tensor | None = None,
    ) -> Tensor: ...


class ApplyRulesOp(Protocol):
    """What requests change in their logits, in place."""

    def __call__(
        self,
        logits: Tensor,
        starts: Tensor,
        token_ids: Tensor,
        bias: Tensor,
        seen: Tensor,
        cost: Tensor,
        held: Tensor,
        repetition: Tensor,
    ) -> Tensor: ...


class SampleOp(Protocol):
    """A token of each row; -1 where its logits are not finite."""

    def __call__(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seed: Tensor,
        output_idx: Tensor,
    ) -> Tensor: ...


class LikeliestOp(Protocol):
    """The highest logits of each row and their ids."""

    def __call__(self, logits: Tensor, num: int) -> tuple[Tensor, Tensor]: ...


class PublishOp(Protocol):
    """A progress word, stored behind all that was written before."""

    def __call__(self, word: Tensor, base: Tensor, step: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One implementation of each op; shapes and formulas stand in ``kernels/reference``."""

    linear: LinearOp
    linear_float8: LinearFloat8Op
    rms_norm: RmsNormOp
    add_rms_norm: AddRmsNormOp
    rope: RopeOp
    rope_interleaved: RopeOp
    silu_mul: SiluMulOp
    rope_kv_append: RopeKvAppendOp
    paged_attention: PagedAttentionOp
    mla_append: MlaAppendOp
    mla_attention: MlaAttentionOp
    mla_contexts: MlaContextsOp
    mla_prefill: MlaPrefillOp
    softmax_routing: SoftmaxRoutingOp
    grouped_routing: GroupedRoutingOp
    expert_mlp: ExpertMlpOp
    apply_rules: ApplyRulesOp
    sample: SampleOp
    likeliest: LikeliestOp
    publish: PublishOp
    #: Whether weights and KV memory may be float8. Otherwise weights are converted as they are
    #: loaded, and KV memory has the model's dtype.
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
    mla_prefill=mla_prefill,
    softmax_routing=softmax_routing,
    grouped_routing=grouped_routing,
    expert_mlp=expert_mlp,
    apply_rules=apply_rules,
    sample=sample,
    likeliest=likeliest,
    publish=publish,
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
    mla_prefill=cpu_mla_prefill,
    expert_mlp=cpu_expert_mlp,
    sample=cpu_sample,
    likeliest=cpu_likeliest,
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
        mla_prefill=triton_ops.mla_prefill,
        softmax_routing=triton_ops.softmax_routing,
        grouped_routing=triton_ops.grouped_routing,
        expert_mlp=triton_ops.expert_mlp,
        apply_rules=triton_ops.apply_rules,
        sample=triton_ops.sample,
        publish=triton_ops.publish,
        keeps_float8=True,
    )
