"""Which tensors a checkpoint of a configuration has, by name and shape. Pure; no torch.

The modules of ``pdx.models`` say the same by their parameters (a test compares the two). This table
exists so that a folder can be judged where no torch is: before ranks start, and by ``--check`` and
``pdx inspect model``.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import TypeAlias

from pdx.checkpoint.experts import ExpertsConfig
from pdx.checkpoint.mla import MlaConfig
from pdx.checkpoint.model import ModelConfig

__all__ = ["EMBEDDING", "HEAD", "draft_tensors", "kv_scale_tensors", "wanted_tensors"]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

Shapes: TypeAlias = Iterator[tuple[str, tuple[int, ...]]]


def wanted_tensors(config: ModelConfig, stored: Container[str]) -> dict[str, tuple[int, ...]]:
    """All tensors but those of the layers that draft.

    Args:
        stored: names that the checkpoint has: they say in which of two ways it keeps its experts.
    """
    return dict(_model(config, stored))


def draft_tensors(config: ModelConfig, stored: Container[str]) -> dict[str, tuple[int, ...]]:
    """The tensors of the layers that draft, which follow the model's own layers."""
    return dict(_drafts(config, stored))


def kv_scale_tensors(config: ModelConfig) -> frozenset[str]:
    """Scales of a float8 KV cache, which a checkpoint may bring: one value each."""
    if config.mla is not None:
        return frozenset()
    layers = range(config.num_layers)
    return frozenset(
        f"model.layers.{layer}.self_attn.{leaf}" for layer in layers for leaf in _KV_SCALES
    )


_KV_SCALES = ("k_scale", "v_scale")


def _model(config: ModelConfig, stored: Container[str]) -> Shapes:
    hidden, experts = config.hidden_size, config.experts
    yield EMBEDDING, (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        is_sparse = experts is not None and layer in experts.layers
        yield from _layer(config, f"model.layers.{layer}", stored, is_sparse=is_sparse)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield HEAD, (config.vocab_size, hidden)


def _drafts(config: ModelConfig, stored: Container[str]) -> Shapes:
    hidden, table = config.hidden_size, (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers, config.num_layers + config.num_draft_layers):
        prefix = f"model.layers.{layer}"
        yield from _layer(config, prefix, stored, is_sparse=True)
        yield f"{prefix}.embed_tokens.weight", table
        yield f"{prefix}.enorm.weight", (hidden,)
        yield f"{prefix}.hnorm.weight", (hidden,)
        yield f"{prefix}.eh_proj.weight", (hidden, 2 * hidden)
        yield f"{prefix}.shared_head.norm.weight", (hidden,)
        yield f"{prefix}.shared_head.head.weight", table


def _layer(config: ModelConfig, prefix: str, stored: Container[str], *, is_sparse: bool) -> Shapes:
    yield f"{prefix}.input_layernorm.weight", (config.hidden_size,)
    attention = f"{prefix}.self_attn"
    if config.mla is None:
        yield from _attention(config, attention)
    else:
        yield from _latent_attention(config, config.mla, attention)
    yield f"{prefix}.post_attention_layernorm.weight", (config.hidden_size,)
    if is_sparse:
        assert config.experts is not None
        yield from _experts(config.hidden_size, config.experts, f"{prefix}.mlp", stored)
    else:
        inner = config.intermediate_size
        yield from _mlp(config.hidden_size, inner, f"{prefix}.mlp", has_bias=config.mlp_bias)


def _attention(config: ModelConfig, prefix: str) -> Shapes:
    hidden, head_dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    for name, rows, columns in (
        ("q_proj", q_size, hidden),
        ("k_proj", kv_size, hidden),
        ("v_proj", kv_size, hidden),
        ("o_proj", hidden, q_size),
    ):
        yield from _linear(f"{prefix}.{name}", rows, columns, has_bias=config.attention_bias)
    if config.qk_norm:
        yield f"{prefix}.q_norm.weight", (head_dim,)
        yield f"{prefix}.k_norm.weight", (head_dim,)


def _latent_attention(config: ModelConfig, mla: MlaConfig, prefix: str) -> Shapes:
    hidden, heads, q_rank = config.hidden_size, config.num_heads, mla.q_lora_rank
    q_size = heads * (mla.nope_dim + mla.rope_dim)
    if q_rank is None:
        yield f"{prefix}.q_proj.weight", (q_size, hidden)
    else:
        yield f"{prefix}.q_a_proj.weight", (q_rank, hidden)
        yield f"{prefix}.q_a_layernorm.weight", (q_rank,)
        yield f"{prefix}.q_b_proj.weight", (q_size, q_rank)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (mla.record_dim, hidden)
    yield f"{prefix}.kv_a_layernorm.weight", (mla.latent_dim,)
    yield f"{prefix}.kv_b_proj.weight", (heads * (mla.nope_dim + mla.v_dim), mla.latent_dim)
    yield f"{prefix}.o_proj.weight", (hidden, heads * mla.v_dim)


def _experts(hidden: int, experts: ExpertsConfig, prefix: str, stored: Container[str]) -> Shapes:
    num, inner = experts.num_experts, experts.inner_size
    yield f"{prefix}.gate.weight", (num, hidden)
    if experts.routing.has_bias:
        yield f"{prefix}.gate.e_score_correction_bias", (num,)
    yield from _inner_of_experts(
        {"gate_proj": (inner, hidden), "up_proj": (inner, hidden)},
        f"{prefix}.experts",
        *(num, "gate_up_proj", (num, 2 * inner, hidden), stored),
    )
    yield from _inner_of_experts(
        {"down_proj": (hidden, inner)},
        f"{prefix}.experts",
        *(num, "down_proj", (num, hidden, inner), stored),
    )
    if experts.shared_inner_size:
        shared = f"{prefix}.shared_experts"
        yield from _mlp(hidden, experts.shared_inner_size, shared, has_bias=False)


def _inner_of_experts(
    of_one: dict[str, tuple[int, int]],
    prefix: str,
    num_experts: int,
    fused_name: str,
    fused_shape: tuple[int, ...],
    stored: Container[str],
) -> Shapes:
    """A tensor for each expert, as published; one of all experts where only that is stored."""
    each = [
        (f"{prefix}.{expert}.{name}.weight", shape)
        for expert in range(num_experts)
        for name, shape in of_one.items()
    ]
    fused = f"{prefix}.{fused_name}"
    if fused in stored and not any(name in stored for name, _ in each):
        yield fused, fused_shape
    else:
        yield from each


def _mlp(hidden: int, inner: int, prefix: str, *, has_bias: bool) -> Shapes:
    yield from _linear(f"{prefix}.gate_proj", inner, hidden, has_bias=has_bias)
    yield from _linear(f"{prefix}.up_proj", inner, hidden, has_bias=has_bias)
    yield from _linear(f"{prefix}.down_proj", hidden, inner, has_bias=has_bias)


def _linear(prefix: str, rows: int, columns: int, *, has_bias: bool) -> Shapes:
    yield f"{prefix}.weight", (rows, columns)
    if has_bias:
        yield f"{prefix}.bias", (rows,)
