"""What config.json and generation_config.json say, as frozen facts. No torch; any process.

Both layouts are read: the hub's (transformers 4) and what transformers 5 writes. A field that
changes the computation and that we do not serve is refused by name and value, and so is one that we
do not know: serving a model almost right is worse than not serving it. To add an architecture, add
a family, its parser to ``_PARSERS`` and a model file (docs/models.md).
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdx.config.experts import ExpertsConfig, parse_qwen3_experts
from pdx.config.model_fields import Fields, read_json
from pdx.config.rope import RopeConfig, YarnScaling, parse_rope
from pdx.errors import CheckpointError

__all__ = ["Family", "ModelConfig"]


class Family(enum.StrEnum):
    """Architectures that are served; each is one file in ``pdx.models``."""

    LLAMA = "llama"
    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3_moe"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a model and the numbers of its computation."""

    family: Family
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    #: Tokens of prompt and output together, at most; YaRN can make it more than config.json says.
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    #: Of the stored weights: "float32", "bfloat16" or "float16".
    dtype: str
    bos_token_id: int | None
    #: Ids that end an output: config.json's and generation_config.json's together, in this order.
    eos_token_ids: tuple[int, ...]
    #: None: every layer is dense.
    experts: ExpertsConfig | None = None

    @classmethod
    def load(cls, folder: Path) -> ModelConfig:
        """Read a local Hugging Face folder.

        Raises:
            CheckpointError: a file is missing or damaged, or describes a model that is not served.
        """
        path = folder / "config.json"
        fields = Fields(path, read_json(path))
        architectures = fields.take("architectures", list, [])
        name = architectures[0] if len(architectures) == 1 else None
        if not isinstance(name, str) or name not in _PARSERS:
            raise CheckpointError(
                f"{path}: architectures {architectures!r} is not served",
                hint=f"served are {', '.join(_PARSERS)}",
            )
        generation = folder / "generation_config.json"
        extra_eos = read_json(generation).get("eos_token_id") if generation.exists() else None
        config = _PARSERS[name](fields, _as_ids(generation, extra_eos))
        fields.refuse_rest()
        return config


def _parse_llama(fields: Fields, extra_eos: tuple[int, ...]) -> ModelConfig:
    fields.require("model_type", "llama")
    return _parse_dense(fields, extra_eos, Family.LLAMA)


def _parse_qwen3(fields: Fields, extra_eos: tuple[int, ...]) -> ModelConfig:
    fields.require("model_type", "qwen3")
    return _parse_qwen3_fields(fields, extra_eos, Family.QWEN3)


def _parse_qwen3_fields(fields: Fields, extra_eos: tuple[int, ...], family: Family) -> ModelConfig:
    # Where they are absent, the defaults are those of one published size, and nobody else's.
    fields.demand("head_dim", "num_key_value_heads", "max_position_embeddings")
    fields.require("mlp_bias", False)
    fields.require("use_sliding_window", False)
    fields.drop("sliding_window", "max_window_layers")  # of a window that is off
    return _parse_dense(fields, extra_eos, family)


def _parse_qwen3_moe(fields: Fields, extra_eos: tuple[int, ...]) -> ModelConfig:
    fields.require("model_type", "qwen3_moe")
    fields.require("qkv_bias", False)
    fields.require("use_qk_norm", True)
    config = _parse_qwen3_fields(fields, extra_eos, Family.QWEN3_MOE)
    experts = parse_qwen3_experts(fields, config.num_layers)
    return dataclasses.replace(config, experts=experts)


_PARSERS: dict[str, Callable[[Fields, tuple[int, ...]], ModelConfig]] = {
    "LlamaForCausalLM": _parse_llama,
    "Qwen3ForCausalLM": _parse_qwen3,
    "Qwen3MoeForCausalLM": _parse_qwen3_moe,
}


def _parse_dense(fields: Fields, extra_eos: tuple[int, ...], family: Family) -> ModelConfig:
    """What all layers of grouped-query attention and a SwiGLU MLP have in common."""
    fields.require("hidden_act", "silu")
    fields.require("pruned_heads", {})
    fields.require("add_cross_attention", False)
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    num_kv_heads = fields.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.refused("num_key_value_heads", num_kv_heads)
    head_dim = fields.size("head_dim", max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise fields.refused("head_dim", head_dim)
    num_layers = fields.size("num_hidden_layers")
    fields.require("layer_types", ["full_attention"] * num_layers)
    rope = parse_rope(fields)
    return ModelConfig(
        family=family,
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=fields.size("vocab_size"),
        max_position_embeddings=_context_len(fields.size("max_position_embeddings", 2048), rope),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        tie_word_embeddings=fields.take("tie_word_embeddings", bool, False),
        attention_bias=fields.take("attention_bias", bool, False),
        mlp_bias=fields.take("mlp_bias", bool, False),
        dtype=_parse_dtype(fields),
        bos_token_id=fields.take("bos_token_id", int, None),
        eos_token_ids=_parse_eos(fields, extra_eos),
    )


def _context_len(stated: int, rope: RopeConfig) -> int:
    # YaRN is switched on by adding it to a config.json whose length stays the original's.
    if isinstance(rope.scaling, YarnScaling):
        return max(stated, int(rope.scaling.factor * rope.scaling.original_len))
    return stated


def _parse_dtype(fields: Fields) -> str:
    old = fields.take("torch_dtype", str, "float32")
    dtype: str = fields.take("dtype", str, old)
    if dtype not in ("float32", "bfloat16", "float16"):
        raise fields.refused("dtype", dtype)
    return dtype


def _parse_eos(fields: Fields, extra: tuple[int, ...]) -> tuple[int, ...]:
    own = _as_ids(fields.path, fields.take("eos_token_id", (int, list), None))
    return tuple(dict.fromkeys(own + extra))


def _as_ids(path: Path, value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in ids):
        raise CheckpointError(f"{path}: eos_token_id = {json.dumps(value)} is not served")
    return tuple(ids)
