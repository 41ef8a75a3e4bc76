"""From a configuration to its model. To add an architecture: one line here, one file beside."""

from __future__ import annotations

from typing import assert_never

from torch import nn

from pdx.checkpoint.model import Family, ModelConfig
from pdx.kernels.ops import Ops
from pdx.models.decoder import CausalLM
from pdx.models.deepseek_draft import DraftLayer
from pdx.models.deepseek_v3 import build_deepseek_v3
from pdx.models.llama import build_llama
from pdx.models.qwen3 import build_qwen3
from pdx.models.qwen3_moe import build_qwen3_moe
from pdx.models.sharding import LoneRank, TpGroup

__all__ = ["CausalLM", "DraftLayer", "add_draft_layer", "build_drafts", "build_model"]

_ALONE = LoneRank()


def build_model(config: ModelConfig, ops: Ops, tp: TpGroup = _ALONE) -> CausalLM:
    """This rank's part of the model, parameters not yet filled, on the device that the caller has
    set.
    """
    match config.family:
        case Family.LLAMA:
            return build_llama(config, ops, tp)
        case Family.QWEN3:
            return build_qwen3(config, ops, tp)
        case Family.QWEN3_MOE:
            return build_qwen3_moe(config, ops, tp)
        case Family.DEEPSEEK_V3:
            return build_deepseek_v3(config, ops, tp)
        case _:
            assert_never(config.family)


def add_draft_layer(
    model: CausalLM, config: ModelConfig, ops: Ops, tp: TpGroup = _ALONE
) -> DraftLayer:
    """The layer that drafts, put behind the model's last one: it is loaded with the model."""
    assert config.num_draft_layers == 1
    layer = DraftLayer(config, ops, tp)
    model.model.layers.append(layer)
    return layer


def build_drafts(config: ModelConfig, ops: Ops, tp: TpGroup = _ALONE) -> nn.ModuleDict:
    """The layers behind the last that only draft, by the names of their parameters; none for most
    models.
    """
    layers = {
        str(config.num_layers + draft_idx): DraftLayer(config, ops, tp)
        for draft_idx in range(config.num_draft_layers)
    }
    return nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleDict(layers)})})
