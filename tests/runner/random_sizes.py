"""Models of random small sizes through the kernels, beside what is said of them beforehand.

`python -m tests.runner.random_sizes SEED COUNT FOLDER`, with PDX_KERNELS=interpret and
TRITON_INTERPRET=1. Prints a line of JSON for each model.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from pdx.checkpoint.folder import Checkpoint
from pdx.checkpoint.model import ModelConfig
from pdx.checkpoint.stored_tensors import wanted_tensors
from pdx.cli.main import app
from pdx.config.engine import EngineConfig
from pdx.engine.start_check import plan_node
from pdx.errors import PdxError
from pdx.kernels.ops import REFERENCE_OPS, ops_for
from tests.models.comparison import run
from tests.oracle.tiny_text import build_tokenizer

#: Sizes of tiles, near them, and far from them.
SIZES = [1, 2, 3, 5, 8, 12, 16, 17, 24, 31, 32, 33, 40, 48, 64, 65, 96, 128]
EVEN = [size for size in SIZES if size % 2 == 0]
#: A chunk, then a step: different kernels.
CHUNKS = [[3, 1, 4, 1, 5, 9, 2], [6]]
#: Sums in another order, in float32, of values about 1.
TOLERANCE = 2e-3


def fields_of(rng: random.Random) -> dict[str, Any]:
    """A config.json, its sizes drawn."""
    kv_heads = rng.choice([1, 1, 2, 3])
    fields: dict[str, Any] = {
        "hidden_size": rng.choice(SIZES),
        "intermediate_size": rng.choice(SIZES),
        "num_hidden_layers": 1,
        "num_attention_heads": kv_heads * rng.choice([1, 2, 3, 7, 64, 65]),
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice(EVEN),
        "vocab_size": rng.choice([10, 17, 64, 130]),
        "max_position_embeddings": 64,
        "tie_word_embeddings": rng.random() < 0.3,
        "dtype": "float32",
    }
    match rng.choice(["llama", "qwen3", "qwen3_moe", "deepseek", "deepseek"]):
        case "llama":
            names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
            return fields | names | {"attention_bias": rng.random() < 0.5}
        case "qwen3":
            return fields | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        case "qwen3_moe":
            return fields | _qwen3_experts(rng)
        case _:
            fields["num_attention_heads"] = heads = rng.choice([1, 2, 3, 5])
            return fields | {"num_key_value_heads": heads, "head_dim": None} | _deepseek(rng)


def _qwen3_experts(rng: random.Random) -> dict[str, Any]:
    num_experts = rng.choice([1, 2, 3, 8, 17])
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": num_experts,
        "num_experts_per_tok": rng.randint(1, num_experts),
        "moe_intermediate_size": rng.choice(SIZES),
        "norm_topk_prob": True,
    }


def _deepseek(rng: random.Random) -> dict[str, Any]:
    num_groups, group_size = rng.choice([1, 2, 3]), rng.choice([2, 3, 5])
    num_chosen_groups = rng.randint(1, num_groups)
    tile = [16, 32, 64]

    def near_tile(others: list[int]) -> int:
        """Mostly what is taken: four sizes would be refused for one of them nearly always."""
        return rng.choice(tile if rng.random() < 0.85 else others)

    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "q_lora_rank": rng.choice([None, *SIZES]),
        "kv_lora_rank": near_tile(SIZES),
        "qk_rope_head_dim": near_tile(EVEN),
        "qk_nope_head_dim": near_tile(SIZES),
        "v_head_dim": near_tile(SIZES),
        "n_routed_experts": num_groups * group_size,
        "n_group": num_groups,
        "topk_group": num_chosen_groups,
        "num_experts_per_tok": rng.randint(1, num_chosen_groups * group_size),
        "n_shared_experts": rng.choice([1, 3]),
        "moe_intermediate_size": rng.choice(SIZES),
        "first_k_dense_replace": rng.choice([0, 1]),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def write(folder: Path, fields: dict[str, Any], seed: int) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields))
    build_tokenizer(puts_bos=False).save(str(folder / "tokenizer.json"))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in wanted_tensors(ModelConfig.load(folder), ()).items():
        values = torch.randn(shape, generator=generator)
        weights[name] = values / shape[1] ** 0.5 if len(shape) == 2 else 1.0 + 0.1 * values
    save_file(weights, folder / "model.safetensors")


def refusal(folder: Path) -> str | None:
    """What a start says before it starts ranks."""
    try:
        plan_node(Checkpoint.read(folder).model, EngineConfig())
    except PdxError as error:
        return error.message
    return None


def told(folder: Path) -> dict[str, Any]:
    """What a start, `pdx inspect model` and `--check` say; each the reason, or None."""
    inspected = CliRunner().invoke(app, ["inspect", "model", str(folder), "--json"])
    checked = CliRunner().invoke(app, ["prefill", "--model", str(folder), "--check"])
    reasons = [str(result.exception or "") for result in (inspected, checked)]
    return {
        "start": refusal(folder),
        "inspect": json.loads(inspected.stdout)["refusal"],
        "exit codes": [bool(reasons[0]), bool(reasons[1])],
        "check": reasons[1],
    }


def difference(folder: Path) -> float:
    """Of a chunk's and a step's logits, from those of the plain ops."""
    ours, _ = run(folder, CHUNKS, ops_for("cpu"))
    theirs, _ = run(folder, CHUNKS, REFERENCE_OPS)
    return float((ours - theirs).abs().max())


def main() -> None:
    seed, count, root = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    with torch.inference_mode():
        for index in range(count):
            rng = random.Random(f"{seed} {index}")
            fields, folder = fields_of(rng), root / str(index)
            write(folder, fields, index)
            line = {"fields": fields, **told(folder)}
            if line["start"] is None:
                try:
                    line["difference"] = difference(folder)
                except Exception as error:  # noqa: BLE001 - which the test compares with what was said
                    line["broke"] = repr(error)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
