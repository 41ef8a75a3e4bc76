"""Writes tiny seeded checkpoints, as the hub has them and as transformers 5 saves them.

Weights come from numpy's PCG64, seeded by each tensor's name: no order of modules, version of torch
or of its generator changes them. Sizes are chosen so that a mistake shows: embeddings small beside
what layers add, projections large, so that greedy text has many distinct tokens and clear winners.

    python -m tests.oracle.tiny_checkpoint OUT      writes every checkpoint of the tests
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.oracle.tiny_text import (
    BOS,
    CHAT_TEMPLATE,
    EOT,
    PAD,
    TURN_END,
    VOCAB_SIZE,
    build_tokenizer,
)

__all__ = [
    "LLAMA",
    "QWEN3",
    "QWEN3_MOE",
    "QWEN3_UNTIED",
    "Fields",
    "TinyModel",
    "Weights",
    "normal",
    "write_hub_layout",
    "write_v5_layout",
]

Fields = dict[str, Any]
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """One architecture's numbers. ``shared`` fields are spelled alike in both layouts."""

    shared: Fields
    rope_theta: float
    rope_scaling: Fields | None
    #: Fields that only one of the layouts has.
    hub_only: Fields
    v5_only: Fields
    puts_bos: bool
    #: Picked among a few so that no greedy choice after the test prompts is a near tie.
    salt: str
    #: Makes all tensors, by their checkpoint names.
    weights: Callable[[TinyModel], Weights]
    num_files: int = 1
    #: What ``_llama_weights`` goes by. Gain of the output projections: small beside 1, so that no
    #: layer drowns the others. Mean of the final norm: large where the head is the embedding, whose
    #: values are small.
    qk_norm: bool = False
    residual_gain: float = 0.01
    norm_mean: float = 1.0

    @property
    def head_dim(self) -> int:
        """Its own field, or hidden / heads."""
        derived = self.shared["hidden_size"] // self.shared["num_attention_heads"]
        return int(self.shared.get("head_dim", derived))


def _llama_weights(model: TinyModel) -> Weights:
    """Llama's, and what Qwen3 and Qwen3-MoE add to them; bfloat16."""
    fields = model.shared
    hidden = fields["hidden_size"]
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    attention = {
        "self_attn.q_proj": (heads * model.head_dim, hidden, 1.5),
        "self_attn.k_proj": (kv_heads * model.head_dim, hidden, 1.5),
        "self_attn.v_proj": (kv_heads * model.head_dim, hidden, 1.5),
        "self_attn.o_proj": (hidden, heads * model.head_dim, model.residual_gain),
    }
    norms = {"input_layernorm": (hidden, 1.0), "post_attention_layernorm": (hidden, 1.0)}
    if model.qk_norm:
        norms |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (model.head_dim, 1.5))
    salt = model.salt
    weights = {
        "model.embed_tokens.weight": normal(salt + "embed", (VOCAB_SIZE, hidden), 0.02),
        "model.norm.weight": normal(
            salt + "norm", (hidden,), 0.2 * model.norm_mean, model.norm_mean
        ),
    }
    if not fields["tie_word_embeddings"]:
        head = normal(salt + "head", (VOCAB_SIZE, hidden), 3.0 / math.sqrt(hidden))
        weights["lm_head.weight"] = head
    for layer in range(fields["num_hidden_layers"]):
        shapes = attention | _mlp_shapes(model, layer)
        for name, (rows, columns, gain) in shapes.items():
            key = f"model.layers.{layer}.{name}.weight"
            weights[key] = normal(salt + key, (rows, columns), gain / math.sqrt(columns))
        for name, (size, mean) in norms.items():
            key = f"model.layers.{layer}.{name}.weight"
            weights[key] = normal(salt + key, (size,), 0.2 * mean, mean)
    return weights


def _mlp_shapes(model: TinyModel, layer: int) -> dict[str, tuple[int, int, float]]:
    """Of a layer's MLP, or of its router and experts."""
    fields = model.shared
    hidden, gain = fields["hidden_size"], model.residual_gain

    def one(name: str, inner: int) -> dict[str, tuple[int, int, float]]:
        return {
            f"{name}.gate_proj": (inner, hidden, 1.5),
            f"{name}.up_proj": (inner, hidden, 1.5),
            f"{name}.down_proj": (hidden, inner, gain),
        }

    num_experts = model.hub_only.get("num_experts", 0)
    if not num_experts or layer in fields["mlp_only_layers"]:
        return one("mlp", fields["intermediate_size"])
    shapes = {"mlp.gate": (num_experts, hidden, 2.0)}
    for expert in range(num_experts):
        shapes |= one(f"mlp.experts.{expert}", fields["moe_intermediate_size"])
    return shapes


def normal(
    seed: str,
    shape: tuple[int, ...],
    std: float,
    mean: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Numbers that depend on the seed's text alone."""
    generator = np.random.Generator(np.random.PCG64(zlib.crc32(seed.encode())))
    values = (mean + std * generator.standard_normal(shape)).astype(np.float32)
    return torch.from_numpy(values).to(dtype)


_COMMON: Fields = {
    "hidden_act": "silu",
    "vocab_size": VOCAB_SIZE,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
}
LLAMA = TinyModel(
    shared={
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "mlp_bias": False,
    },
    rope_theta=500000.0,
    rope_scaling={
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    hub_only={"pretraining_tp": 1},
    v5_only={"head_dim": 32},
    qk_norm=False,
    puts_bos=True,
    residual_gain=0.01,
    norm_mean=1.0,
    salt="f",
    weights=_llama_weights,
)
_QWEN3_SHARED: Fields = {
    **_COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_window_layers": 4,
    "sliding_window": None,
    "use_sliding_window": False,
}
QWEN3 = TinyModel(
    shared=_QWEN3_SHARED,
    rope_theta=1000000.0,
    rope_scaling=None,
    hub_only={},
    v5_only={"layer_types": ["full_attention"] * 4},
    qk_norm=True,
    puts_bos=False,
    residual_gain=0.12,
    norm_mean=20.0,
    salt="t",
    weights=_llama_weights,
)
#: The larger sizes' kind: a head of its own, in several files.
QWEN3_UNTIED = TinyModel(
    shared={**_QWEN3_SHARED, "tie_word_embeddings": False},
    rope_theta=1000000.0,
    rope_scaling=None,
    hub_only={},
    v5_only={"layer_types": ["full_attention"] * 4},
    qk_norm=True,
    puts_bos=False,
    residual_gain=0.01,
    norm_mean=1.0,
    salt="q",
    weights=_llama_weights,
    num_files=2,
)
#: As Qwen3-Coder: sparse layers but one, an output head of its own, several files.
QWEN3_MOE = TinyModel(
    shared={
        **_QWEN3_SHARED,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    },
    rope_theta=10000000.0,
    rope_scaling=None,
    hub_only={"num_experts": 16},
    v5_only={"num_local_experts": 16},
    qk_norm=True,
    puts_bos=False,
    residual_gain=0.01,
    norm_mean=1.0,
    salt="l",
    weights=_llama_weights,
    num_files=2,
)


def write_hub_layout(model: TinyModel, folder: Path) -> None:
    """What a checkpoint of the transformers 4 years looks like on the hub."""
    config = {
        **model.shared,
        **model.hub_only,
        "rope_theta": model.rope_theta,
        "rope_scaling": model.rope_scaling,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }
    _write(model, folder, config, tokenizer_config)


def write_v5_layout(model: TinyModel, folder: Path) -> None:
    """The same model as transformers 5 saves it."""
    scaling = model.rope_scaling or {"rope_type": "default"}
    config = {
        **model.shared,
        **model.v5_only,
        "rope_parameters": {**scaling, "rope_theta": model.rope_theta},
        "dtype": "bfloat16",
        "pad_token_id": None,
        "transformers_version": "5.2.0",
    }
    _write(model, folder, config, {"tokenizer_class": "TokenizersBackend"})
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _write(model: TinyModel, folder: Path, config: Fields, tokenizer_config: Fields) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(puts_bos=model.puts_bos)
    ids = {token: tokenizer.token_to_id(token) for token in (BOS, EOT, TURN_END, PAD)}
    eos = [ids[EOT], ids[TURN_END]]
    # Qwen names its second EOS in generation_config.json alone.
    own_eos = eos if model.puts_bos else ids[TURN_END]
    generation = {
        "bos_token_id": ids[BOS],
        "eos_token_id": eos,
        "pad_token_id": ids[PAD],
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
    }
    tokenizer_config = {
        **tokenizer_config,
        "bos_token": BOS,
        "eos_token": TURN_END,
        "pad_token": PAD,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
    }
    for name, value in (
        ("config.json", {**config, "bos_token_id": ids[BOS], "eos_token_id": own_eos}),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (folder / name).write_text(json.dumps(value, indent=1))
    tokenizer.save(str(folder / "tokenizer.json"))
    _save_weights(model.weights(model), folder, model.num_files)


def _save_weights(weights: Weights, folder: Path, num_files: int) -> None:
    if num_files == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    names = sorted(weights)
    for index in range(num_files):
        file = f"model-{index + 1:05}-of-{num_files:05}.safetensors"
        part = names[index * len(names) // num_files : (index + 1) * len(names) // num_files]
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in weights.values())
    listing = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listing))


if __name__ == "__main__":
    from tests.oracle import tiny_deepseek

    out = Path(sys.argv[1])
    for name, model in (
        ("llama", LLAMA),
        ("qwen3", QWEN3),
        ("qwen3-untied", QWEN3_UNTIED),
        ("qwen3-moe", QWEN3_MOE),
    ):
        write_hub_layout(model, out / name)
        write_v5_layout(model, out / f"{name}-v5")
    tiny_deepseek.write_float8(tiny_deepseek.DEEPSEEK_FLOAT8, out / "deepseek-float8")
