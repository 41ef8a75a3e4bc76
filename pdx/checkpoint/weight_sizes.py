"""How many values a model's weights have, and which of them a rank holds. Pure; no torch.

Counted from the configuration, so that a deployment can be planned before anything is downloaded.
Shapes as in ``pdx.models``, whose modules the tests count.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pdx.checkpoint.model import ModelConfig

__all__ = ["Split", "WeightGroup", "rank_weight_bytes", "weight_groups"]

_FLOAT32_BYTES = 4


class Split(enum.Enum):
    """How ranks share a group of weights."""

    #: Each has an equal part.
    RANKS = "split over the ranks"
    #: Each has its KV heads'; with more ranks than heads, several have the same.
    KV_HEADS = "split by KV heads"
    #: Each has all of it.
    WHOLE = "whole on every rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """Weights that ranks share in the same way."""

    name: str
    num_values: int
    split: Split
    #: Float8 where the checkpoint stores it so; else in the model's dtype.
    is_matrix: bool = True
    #: Never in the model's dtype.
    is_float32: bool = False

    def values_of_rank(self, config: ModelConfig, tp_size: int) -> int:
        """What the fullest rank holds."""
        match self.split:
            case Split.RANKS:
                return -(-self.num_values // tp_size)
            case Split.KV_HEADS:
                return self.num_values // min(tp_size, config.num_kv_heads)
            case Split.WHOLE:
                return self.num_values


def rank_weight_bytes(
    config: ModelConfig, tp_size: int, itemsize: int, *, keeps_float8: bool
) -> int:
    """Bytes of a rank's weights.

    Args:
        itemsize: bytes of a value in the model's dtype.
        keeps_float8: whether float8 weights stay as they are stored, with their scales.
    """
    blocks = config.quantization if keeps_float8 else None
    total = 0
    for group in weight_groups(config):
        num_values = group.values_of_rank(config, tp_size)
        if group.is_float32:
            total += num_values * _FLOAT32_BYTES
        elif group.is_matrix and blocks is not None:
            block_size = blocks.num_rows * blocks.num_columns
            total += num_values + num_values * _FLOAT32_BYTES // block_size
        else:
            total += num_values * itemsize
    return total


def weight_groups(config: ModelConfig) -> list[WeightGroup]:
    """All weights but those of drafting layers, which stay on disk."""
    num_layers, hidden = config.num_layers, config.hidden_size
    num_tables = 1 if config.tie_word_embeddings else 2
    tables = num_tables * config.vocab_size * hidden
    num_norm_values = (2 * num_layers + 1) * hidden
    groups = [
        WeightGroup(
            name="embedding and output head", num_values=tables, split=Split.RANKS, is_matrix=False
        ),
        WeightGroup(name="norms", num_values=num_norm_values, split=Split.WHOLE, is_matrix=False),
    ]
    groups += _attention(config) if config.mla is None else _latent_attention(config)
    return [group for group in groups + _mlps(config) if group.num_values]


def _attention(config: ModelConfig) -> list[WeightGroup]:
    num_layers, hidden, head_dim = config.num_layers, config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    has_bias = int(config.attention_bias)
    return [
        WeightGroup(
            name="queries and output of attention",
            num_values=num_layers * (2 * hidden + has_bias) * q_size,
            split=Split.RANKS,
        ),
        WeightGroup(
            name="keys and values",
            num_values=num_layers * 2 * kv_size * (hidden + has_bias),
            split=Split.KV_HEADS,
        ),
        WeightGroup(
            name="bias of attention's output",
            num_values=num_layers * hidden * has_bias,
            split=Split.WHOLE,
            is_matrix=False,
        ),
        WeightGroup(
            name="norms of heads",
            num_values=num_layers * 2 * head_dim if config.qk_norm else 0,
            split=Split.WHOLE,
            is_matrix=False,
        ),
    ]


def _latent_attention(config: ModelConfig) -> list[WeightGroup]:
    assert config.mla is not None
    mla, num_layers, hidden = config.mla, config.num_layers, config.hidden_size
    q_rank = mla.q_lora_rank or 0
    q_inputs = q_rank or hidden
    by_head = q_inputs * config.head_dim + mla.v_dim * hidden
    return [
        WeightGroup(
            name="heads of attention",
            num_values=num_layers * config.num_heads * by_head,
            split=Split.RANKS,
        ),
        WeightGroup(
            # Read by halves, which no kernel does of float8 blocks: in the dtype on every device.
            name="keys and values of latents",
            num_values=num_layers * config.num_heads * mla.latent_dim * (mla.nope_dim + mla.v_dim),
            split=Split.RANKS,
            is_matrix=False,
        ),
        WeightGroup(
            name="projections to latents",
            num_values=num_layers * hidden * (mla.record_dim + q_rank),
            split=Split.WHOLE,
        ),
        WeightGroup(
            name="norms of latents",
            num_values=num_layers * (mla.latent_dim + q_rank),
            split=Split.WHOLE,
            is_matrix=False,
        ),
    ]


def _mlps(config: ModelConfig) -> list[WeightGroup]:
    hidden, experts = config.hidden_size, config.experts
    num_sparse = 0 if experts is None else len(experts.layers)
    num_dense, biases = config.num_layers - num_sparse, int(config.mlp_bias)
    inner = config.intermediate_size
    groups = [
        WeightGroup(
            name="MLPs",
            num_values=num_dense * inner * (3 * hidden + 2 * biases),
            split=Split.RANKS,
        ),
        WeightGroup(
            name="biases of MLPs' outputs",
            num_values=num_dense * hidden * biases,
            split=Split.WHOLE,
            is_matrix=False,
        ),
    ]
    if experts is None:
        return groups
    routing = experts.routing
    return [
        *groups,
        WeightGroup(
            name="experts",
            num_values=num_sparse * experts.num_experts * 3 * hidden * experts.inner_size,
            split=Split.RANKS,
        ),
        WeightGroup(
            name="shared experts",
            num_values=num_sparse * 3 * hidden * experts.shared_inner_size,
            split=Split.RANKS,
        ),
        WeightGroup(
            name="routers",
            num_values=num_sparse * experts.num_experts * (hidden + int(routing.has_bias)),
            split=Split.WHOLE,
            is_matrix=False,
            is_float32=routing.is_float32,
        ),
    ]
