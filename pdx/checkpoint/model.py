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

from pdx.checkpoint.experts import ExpertsConfig, parse_deepseek_experts, parse_qwen3_experts
from pdx.checkpoint.layers import LayerGroup, full_attention
from pdx.checkpoint.mla import MlaConfig, parse_mla
from pdx.checkpoint.model_fields import MAX_SIZE, Fields, read_json, shortened
from pdx.checkpoint.quantization import Float8Blocks, parse_quantization
from pdx.checkpoint.rope import RopeConfig, YarnScaling, parse_rope
from pdx.errors import CheckpointError

__all__ = ["Family", "ModelConfig"]

# These bound numbers that our loops count up to. Published models have at most a tenth of them.
_MAX_LAYERS = 1024
_MAX_DRAFT_LAYERS = 16
_MAX_HEADS = 1 << 16
_MAX_VOCAB_SIZE = 1 << 24


class Family(enum.StrEnum):
    """Architectures that are served; each is one file in ``pdx.models``."""

    LLAMA = "llama"
    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3_moe"
    DEEPSEEK_V3 = "deepseek_v3"


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
    #: The type of the stored weights: "float32", "bfloat16" or "float16".
    dtype: str
    bos_token_id: int | None
    #: Ids that end an output: config.json's and generation_config.json's together, in this order.
    eos_token_ids: tuple[int, ...]
    #: Whether the heads of Q and K are normed, each kind with one weight.
    qk_norm: bool = False
    #: None: every layer is dense.
    experts: ExpertsConfig | None = None
    #: None: heads have keys and values of their own, and ``head_dim`` is the size of either.
    mla: MlaConfig | None = None
    #: Layers behind the last that only draft tokens; a checkpoint may lack what it promises here.
    num_draft_layers: int = 0
    #: None: weights are stored as they are.
    quantization: Float8Blocks | None = None

    @property
    def rope_dim(self) -> int:
        """How much of a head is rotated."""
        return self.head_dim if self.mla is None else self.mla.rope_dim

    @property
    def kv_parts(self) -> tuple[int, int]:
        """What a token leaves in KV memory for each of ``num_kv_heads``: parts, and the values
        of one: K and V, or one record.
        """
        return (2, self.head_dim) if self.mla is None else (1, self.mla.record_dim)

    def layer_groups(self, *, drafts: bool = False) -> tuple[LayerGroup, ...]:
        """All layers by what they keep of a request: every position, in all models served today.

        Args:
            drafts: whether the layers that draft are among them.
        """
        num_layers = self.num_layers + (self.num_draft_layers if drafts else 0)
        return (full_attention(num_layers),)

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
        quantization = parse_quantization(fields)
        config = _PARSERS[name](fields, _as_ids(generation, extra_eos))
        fields.refuse_rest()
        return dataclasses.replace(config, quantization=quantization)


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
    return dataclasses.replace(_parse_dense(fields, extra_eos, family), qk_norm=True)


def _parse_qwen3_moe(fields: Fields, extra_eos: tuple[int, ...]) -> ModelConfig:
    fields.require("model_type", "qwen3_moe")
    fields.require("qkv_bias", False)
    fields.require("use_qk_norm", True)
    config = _parse_qwen3_fields(fields, extra_eos, Family.QWEN3_MOE)
    experts = parse_qwen3_experts(fields, config.num_layers)
    return dataclasses.replace(config, experts=experts)


def _parse_deepseek_v3(fields: Fields, extra_eos: tuple[int, ...]) -> ModelConfig:
    fields.require("model_type", "deepseek_v3")
    fields.demand("max_position_embeddings")
    fields.require("attention_bias", False)
    fields.require("mlp_bias", False)
    # Every head has a key and a value of its own, made from the latent that all of them share.
    fields.require("num_key_value_heads", fields.peek("num_attention_heads"))
    mla = parse_mla(fields)
    # What transformers 5 writes of its own: the rotated part, and a whole head.
    fields.require("head_dim", mla.rope_dim)
    fields.require("qk_head_dim", mla.nope_dim + mla.rope_dim)
    num_draft_layers = _num_draft_layers(
        fields, "num_nextn_predict_layers", _num_draft_layers(fields, "num_mtp_layers")
    )
    config = _parse_dense(fields, extra_eos, Family.DEEPSEEK_V3, mla)
    experts = parse_deepseek_experts(fields, config.num_layers)
    if experts is None and num_draft_layers:
        why = "a layer that drafts has experts, of which the model has none"
        raise fields.refused("num_nextn_predict_layers", num_draft_layers, why)
    return dataclasses.replace(
        config,
        experts=experts,
        num_draft_layers=num_draft_layers,
    )


_PARSERS: dict[str, Callable[[Fields, tuple[int, ...]], ModelConfig]] = {
    "LlamaForCausalLM": _parse_llama,
    "Qwen3ForCausalLM": _parse_qwen3,
    "Qwen3MoeForCausalLM": _parse_qwen3_moe,
    "DeepseekV3ForCausalLM": _parse_deepseek_v3,
}


def _parse_dense(
    fields: Fields, extra_eos: tuple[int, ...], family: Family, mla: MlaConfig | None = None
) -> ModelConfig:
    """What all models of attention and a SwiGLU MLP have in common."""
    fields.require("hidden_act", "silu")
    fields.require("pruned_heads", {})
    fields.require("add_cross_attention", False)
    hidden_size, num_heads = fields.size("hidden_size"), _num_heads(fields)
    if mla is None:
        num_kv_heads, head_dim = _parse_heads(fields, hidden_size, num_heads)
    else:
        num_kv_heads, head_dim = 1, mla.nope_dim + mla.rope_dim
    num_layers = fields.size("num_hidden_layers", most=_MAX_LAYERS)
    vocab_size = fields.size("vocab_size", most=_MAX_VOCAB_SIZE)
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
        vocab_size=vocab_size,
        max_position_embeddings=_context_len(fields, rope),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        tie_word_embeddings=fields.take("tie_word_embeddings", bool, False),
        attention_bias=fields.take("attention_bias", bool, False),
        mlp_bias=fields.take("mlp_bias", bool, False),
        dtype=_parse_dtype(fields),
        bos_token_id=fields.take("bos_token_id", int, None),
        eos_token_ids=_parse_eos(fields, extra_eos, vocab_size),
        mla=mla,
    )


def _num_heads(fields: Fields) -> int:
    return fields.size("num_attention_heads", most=_MAX_HEADS)


def _parse_heads(fields: Fields, hidden_size: int, num_heads: int) -> tuple[int, int]:
    """Number of heads for K and V, and size of a head."""
    num_kv_heads = fields.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        why = f"it does not divide num_attention_heads, which is {num_heads}"
        raise fields.refused("num_key_value_heads", num_kv_heads, why)
    head_dim = fields.size("head_dim", max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise fields.refused("head_dim", head_dim, "an even one is wanted, whose pairs are rotated")
    return num_kv_heads, head_dim


def _num_draft_layers(fields: Fields, name: str, default: int = 0) -> int:
    count: int = fields.take(name, int, default)
    if not 0 <= count <= _MAX_DRAFT_LAYERS:
        raise fields.refused(name, count, f"0 to {_MAX_DRAFT_LAYERS} is wanted")
    return count


def _context_len(fields: Fields, rope: RopeConfig) -> int:
    stated = fields.size("max_position_embeddings", 2048)
    if not isinstance(rope.scaling, YarnScaling):
        return stated
    # YaRN is switched on by adding it to a config.json whose length stays the original's.
    scaled = rope.scaling.factor * rope.scaling.original_len
    if scaled > MAX_SIZE:
        why = f"the context would be {scaled:.3g} tokens; at most {MAX_SIZE:,} are served"
        raise fields.refused("factor", rope.scaling.factor, why)
    return max(stated, int(scaled))


def _parse_dtype(fields: Fields) -> str:
    old = fields.take("torch_dtype", str, "float32")
    dtype: str = fields.take("dtype", str, old)
    if dtype not in ("float32", "bfloat16", "float16"):
        raise fields.refused("dtype", dtype, "float32, bfloat16 or float16 is wanted")
    return dtype


def _parse_eos(fields: Fields, extra: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    own = _as_ids(fields.path, fields.take("eos_token_id", (int, list), None))
    # An id outside the vocabulary (some write -1 for none) is never drawn, so it ends nothing.
    return tuple(i for i in dict.fromkeys(own + extra) if 0 <= i < vocab_size)


def _as_ids(path: Path, value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in ids):
        raise CheckpointError(
            f"{path}: eos_token_id = {shortened(json.dumps(value))} is not served"
        )
    return tuple(ids)
