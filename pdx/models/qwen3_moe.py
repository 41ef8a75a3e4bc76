"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-Coder): Qwen3's layers, most of them with experts for an MLP.

Source: Qwen Team 2025, "Qwen3 Technical Report", section 2. Shapes: T tokens of all requests of a
pass together, H hidden, E experts, of which each token has K.
"""

from __future__ import annotations

from torch import Tensor, nn

from pdx.checkpoint.experts import ExpertsConfig, SoftmaxRouting
from pdx.checkpoint.model import ModelConfig
from pdx.kernels.ops import Ops
from pdx.models.decoder import CausalLM, DecoderLayer
from pdx.models.experts import Experts
from pdx.models.layers import Linear, SwiGluMlp
from pdx.models.qwen3 import Qwen3Attention
from pdx.models.sharding import TpGroup

__all__ = ["build_qwen3_moe"]


def build_qwen3_moe(config: ModelConfig, ops: Ops, tp: TpGroup) -> CausalLM:
    """This rank's part of the model, with its parameters not yet filled."""
    layers = (
        DecoderLayer(
            config,
            ops,
            attention=Qwen3Attention(config, ops, tp),
            mlp=_mlp(config, layer_idx, ops, tp),
        )
        for layer_idx in range(config.num_layers)
    )
    return CausalLM(config, ops, tp, layers)


def _mlp(config: ModelConfig, layer_idx: int, ops: Ops, tp: TpGroup) -> nn.Module:
    if config.experts is not None and layer_idx in config.experts.layers:
        return SparseMlp(config.hidden_size, config.experts, ops, tp)
    return SwiGluMlp(config.hidden_size, config.intermediate_size, bias=False, ops=ops, tp=tp)


class SparseMlp(nn.Module):
    """A token's most likely experts, weighed by their probabilities."""

    def __init__(self, hidden_size: int, config: ExpertsConfig, ops: Ops, tp: TpGroup) -> None:
        super().__init__()
        self._ops = ops
        self._tp = tp
        self._num_chosen = config.num_chosen
        assert isinstance(config.routing, SoftmaxRouting)
        self._renormalise = config.routing.renormalise
        self.gate = Linear(hidden_size, config.num_experts, bias=False, ops=ops)
        self.experts = Experts(hidden_size, config, ops, tp)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] -> the same shape."""
        weights, ids = self._ops.softmax_routing(self.gate(x), self._num_chosen, self._renormalise)
        return self._tp.sum(self.experts(x, weights, ids))
