"""DeepSeek-V3's layer that drafts (multi-token prediction): from a position and the token after it
to the token after that.

Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2. Who uses it:
``pdx.runner.drafting``. Where nobody does, its tensors are checked and left on disk.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pdx.checkpoint.model import ModelConfig
from pdx.kernels.ops import Ops
from pdx.models.decoder import DecoderLayer, LayerPass
from pdx.models.deepseek_v3 import DeepseekMoe, MlaAttention
from pdx.models.layers import ColumnLinear, Embedding, Linear, RmsNorm
from pdx.models.sharding import TpGroup, even_shard

__all__ = ["DraftLayer"]


class DraftLayer(DecoderLayer):
    """One sparse layer over a mixture of the model's output and the next token's embedding."""

    def __init__(self, config: ModelConfig, ops: Ops, tp: TpGroup) -> None:
        assert config.experts is not None
        super().__init__(
            config,
            ops,
            attention=MlaAttention(config, ops, tp),
            mlp=DeepseekMoe(config.hidden_size, config.experts, ops, tp),
        )
        hidden, eps = config.hidden_size, config.rms_norm_eps
        # Copies of the model's own.
        self.embed_tokens = Embedding(config.vocab_size, hidden, tp)
        self.enorm = RmsNorm(hidden, eps, ops)
        self.hnorm = RmsNorm(hidden, eps, ops)
        self.eh_proj = Linear(2 * hidden, hidden, bias=False, ops=ops)
        self.shared_head = _SharedHead(config, ops, tp)

    @property
    def head(self) -> Tensor:
        """This rank's rows of the layer's output head, for ``CausalLM.logits``."""
        weight: Tensor = self.shared_head.head.weight
        return weight

    def draft(self, hidden: Tensor, next_ids: Tensor, layer_pass: LayerPass) -> Tensor:
        """What ``CausalLM.logits`` takes, for the token after the next one.

        Args:
            hidden: [T, H], the model's output after its final norm.
            next_ids: int [T], the token that follows each position.
            layer_pass: of this layer's own KV, by the positions of ``hidden``.
        """
        both = [self.enorm(self.embed_tokens(next_ids)), self.hnorm(hidden)]
        mixed: Tensor = self.eh_proj(torch.cat(both, dim=-1))
        normed: Tensor = self.shared_head.norm(self(mixed, layer_pass))
        return normed


class _SharedHead(nn.Module):
    """A final norm of the draft's own, and a copy of the model's output head."""

    def __init__(self, config: ModelConfig, ops: Ops, tp: TpGroup) -> None:
        super().__init__()
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, ops)
        rows = even_shard(config.vocab_size, tp)
        self.head = ColumnLinear(config.hidden_size, rows, bias=False, ops=ops)
        self.head.float8 = ()  # read as the model's own head is
