"""Writes a tiny seeded Llama checkpoint whose text varies, in both layouts of Hugging Face folders.

Weights come from numpy's PCG64, seeded by each tensor's name: no order of modules, version of torch
or of its generator changes them. Sizes are chosen so that a mistake shows: embeddings small beside
what layers add, projections large, so that greedy text has many distinct tokens and clear winners.

    python tests/oracle/tiny_llama.py OUT      writes OUT/hub and OUT/v5
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 512
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 128, 256, 3, 4, 2
BOS, EOT, TURN_START, TURN_END, PAD = (
    "<|bos|>",
    "<|eot|>",
    "<|turn|>",
    "<|end|>",
    "<|pad|>",
)
#: Picked among a few so that no greedy choice after the test prompts is a near tie.
SALT = "f"
SPECIALS = [BOS, EOT, TURN_START, TURN_END, PAD]
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TEXT = """A lighthouse keeper wrote down every ship that passed, the hour, the wind and the colour
of the water. In winter there were days without a single line, and he wrote that down as well. When
the new keeper came she read all forty books and asked only one question: why had nobody ever noted
the ships that turned back? Since then there is a second column. Numbers make poor company, she
says, but 3 ships and 17 gulls are better than none. The lamp burns from dusk to dawn; it needs oil,
a clean glass and somebody who is awake. def light(hours: int) -> list[str]: return ["on"] * hours
# nothing else. {"name": "keeper", "awake": true, "oil": [12, 11, 9]} And the fog: it comes in from
the north-west, slowly, then all at once, and the bell is rung twice a minute until it lifts
again."""
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|turn|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)


def write_hub_layout(folder: Path) -> None:
    """What a checkpoint of the transformers 4 years looks like on the hub."""
    tokenizer = build_tokenizer()
    config = {
        **_common_config(tokenizer),
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3_SCALING,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0",
        "pretraining_tp": 1,
    }
    tokenizer_config = {
        **_tokenizer_config(),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }
    _write(folder, tokenizer, config, tokenizer_config)


def write_v5_layout(folder: Path) -> None:
    """The same model as transformers 5 saves it."""
    tokenizer = build_tokenizer()
    config = {
        **_common_config(tokenizer),
        "rope_parameters": {**LLAMA3_SCALING, "rope_theta": 500000.0},
        "dtype": "bfloat16",
        "head_dim": HIDDEN // HEADS,
        "pad_token_id": None,
        "transformers_version": "5.2.0",
    }
    tokenizer_config = {**_tokenizer_config(), "tokenizer_class": "TokenizersBackend"}
    _write(folder, tokenizer, config, tokenizer_config)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE with exactly VOCAB_SIZE ids; its post-processor puts BOS first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIALS), show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def build_weights() -> dict[str, torch.Tensor]:
    """All tensors, bfloat16, by their checkpoint names."""
    head_dim = HIDDEN // HEADS
    weights = {
        "model.embed_tokens.weight": _normal("embed", (VOCAB_SIZE, HIDDEN), 0.02),
        "model.norm.weight": _normal("norm", (HIDDEN,), 0.2, mean=1.0),
        "lm_head.weight": _normal("head", (VOCAB_SIZE, HIDDEN), 3.0 / math.sqrt(HIDDEN)),
    }
    shapes = {
        "self_attn.q_proj": (HEADS * head_dim, HIDDEN, 1.5),
        "self_attn.k_proj": (KV_HEADS * head_dim, HIDDEN, 1.5),
        "self_attn.v_proj": (KV_HEADS * head_dim, HIDDEN, 1.5),
        "self_attn.o_proj": (HIDDEN, HEADS * head_dim, 0.01),
        "mlp.gate_proj": (INNER, HIDDEN, 1.5),
        "mlp.up_proj": (INNER, HIDDEN, 1.5),
        "mlp.down_proj": (HIDDEN, INNER, 0.01),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns, gain) in shapes.items():
            key = f"{prefix}.{name}.weight"
            weights[key] = _normal(key, (rows, columns), gain / math.sqrt(columns))
        for name in ("input_layernorm", "post_attention_layernorm"):
            key = f"{prefix}.{name}.weight"
            weights[key] = _normal(key, (HIDDEN,), 0.2, mean=1.0)
    return weights


def _normal(name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> torch.Tensor:
    seed = zlib.crc32(f"{SALT}{name}".encode())
    generator = np.random.Generator(np.random.PCG64(seed))
    values = (mean + std * generator.standard_normal(shape)).astype(np.float32)
    return torch.from_numpy(values).to(torch.bfloat16)


def _common_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_act": "silu",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": [tokenizer.token_to_id(EOT), tokenizer.token_to_id(TURN_END)],
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "bos_token": BOS,
        "eos_token": TURN_END,
        "pad_token": PAD,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
    }


def _write(
    folder: Path, tokenizer: Tokenizer, config: dict[str, Any], tokenizer_config: dict[str, Any]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    generation = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": tokenizer.token_to_id(PAD),
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
    }
    for name, value in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (folder / name).write_text(json.dumps(value, indent=1))
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(build_weights(), folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    out = Path(sys.argv[1])
    write_hub_layout(out / "hub")
    write_v5_layout(out / "v5")
