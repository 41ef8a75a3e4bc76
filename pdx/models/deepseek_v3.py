"""DeepSeek-V3 and R1: latent attention (MLA), and experts in groups beside one that all tokens use.

Sources: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1 and appendix C (attention); "DeepSeek-V3
Technical Report", section 2.1. Shapes: T tokens of all requests of a pass together, H hidden, Hq
heads, R latent rank, N / E / V sizes of a head's part without a position, of its rotated part and
of its value, C tokens of the chunks' sequences, P pages, S page size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pdx.checkpoint.experts import ExpertsConfig, GroupedRouting
from pdx.checkpoint.mla import MlaConfig
from pdx.checkpoint.model import ModelConfig
from pdx.checkpoint.rope import RopeConfig, YarnScaling
from pdx.kernels.batch import RequestGroup
from pdx.kernels.ops import Ops
from pdx.models.decoder import CausalLM, DecoderLayer, LayerPass
from pdx.models.experts import Experts
from pdx.models.layers import ColumnLinear, Linear, RmsNorm, RowLinear, SwiGluMlp
from pdx.models.sharding import TpGroup, even_shard

__all__ = ["build_deepseek_v3"]

#: The epsilon of the latents' norms, whatever the config's is: the published code has this one.
_LATENT_EPS = 1e-6


def build_deepseek_v3(config: ModelConfig, ops: Ops, tp: TpGroup) -> CausalLM:
    """This rank's part of the model, with its parameters not yet filled."""
    layers = (_layer(config, layer_idx, ops, tp) for layer_idx in range(config.num_layers))
    return CausalLM(config, ops, tp, layers)


def _layer(config: ModelConfig, layer_idx: int, ops: Ops, tp: TpGroup) -> DecoderLayer:
    experts = config.experts
    if experts is not None and layer_idx in experts.layers:
        mlp: nn.Module = DeepseekMoe(config.hidden_size, experts, ops, tp)
    else:
        mlp = SwiGluMlp(config.hidden_size, config.intermediate_size, bias=False, ops=ops, tp=tp)
    return DecoderLayer(config, ops, attention=MlaAttention(config, ops, tp), mlp=mlp)


class MlaAttention(nn.Module):
    """Attention over the paged latents of one layer, kv [P, 1, 1, S, R + E].

    A step's query is brought to the latents (absorbed), which are few values for many heads; for
    the many rows of a chunk it is less work to make each head's keys and values.
    """

    def __init__(self, config: ModelConfig, ops: Ops, tp: TpGroup) -> None:
        super().__init__()
        assert config.mla is not None
        self._ops = ops
        self._mla = mla = config.mla
        self._scale = _score_scale(mla, config.rope)
        self._rope = ops.rope_interleaved if mla.interleaved else ops.rope
        hidden, heads = config.hidden_size, config.num_heads
        q_rows = even_shard(heads * (mla.nope_dim + mla.rope_dim), tp)
        if mla.q_lora_rank is None:
            self.q_proj = ColumnLinear(hidden, q_rows, bias=False, ops=ops)
        else:
            self.q_a_proj = Linear(hidden, mla.q_lora_rank, bias=False, ops=ops)
            self.q_a_layernorm = RmsNorm(mla.q_lora_rank, _LATENT_EPS, ops)
            self.q_b_proj = ColumnLinear(mla.q_lora_rank, q_rows, bias=False, ops=ops)
        self.kv_a_proj_with_mqa = Linear(hidden, mla.record_dim, bias=False, ops=ops)
        self.kv_a_layernorm = RmsNorm(mla.latent_dim, _LATENT_EPS, ops)
        kv_rows = even_shard(heads * (mla.nope_dim + mla.v_dim), tp)
        self.kv_b_proj = ColumnLinear(mla.latent_dim, kv_rows, bias=False, ops=ops)
        # Absorbed, its parts are read as matrices of their own.
        self.kv_b_proj.float8 = ()
        v_columns = even_shard(heads * mla.v_dim, tp, dim=1)
        self.o_proj = RowLinear(v_columns, hidden, bias=False, ops=ops, tp=tp)

    def forward(self, x: Tensor, layer_pass: LayerPass) -> Tensor:
        """x [T, H] -> [T, H]. The latents come first: they are sent while the rest is computed."""
        mla, cos_sin, batch = self._mla, layer_pass.cos_sin, layer_pass.batch
        kv = layer_pass.kv[:, 0, 0]
        latent, k_rope = self.kv_a_proj_with_mqa(x).tensor_split([mla.latent_dim], dim=-1)
        latent = self.kv_a_layernorm(latent)
        self._ops.mla_append(latent, k_rope, *cos_sin, kv, batch, mla.interleaved)
        layer_pass.on_kv_ready()
        q_nope, q_rope = self._queries(x).tensor_split([mla.nope_dim], dim=-1)
        q_rope = self._rope(q_rope, *cos_sin)
        out = x.new_empty(*q_nope.shape[:2], mla.v_dim)
        for group, attend in ((batch.decodes, self._absorbed), (batch.chunks, self._expanded)):
            if len(group):
                rows = group.rows
                out[rows] = attend(q_nope[rows], q_rope[rows], kv, group)
        summed: Tensor = self.o_proj(out.flatten(1))
        return summed

    def _queries(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, Hq, N + E] of this rank's heads."""
        if self._mla.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        heads: Tensor = q.view(x.shape[0], -1, self._mla.nope_dim + self._mla.rope_dim)
        return heads

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, kv: Tensor, group: RequestGroup) -> Tensor:
        """[T, Hq, N] and [T, Hq, E] -> [T, Hq, V], by way of the latents."""
        mla = self._mla
        by_head = self.kv_b_proj.weight.view(-1, mla.nope_dim + mla.v_dim, mla.latent_dim)
        to_latent, to_value = by_head.tensor_split([mla.nope_dim], dim=1)
        q_latent = torch.einsum("thn,hnr->thr", q_nope, to_latent)
        q = torch.cat([q_latent, q_rope], dim=-1)
        latents = self._ops.mla_attention(q, kv, group, self._scale, mla.latent_dim)
        return torch.einsum("thr,hvr->thv", latents, to_value)

    def _expanded(self, q_nope: Tensor, q_rope: Tensor, kv: Tensor, group: RequestGroup) -> Tensor:
        """[T, Hq, N] and [T, Hq, E] -> [T, Hq, V], by way of each head's keys and values."""
        mla = self._mla
        contexts = self._ops.mla_contexts(kv, group, mla.latent_dim, q_nope.dtype)
        latent, k_rope = contexts.tensor_split([mla.latent_dim], dim=-1)
        by_head = self.kv_b_proj(latent).view(len(latent), -1, mla.nope_dim + mla.v_dim)
        k_nope, v = by_head.tensor_split([mla.nope_dim], dim=-1)
        q = torch.cat([q_nope, q_rope], dim=-1)
        return self._ops.mla_prefill(q, k_nope, k_rope, v, group, self._scale)


def _score_scale(mla: MlaConfig, rope: RopeConfig) -> float:
    """(N + E)^-1/2, and under YaRN the square of the factor by which rotated vectors would be
    longer elsewhere: here the scores are scaled, of which the rotated part is but one term.
    """
    scale: float = (mla.nope_dim + mla.rope_dim) ** -0.5
    if isinstance(rope.scaling, YarnScaling) and rope.scaling.mscale_all_dim:
        scale *= (0.1 * rope.scaling.mscale_all_dim * math.log(rope.scaling.factor) + 1.0) ** 2
    return scale


class DeepseekMoe(nn.Module):
    """A token's experts from its best groups of them, and one MLP that all tokens go through."""

    def __init__(self, hidden_size: int, config: ExpertsConfig, ops: Ops, tp: TpGroup) -> None:
        super().__init__()
        self._tp = tp
        self.gate = GroupedRouter(hidden_size, config, ops)
        self.experts = Experts(hidden_size, config, ops, tp)
        self.shared_experts = SwiGluMlp(
            hidden_size, config.shared_inner_size, bias=False, ops=ops, tp=tp
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] -> the same shape."""
        weights, ids = self.gate(x)
        return self._tp.sum(self.experts(x, weights, ids) + self.shared_experts.partial(x))


class GroupedRouter(nn.Module):
    """Scores in float32, and a bias that only chooses."""

    #: Parameters that are not in the model's dtype.
    float32 = frozenset({"weight", "e_score_correction_bias"})

    def __init__(self, hidden_size: int, config: ExpertsConfig, ops: Ops) -> None:
        super().__init__()
        assert isinstance(config.routing, GroupedRouting)
        self._ops = ops
        self._num_chosen = config.num_chosen
        self._routing = config.routing
        size = config.num_experts
        self.weight = nn.Parameter(torch.empty(size, hidden_size), requires_grad=False)
        self.e_score_correction_bias = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> weights and ids [T, K]."""
        logits = self._ops.linear(x.to(self.weight.dtype), self.weight, None)
        return self._ops.grouped_routing(
            logits,
            self.e_score_correction_bias,
            self._num_chosen,
            self._routing.num_groups,
            self._routing.num_chosen_groups,
            self._routing.renormalise,
            self._routing.scale,
        )
