"""From a configuration to its model. To add an architecture: one line here, one file beside."""

from __future__ import annotations

from typing import assert_never

from pdx.config.model import Family, ModelConfig
from pdx.kernels.ops import Ops
from pdx.models.llama import LlamaForCausalLM

__all__ = ["CausalLM", "build_model"]

#: What the runner can run. A Protocol takes over when the second architecture arrives.
CausalLM = LlamaForCausalLM


def build_model(config: ModelConfig, ops: Ops) -> CausalLM:
    """The model with its parameters not yet filled, on the device that the caller has set."""
    match config.family:
        case Family.LLAMA:
            return LlamaForCausalLM(config, ops)
        case _:
            assert_never(config.family)
