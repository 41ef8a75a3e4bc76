"""What config.json and generation_config.json say, as frozen facts. No torch; any process.

Both layouts are read: the hub's (transformers 4) and what transformers 5 writes. A field that
changes the computation and that we do not serve is refused by name and value, and so is one that we
do not know: serving a model almost right is worse than not serving it. To add an architecture, add
a family, its parser to ``_PARSERS`` and a model file.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdx.errors import CheckpointError

__all__ = ["Family", "LinearScaling", "Llama3Scaling", "ModelConfig", "RopeConfig"]


class Family(enum.StrEnum):
    """Architectures that are served; each is one file in ``pdx.models``."""

    LLAMA = "llama"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions are divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Low frequencies are divided by ``factor``, high ones kept, others blended (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    #: Context that the model was first trained with, tokens.
    original_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding over the whole head, in halves."""

    theta: float
    #: None: unscaled.
    scaling: LinearScaling | Llama3Scaling | None


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
    #: Tokens of prompt and output together, at most.
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

    @classmethod
    def load(cls, folder: Path) -> ModelConfig:
        """Read a local Hugging Face folder.

        Raises:
            CheckpointError: a file is missing or damaged, or describes a model that is not served.
        """
        path = folder / "config.json"
        fields = _Fields(path, _read_json(path))
        architectures = fields.take("architectures", list, [])
        name = architectures[0] if len(architectures) == 1 else None
        if name not in _PARSERS:
            raise CheckpointError(
                f"{path}: architectures {architectures!r} is not served",
                hint=f"served are {', '.join(_PARSERS)}",
            )
        generation = folder / "generation_config.json"
        extra_eos = _read_json(generation).get("eos_token_id") if generation.exists() else None
        config = _PARSERS[name](fields, _as_ids(generation, extra_eos))
        fields.refuse_rest()
        return config


class _Fields:
    """config.json's fields; each is taken once, and what nobody took is looked at in the end."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._rest = dict(values)

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The field's value; null counts as absent, as transformers has it."""
        value = self._rest.pop(name, None)
        if value is None:
            if default is ...:
                raise CheckpointError(f"{self.path}: field {name!r} is missing")
            return default
        # bool is an int in Python and never meant as one here.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.refused(name, value)
        return value

    def size(self, name: str, default: Any = ...) -> int:
        """A positive integer."""
        value: int = self.take(name, int, default)
        if value <= 0:
            raise self.refused(name, value)
        return value

    def number(self, name: str, default: Any = ...) -> float:
        """A positive number."""
        value = float(self.take(name, (int, float), default))
        if not value > 0:
            raise self.refused(name, value)
        return value

    def require(self, name: str, *served: Any) -> None:
        """Refuse the field unless it is absent, null or one of ``served``."""
        value = self._rest.pop(name, None)
        if value is not None and not any(type(value) is type(s) and value == s for s in served):
            raise self.refused(name, value)

    def refused(self, name: str, value: Any) -> CheckpointError:
        return CheckpointError(f"{self.path}: {name} = {json.dumps(value)} is not served")

    def refuse_rest(self) -> None:
        """Refuse fields that nobody took, unless they are null or known to change nothing."""
        unknown = {
            name: value
            for name, value in self._rest.items()
            if value is not None and name not in _IGNORED and not name.startswith("_")
        }
        if unknown:
            listed = ", ".join(f"{name} = {json.dumps(value)}" for name, value in unknown.items())
            raise CheckpointError(
                f"{self.path}: unknown fields: {listed}",
                hint="they may change the computation, so the model is not served",
            )


#: Fields that do not change what the model computes: bookkeeping, training, defaults of generation
#: and of the API.
_IGNORED = frozenset(
    {
        "attention_dropout",
        "auto_map",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "do_sample",
        "early_stopping",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "name_or_path",
        "no_repeat_ngram_size",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "task_specific_params",
        "temperature",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    }
)


def _parse_llama(fields: _Fields, extra_eos: tuple[int, ...]) -> ModelConfig:
    fields.require("model_type", "llama")
    fields.require("hidden_act", "silu")
    fields.require("rope_interleaved", False)
    fields.require("partial_rotary_factor", 1, 1.0)
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
    return ModelConfig(
        family=Family.LLAMA,
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=fields.size("vocab_size"),
        max_position_embeddings=fields.size("max_position_embeddings", 2048),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_parse_rope(fields),
        tie_word_embeddings=fields.take("tie_word_embeddings", bool, False),
        attention_bias=fields.take("attention_bias", bool, False),
        mlp_bias=fields.take("mlp_bias", bool, False),
        dtype=_parse_dtype(fields),
        bos_token_id=fields.take("bos_token_id", int, None),
        eos_token_ids=_parse_eos(fields, extra_eos),
    )


_PARSERS: dict[str, Callable[[_Fields, tuple[int, ...]], ModelConfig]] = {
    "LlamaForCausalLM": _parse_llama
}


def _parse_rope(fields: _Fields) -> RopeConfig:
    """``rope_theta`` and ``rope_scaling`` (hub), or ``rope_parameters`` (transformers 5) first."""
    top_theta = fields.number("rope_theta", 10000.0)
    scaling = fields.take("rope_scaling", dict, {})
    parameters = fields.take("rope_parameters", dict, scaling)
    rope = _Fields(fields.path, parameters)
    theta = rope.number("rope_theta", top_theta)
    kind = rope.take("rope_type", str, None)
    # The older spelling, which may stay beside the newer one.
    old_kind = rope.take("type", str, None)
    kind = kind or old_kind or "default"
    result: LinearScaling | Llama3Scaling | None
    if kind == "default":
        result = None
    elif kind == "linear":
        result = LinearScaling(factor=rope.number("factor"))
    elif kind == "llama3":
        result = Llama3Scaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_len=rope.size("original_max_position_embeddings"),
        )
        if result.high_freq_factor <= result.low_freq_factor:
            raise rope.refused("high_freq_factor", result.high_freq_factor)
    else:
        raise rope.refused("rope_type", kind)
    rope.require("partial_rotary_factor", 1, 1.0)
    rope.refuse_rest()
    return RopeConfig(theta=theta, scaling=result)


def _parse_dtype(fields: _Fields) -> str:
    old = fields.take("torch_dtype", str, "float32")
    dtype: str = fields.take("dtype", str, old)
    if dtype not in ("float32", "bfloat16", "float16"):
        raise fields.refused("dtype", dtype)
    return dtype


def _parse_eos(fields: _Fields, extra: tuple[int, ...]) -> tuple[int, ...]:
    own = _as_ids(fields.path, fields.take("eos_token_id", (int, list), None))
    return tuple(dict.fromkeys(own + extra))


def _as_ids(path: Path, value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in ids):
        raise CheckpointError(f"{path}: eos_token_id = {json.dumps(value)} is not served")
    return tuple(ids)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} does not exist", hint="a model folder in Hugging Face layout is wanted"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value
