"""The frame of every decoder-only model: embedding, layers, final norm, output head.

An architecture is what its file puts into the frame: an attention and an MLP for each layer.
Parameter names are the checkpoint's. Shapes: T tokens of all requests of a pass together, H hidden,
L layers, P pages, V vocabulary; what a layer's slice of kv holds is its attention's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from pdx.checkpoint.model import ModelConfig
from pdx.kernels.batch import ForwardBatch
from pdx.kernels.ops import Ops
from pdx.models.layers import ColumnLinear, Embedding, RmsNorm
from pdx.models.rope import RotaryEmbedding
from pdx.models.sharding import TpGroup, even_shard

__all__ = ["CausalLM", "DecoderLayer", "LayerPass"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPass:
    """What a layer's attention needs beside the hidden state."""

    #: cos and sin of the tokens' angles, [T, D/2] each.
    cos_sin: tuple[Tensor, Tensor]
    #: This layer's pages, [P, ...].
    kv: Tensor
    batch: ForwardBatch
    #: Call it once K and V are in ``kv``, before anything else is computed.
    on_kv_ready: Callable[[], None]


class CausalLM(nn.Module):
    """A model and its output head (which may be the embedding itself)."""

    def __init__(
        self, config: ModelConfig, ops: Ops, tp: TpGroup, layers: Iterable[DecoderLayer]
    ) -> None:
        super().__init__()
        #: The ops of its layers, which also draw from its logits.
        self.ops = ops
        self._tp = tp
        self._vocab_sizes = [
            even_shard(config.vocab_size, tp, rank).size for rank in range(tp.size)
        ]
        self.model = _Decoder(config, ops, tp, layers)
        rows = even_shard(config.vocab_size, tp)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else ColumnLinear(config.hidden_size, rows, bias=False, ops=ops)
        )
        if self.lm_head is not None:
            self.lm_head.float8 = ()  # read as the embedding would be

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv: Tensor,
        batch: ForwardBatch,
        on_layer_kv_ready: Callable[[int], None],
    ) -> Tensor:
        """Run one pass.

        Args:
            token_ids: int [T].
            positions: int [T], each token's place in its request.
            kv: [L, P, ...], appended to in place.
            batch: where the tokens lie in kv.
            on_layer_kv_ready: called with a layer's index once its K and V are in kv, before its
                attention.

        Returns:
            [T, H] after the final norm.
        """
        hidden: Tensor = self.model(token_ids, positions, kv, batch, on_layer_kv_ready)
        return hidden

    def logits(self, hidden: Tensor, head: Tensor | None = None) -> Tensor:
        """Hidden rows [N, H] -> float32 [N, V]. Ask only for rows that are read: V is large.

        Args:
            hidden: of ``forward``, or of what ``head`` belongs to.
            head: this rank's rows of another output head, [V / ranks, H]; None: the model's own.
        """
        own = self.model.embed_tokens if self.lm_head is None else self.lm_head
        ours = self.ops.linear(hidden, own.weight if head is None else head, None).float()
        return self._tp.concat(ours, self._vocab_sizes)


class _Decoder(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(
        self, config: ModelConfig, ops: Ops, tp: TpGroup, layers: Iterable[DecoderLayer]
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, tp)
        self._num_layers = config.num_layers
        #: Behind these may be one that drafts, which a pass does not run through.
        self.layers = nn.ModuleList(layers)
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.rotary = RotaryEmbedding(config.rope, config.rope_dim)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv: Tensor,
        batch: ForwardBatch,
        on_layer_kv_ready: Callable[[int], None],
    ) -> Tensor:
        hidden: Tensor = self.embed_tokens(token_ids)
        cos_sin = self.rotary(positions)
        for layer_idx, layer in zip(range(self._num_layers), self.layers, strict=False):

            def ready(layer_idx: int = layer_idx) -> None:
                on_layer_kv_ready(layer_idx)

            layer_pass = LayerPass(
                cos_sin=cos_sin, kv=kv[layer_idx], batch=batch, on_kv_ready=ready
            )
            hidden = layer(hidden, layer_pass)
        normed: Tensor = self.norm(hidden)
        return normed


class DecoderLayer(nn.Module):
    """h = x + attention(norm(x)); y = h + mlp(norm(h)).

    ``attention`` maps (x [T, H], LayerPass) to [T, H], ``mlp`` maps [T, H] to [T, H].
    """

    def __init__(
        self, config: ModelConfig, ops: Ops, *, attention: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.self_attn = attention
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.mlp = mlp

    def forward(self, x: Tensor, layer_pass: LayerPass) -> Tensor:
        """x [T, H] -> [T, H]."""
        attended = self.self_attn(self.input_layernorm(x), layer_pass)
        h, normed = self.post_attention_layernorm.of_sum(x, attended)
        y: Tensor = h + self.mlp(normed)
        return y
