"""Llama: pre-norm decoder layers of grouped-query attention with rotary positions and a SwiGLU MLP.

Source: Touvron et al. 2023, "LLaMA"; Llama 3 differs only in its numbers. Parameter names are the
checkpoint's. Shapes: T tokens of all requests of a pass together, H hidden, Hq/Hkv heads, D head
dim, P pages, S page size.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.functional import linear

from pdx.config.model import ModelConfig
from pdx.kernels.ops import Ops
from pdx.kernels.paged_batch import PagedBatch
from pdx.models.layers import Embedding, Linear, RmsNorm
from pdx.models.rope import RotaryEmbedding

__all__ = ["LlamaForCausalLM"]


class LlamaForCausalLM(nn.Module):
    """The model and its output head (which may be the embedding itself)."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.model = LlamaModel(config, ops)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=False)
        )

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv: Tensor,
        batch: PagedBatch,
        on_layer_kv_ready: Callable[[int], None],
    ) -> Tensor:
        """Run one pass.

        Args:
            token_ids: int64 [T].
            positions: int64 [T], each token's place in its request.
            kv: [L, P, Hkv, 2, S, D], appended to in place.
            batch: where the tokens lie in kv.
            on_layer_kv_ready: called with a layer's index once its K and V are in kv, before its
                attention.

        Returns:
            [T, H] after the final norm.
        """
        hidden: Tensor = self.model(token_ids, positions, kv, batch, on_layer_kv_ready)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden rows [N, H] -> float32 [N, V]. Ask only for rows that are read: V is large."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return linear(hidden, head.weight).float()


class LlamaModel(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(config, ops) for _ in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv: Tensor,
        batch: PagedBatch,
        on_layer_kv_ready: Callable[[int], None],
    ) -> Tensor:
        hidden: Tensor = self.embed_tokens(token_ids)
        cos_sin = self.rotary(positions)
        for layer_idx, layer in enumerate(self.layers):

            def ready(layer_idx: int = layer_idx) -> None:
                on_layer_kv_ready(layer_idx)

            hidden = layer(hidden, cos_sin, kv[layer_idx], batch, ready)
        normed: Tensor = self.norm(hidden)
        return normed


class LlamaLayer(nn.Module):
    """h = x + attention(norm(x)); y = h + mlp(norm(h))."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.self_attn = LlamaAttention(config, ops)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.mlp = LlamaMlp(config, ops)

    def forward(
        self,
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        kv: Tensor,
        batch: PagedBatch,
        on_kv_ready: Callable[[], None],
    ) -> Tensor:
        h = x + self.self_attn(self.input_layernorm(x), cos_sin, kv, batch, on_kv_ready)
        y: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return y


class LlamaAttention(nn.Module):
    """Grouped-query attention over the paged KV of one layer."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self._ops = ops
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, bias=config.attention_bias)
        self.k_proj = Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.attention_bias)

    def forward(
        self,
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        kv: Tensor,
        batch: PagedBatch,
        on_kv_ready: Callable[[], None],
    ) -> Tensor:
        heads = (x.shape[0], -1, self._head_dim)
        k = self._ops.rope(self.k_proj(x).view(heads), *cos_sin)
        v = self.v_proj(x).view(heads)
        self._ops.kv_append(k, v, kv, batch)
        on_kv_ready()
        q = self._ops.rope(self.q_proj(x).view(heads), *cos_sin)
        attended = self._ops.paged_attention(q, kv, batch, self._scale)
        out: Tensor = self.o_proj(attended.flatten(1))
        return out


class LlamaMlp(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self._ops = ops
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, bias=bias)
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self._ops.silu_mul(self.gate_proj(x), self.up_proj(x)))
        return y
