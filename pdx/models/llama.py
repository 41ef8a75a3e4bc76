"""Llama: pre-norm layers of grouped-query attention with rotary positions and a SwiGLU MLP.

Source: Touvron et al. 2023, "LLaMA"; Llama 3 differs only in its numbers. Shapes: T tokens of all
requests of a pass together, H hidden, Hq/Hkv heads, D head dim, P pages, S page size.
"""

from __future__ import annotations

from torch import Tensor, nn

from pdx.checkpoint.model import ModelConfig
from pdx.kernels.ops import Ops
from pdx.models.decoder import CausalLM, DecoderLayer, LayerPass
from pdx.models.layers import ColumnLinear, RowLinear, SwiGluMlp, stored_scales
from pdx.models.sharding import TpGroup, even_shard, kv_shard

__all__ = ["build_llama"]


def build_llama(config: ModelConfig, ops: Ops, tp: TpGroup) -> CausalLM:
    """This rank's part of the model, with its parameters not yet filled."""
    layers = (
        DecoderLayer(
            config,
            ops,
            attention=LlamaAttention(config, ops, tp),
            mlp=SwiGluMlp(
                config.hidden_size, config.intermediate_size, bias=config.mlp_bias, ops=ops, tp=tp
            ),
        )
        for _ in range(config.num_layers)
    )
    return CausalLM(config, ops, tp, layers)


class LlamaAttention(nn.Module):
    """Grouped-query attention over the paged KV of one layer, kv [P, Hkv, 2, S, D]."""

    #: What a stored K, and a stored V, of 1 means where the KV memory is float8; a loader fills in
    #: the checkpoint's.
    kv_scales = (1.0, 1.0)

    def __init__(self, config: ModelConfig, ops: Ops, tp: TpGroup) -> None:
        super().__init__()
        self._ops = ops
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        hidden, bias = config.hidden_size, config.attention_bias
        q_rows = even_shard(config.num_heads * config.head_dim, tp)
        kv_rows = kv_shard(config.num_kv_heads, config.head_dim, tp)
        self.q_proj = ColumnLinear(hidden, q_rows, bias=bias, ops=ops)
        self.k_proj = ColumnLinear(hidden, kv_rows, bias=bias, ops=ops)
        self.v_proj = ColumnLinear(hidden, kv_rows, bias=bias, ops=ops)
        q_columns = even_shard(config.num_heads * config.head_dim, tp, dim=1)
        self.o_proj = RowLinear(q_columns, hidden, bias=bias, ops=ops, tp=tp)

    def forward(self, x: Tensor, layer_pass: LayerPass) -> Tensor:
        """x [T, H] -> [T, H]. K and V come first: they are sent while the rest is computed."""
        ops, cos_sin, kv, batch = self._ops, layer_pass.cos_sin, layer_pass.kv, layer_pass.batch
        heads = (x.shape[0], -1, self._head_dim)
        k = self.k_proj(x).view(heads)
        v = self.v_proj(x).view(heads)
        scales = stored_scales(kv, self.kv_scales)
        ops.rope_kv_append(k, v, *cos_sin, kv, batch, kv_scales=scales)
        layer_pass.on_kv_ready()
        q = ops.rope(self.q_proj(x).view(heads), *cos_sin)
        attended = ops.paged_attention(q, kv, batch, self._scale, kv_scales=scales)
        out: Tensor = self.o_proj(attended.flatten(1))
        return out
