"""What engines get wrong while still writing fluent text, made on purpose in our own models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pdx.checkpoint.model import ModelConfig
from pdx.kernels.ops import REFERENCE_OPS, Ops
from pdx.models.registry import CausalLM
from tests.models.comparison import difference
from tests.oracle.transformers_oracle import Oracle

__all__ = ["Mistake", "eps", "experts", "rope"]


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One of the three ways to spoil a model."""

    config: Callable[[ModelConfig], ModelConfig] = lambda config: config
    ops: Ops = REFERENCE_OPS
    change: Callable[[CausalLM], None] = lambda model: None

    def moves(self, folder: Path, oracle: Oracle, ids: list[int]) -> float:
        """How far the largest logit difference is then."""
        config = self.config(ModelConfig.load(folder))
        return difference(folder, oracle, ids, self.ops, config, self.change)


def rope(**changes: Any) -> Mistake:
    return Mistake(config=lambda config: replace(config, rope=replace(config.rope, **changes)))


def eps(factor: float) -> Mistake:
    return Mistake(config=lambda config: replace(config, rms_norm_eps=config.rms_norm_eps * factor))


def experts(**changes: Any) -> Mistake:
    def change(config: ModelConfig) -> ModelConfig:
        assert config.experts is not None
        return replace(config, experts=replace(config.experts, **changes))

    return Mistake(config=change)
