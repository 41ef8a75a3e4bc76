"""Tiny DeepSeek checkpoints: latent attention with and without a query latent, grouped experts, a
draft layer, weights in float8 blocks that fill no tensor.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.oracle.tiny_checkpoint import (
    Fields,
    TinyModel,
    Weights,
    normal,
    write_hub_layout,
)
from tests.oracle.tiny_text import VOCAB_SIZE

__all__ = [
    "BLOCK",
    "DEEPSEEK",
    "DEEPSEEK_FLOAT8",
    "DEEPSEEK_PLAIN",
    "write_float8",
    "write_without_float8",
]

BLOCK = 128
_FLOAT8_MAX = 448.0
_YARN: Fields = {
    "factor": 8,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_SHARED: Fields = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 160,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "num_nextn_predict_layers": 1,
    "initializer_range": 0.02,
    "use_cache": True,
}


def _weights(model: TinyModel) -> Weights:
    """All tensors by their checkpoint names: bfloat16, but for the routers' biases."""
    fields, salt = model.shared, model.salt
    hidden, num_layers = fields["hidden_size"], fields["num_hidden_layers"]
    num_drafts = fields["num_nextn_predict_layers"]
    weights = {
        "model.embed_tokens.weight": normal(salt + "embed", (VOCAB_SIZE, hidden), 0.02),
        "model.norm.weight": normal(salt + "norm", (hidden,), 0.2, 1.0),
        "lm_head.weight": normal(salt + "head", (VOCAB_SIZE, hidden), 3.0 / math.sqrt(hidden)),
    }
    for layer in range(num_layers):
        # With a draft layer, one layer is much louder than the others: a copy of it drafts well.
        quiet = num_drafts and layer != 1
        weights |= _layer(model, layer, 0.0005 if quiet else 0.008)
    for layer in range(num_layers, num_layers + num_drafts):
        weights |= _draft_layer(weights, model, layer)
    return weights


def _layer(model: TinyModel, layer: int, gain: float) -> Weights:
    fields, salt, prefix = model.shared, model.salt, f"model.layers.{layer}."
    weights: Weights = {}
    for name, (rows, columns, own_gain) in _matrices(fields, layer, gain).items():
        key = f"{prefix}{name}.weight"
        weights[key] = normal(salt + key, (rows, columns), own_gain / math.sqrt(columns))
    # The rotated part of the keys, which no norm makes larger.
    weights[f"{prefix}self_attn.kv_a_proj_with_mqa.weight"][fields["kv_lora_rank"] :] *= 40
    norms = {
        "input_layernorm": fields["hidden_size"],
        "post_attention_layernorm": fields["hidden_size"],
        "self_attn.kv_a_layernorm": fields["kv_lora_rank"],
    }
    if fields["q_lora_rank"]:
        norms["self_attn.q_a_layernorm"] = fields["q_lora_rank"]
    for name, size in norms.items():
        key = f"{prefix}{name}.weight"
        weights[key] = normal(salt + key, (size,), 0.2, 1.0)
    if layer >= fields["first_k_dense_replace"]:
        key = f"{prefix}mlp.gate.e_score_correction_bias"
        bias = normal(salt + key, (fields["n_routed_experts"],), 0.3, -0.5, torch.float32)
        weights[key] = bias
    return weights


def _matrices(fields: Fields, layer: int, gain: float) -> dict[str, tuple[int, int, float]]:
    """Rows, columns and gain of a layer's. The projections to the latents are small, so that the
    epsilon of their norms shows.
    """
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    nope, rope, value = (
        fields[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    q_rank, kv_rank = fields["q_lora_rank"], fields["kv_lora_rank"]
    matrices = {
        "self_attn.kv_a_proj_with_mqa": (kv_rank + rope, hidden, 0.05),
        "self_attn.kv_b_proj": (heads * (nope + value), kv_rank, 1.5),
        "self_attn.o_proj": (hidden, heads * value, gain),
    }
    if q_rank:
        matrices["self_attn.q_a_proj"] = (q_rank, hidden, 0.05)
        matrices["self_attn.q_b_proj"] = (heads * (nope + rope), q_rank, 2.0)
    else:
        matrices["self_attn.q_proj"] = (heads * (nope + rope), hidden, 2.0)
    mlps = {"mlp": fields["intermediate_size"]}
    if layer >= fields["first_k_dense_replace"]:
        inner, num_experts = fields["moe_intermediate_size"], fields["n_routed_experts"]
        matrices["mlp.gate"] = (num_experts, hidden, 1.5)
        mlps = {f"mlp.experts.{expert}": inner for expert in range(num_experts)}
        mlps["mlp.shared_experts"] = inner * fields["n_shared_experts"]
    for name, inner in mlps.items():
        matrices[f"{name}.gate_proj"] = (inner, hidden, 1.5)
        matrices[f"{name}.up_proj"] = (inner, hidden, 1.5)
        matrices[f"{name}.down_proj"] = (hidden, inner, gain)
    return matrices


def _draft_layer(weights: Weights, model: TinyModel, layer: int) -> Weights:
    """Close to layer 1 fed with the next token's embedding, so that its drafts are often right."""
    hidden, salt, prefix = model.shared["hidden_size"], model.salt, f"model.layers.{layer}."
    drafts: Weights = {}
    for key, source in weights.items():
        if key.startswith("model.layers.1."):
            name = key.replace("model.layers.1.", prefix)
            blur = 0.02 * float(source.float().std()) if source.ndim == 2 else 0.0
            noise = normal(salt + name + "blur", tuple(source.shape), blur, 0.0, torch.float32)
            drafts[name] = (source.float() + noise).to(source.dtype)
    eye = torch.eye(hidden)
    return drafts | {
        f"{prefix}enorm.weight": normal(salt + prefix + "enorm", (hidden,), 0.05, 1.0),
        f"{prefix}hnorm.weight": normal(salt + prefix + "hnorm", (hidden,), 0.2, 1.0),
        f"{prefix}eh_proj.weight": torch.cat([0.02 * eye, 0.001 * eye], 1).to(torch.bfloat16),
        f"{prefix}shared_head.norm.weight": weights["model.norm.weight"].clone(),
        f"{prefix}shared_head.head.weight": weights["lm_head.weight"].clone(),
        f"{prefix}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
    }


#: As V3 and R1: a query latent, groups of experts, YaRN that scales the scores, a draft layer.
DEEPSEEK = TinyModel(
    shared=_SHARED,
    rope_theta=10000,
    rope_scaling={**_YARN, "type": "yarn"},
    hub_only={"ep_size": 1, "aux_loss_alpha": 0.001, "seq_aux": True},
    v5_only={"head_dim": 32, "qk_head_dim": 96, "rope_interleave": True},
    puts_bos=True,
    salt="e",
    weights=_weights,
)
#: As Moonlight: queries made at once, one group, plain rope, another epsilon, no draft layer.
DEEPSEEK_PLAIN = replace(
    DEEPSEEK,
    shared={
        **_SHARED,
        "num_hidden_layers": 3,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 2.446,
        "rms_norm_eps": 1e-5,
        "num_nextn_predict_layers": 0,
    },
    rope_theta=50000.0,
    rope_scaling=None,
    salt="g",
)
#: Sizes that blocks of 128 do not divide, as 576 rows are in the real one.
DEEPSEEK_FLOAT8 = replace(
    DEEPSEEK,
    shared={
        **_SHARED,
        "hidden_size": 160,
        "intermediate_size": 224,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 3,
        "q_lora_rank": 144,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
    },
    salt="c",
)


def write_float8(model: TinyModel, folder: Path) -> None:
    """The hub's layout with the layers' matrices as DeepSeek stores them, but for the routers."""
    write_hub_layout(model, folder)
    quantization = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }
    _change_config(folder, quantization_config=quantization)
    stored: Weights = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if weight.ndim == 2 and ".layers." in name and "mlp.gate." not in name:
            stored[name], stored[f"{name}_scale_inv"] = _quantised(weight.float())
        else:
            stored[name] = weight
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def write_without_float8(source: Path, folder: Path) -> None:
    """What a float8 folder means, in float32, written out block by block."""
    stored = load_file(source / "model.safetensors")
    weights: Weights = {}
    for name, weight in stored.items():
        if name.endswith("_scale_inv"):
            continue
        wide = weight.float()
        if (scales := stored.get(f"{name}_scale_inv")) is not None:
            for row in range(scales.shape[0]):
                for column in range(scales.shape[1]):
                    block = wide[row * BLOCK :, column * BLOCK :][:BLOCK, :BLOCK]
                    block *= scales[row, column]
        weights[name] = wide
    folder.mkdir()
    for path in source.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    _change_config(folder, quantization_config=None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 values, and float32 scales of blocks, the last of which may be partial."""
    rows, columns = (range(0, size, BLOCK) for size in weight.shape)
    values, scales = torch.empty_like(weight), torch.empty(len(rows), len(columns))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            block = weight[row : row + BLOCK, column : column + BLOCK]
            scales[i, j] = block.abs().max() / _FLOAT8_MAX
            values[row : row + BLOCK, column : column + BLOCK] = block / scales[i, j]
    return values.to(torch.float8_e4m3fn), scales


def _change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
