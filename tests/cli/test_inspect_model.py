"""pdx inspect model: counted from headers, without torch; a refusal has reason and exit code."""

from __future__ import annotations

import json
import os
import pty
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from pdx.checkpoint.model import ModelConfig
from pdx.cli.main import app
from pdx.errors import CheckpointError, ConfigError
from tests.oracle.tiny_text import build_tokenizer

GIB = 1 << 30
#: Qwen3-8B's config.json, as published.
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def inspect(folder: Path, *options: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["inspect", "model", str(folder), "--json", *options])
    if result.exception is not None:
        raise result.exception
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def text(folder: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["inspect", "model", str(folder), *options])
    return result.stdout


def write_hollow_weights(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of bfloat16 tensors whose data is a hole in the file."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)


def write_tokenizer(folder: Path) -> None:
    """A model is served as text, so its folder has one."""
    build_tokenizer(puts_bos=False).save(str(folder / "tokenizer.json"))


def qwen3_shapes(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    q, kv = fields["num_attention_heads"] * head, fields["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (fields["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (fields["vocab_size"], hidden),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for index in range(fields["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


@pytest.fixture(scope="module")
def qwen3_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real size without its 16 GB."""
    folder = tmp_path_factory.mktemp("qwen3-8b")
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    write_tokenizer(folder)
    write_hollow_weights(folder / "model.safetensors", qwen3_shapes(QWEN3_8B))
    return folder


def test_numbers_of_a_published_model(qwen3_8b: Path) -> None:
    report = inspect(qwen3_8b)
    assert report["served"] is True
    assert report["weights"]["num_parameters"] == 8_190_735_360
    memory = report["memory"]
    assert memory["dtype"] == "bfloat16"
    assert memory["weight_bytes"] == 2 * 8_190_735_360
    assert memory["token_bytes"] == 36 * 8 * 128 * 2 * 2
    assert memory["page_bytes"] == 16 * memory["token_bytes"]
    assert report["config"]["max_position_embeddings"] == 40960
    one_gib = memory["kv_fits"][0]
    assert one_gib["num_tokens"] == 16 * (GIB // memory["page_bytes"])
    device = memory["gpu_fits"][0]
    assert device["memory_bytes"] == 24 * GIB
    assert device["kv_bytes"] == 24 * GIB - memory["weight_bytes"]
    assert device["num_pages"] == device["kv_bytes"] // memory["page_bytes"]
    assert device["num_full_contexts"] == device["num_pages"] // (40960 // 16)


def test_other_type_and_page_size_change_the_sizes(qwen3_8b: Path) -> None:
    memory = inspect(qwen3_8b, "--dtype", "float32", "--page-size", "64")["memory"]
    assert memory["token_bytes"] == 36 * 8 * 128 * 2 * 4
    assert memory["page_bytes"] == 64 * memory["token_bytes"]
    assert memory["gpu_fits"][0]["kv_bytes"] < 0
    assert memory["gpu_fits"][0]["num_tokens"] == 0
    assert "weights do not fit" in text(qwen3_8b, "--dtype", "float32")


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen3", "tiny_qwen3_moe", "tiny_deepseek"])
def test_parameters_are_those_of_the_model_that_is_built(
    family: str, request: pytest.FixtureRequest
) -> None:
    import torch

    from pdx.kernels.ops import REFERENCE_OPS
    from pdx.models.registry import build_model

    folder: Path = request.getfixturevalue(family)
    with torch.device("meta"):
        model = build_model(ModelConfig.load(folder), REFERENCE_OPS)
    counted = inspect(folder)["weights"]["num_parameters"]
    assert counted == sum(parameter.numel() for parameter in model.parameters())


@pytest.fixture(scope="module")
def small_r1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-R1 with 5 of its 61 layers and 16 of its 256 experts, and a layer that drafts."""
    from tests.checkpoint.test_deepseek import R1
    from tests.oracle.hollow_checkpoint import write_hollow_checkpoint

    folder = tmp_path_factory.mktemp("small-r1")
    fewer = {"num_hidden_layers": 5, "n_routed_experts": 16, "torch_dtype": "bfloat16"}
    write_hollow_checkpoint(folder, {**R1, **fewer}, num_files=3)
    write_tokenizer(folder)
    return folder


def test_latents_float8_and_drafting_layers_are_told(small_r1: Path) -> None:
    report = inspect(small_r1)
    assert report["served"] is True
    memory, weights = report["memory"], report["weights"]
    assert memory["token_bytes"] == 5 * 576 * 2
    types = weights["values_by_type"]
    assert set(types) == {"F8_E4M3", "BF16"}
    assert sum(types.values()) == weights["num_parameters"]
    # A sparse layer, and copies of embedding and head.
    assert weights["num_draft_parameters"] > 2 * 129280 * 7168
    assert memory["draft_weight_bytes"] == 2 * weights["num_draft_parameters"]
    assert memory["draft_token_bytes"] == 576 * 2
    by_ranks = {rank["tp_size"]: rank for rank in memory["ranks"]}
    assert set(by_ranks) == {1, 2, 4, 8}
    one, eight = by_ranks[1], by_ranks[8]
    # A byte a value, but for embedding, head, norms, and what makes keys and values of latents (a
    # fiftieth); the latents' projections are on each rank.
    assert 1 < one["weight_bytes"] / weights["num_parameters"] < 1.36
    assert 1 / 8 < eight["weight_bytes"] / one["weight_bytes"] < 0.15
    assert one["token_bytes"] == eight["token_bytes"] == memory["token_bytes"]


def test_text_tells_what_ranks_share_and_what_fits(small_r1: Path) -> None:
    printed = text(small_r1)
    assert re.search(r"experts +[\d,]+ +[\d.]+% +split over the ranks", printed)
    assert re.search(r"projections to latents +[\d,]+ +[\d.]+% +whole on every rank", printed)
    assert re.search(r"\n +8 +[\d.]+ GiB +5,760 +18,432 ", printed)
    assert "latent of 512 and 64 rotated, for all heads" in printed
    assert "drafting layers" in printed
    assert re.search(r"--draft takes besides +[\d.]+ GiB, 1,152 bytes of KV a token", printed)


def test_float8_without_scales_is_refused(small_r1: Path, tmp_path: Path) -> None:
    from tests.oracle.hollow_checkpoint import write_hollow_file

    (tmp_path / "config.json").write_bytes((small_r1 / "config.json").read_bytes())
    write_hollow_file(tmp_path / "model.safetensors", {"a.weight": ("F8_E4M3", (4, 4))})
    with pytest.raises(CheckpointError, match="1 weights are quantized"):
        inspect(tmp_path)


def test_stored_copies_are_not_counted_twice(tiny_qwen3: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    fields = json.loads((tiny_qwen3 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields))
    tied = qwen3_shapes(fields) | {"model.layers.0.self_attn.rotary_emb.inv_freq": (16,)}
    write_hollow_weights(tmp_path / "model.safetensors", tied)
    counted = inspect(tiny_qwen3)["weights"]
    weights = inspect(tmp_path)["weights"]
    assert weights["num_parameters"] == counted["num_parameters"]
    table = fields["vocab_size"] * fields["hidden_size"]
    assert weights["stored_bytes"] == counted["stored_bytes"] + 2 * (table + 16)


def test_text_names_what_a_reader_looks_for(qwen3_8b: Path) -> None:
    shown = text(qwen3_8b)
    for part in (
        "served      yes",
        "8,190,735,360",
        "32 of 128, 8 for K and V",
        "theta 1,000,000",
        "40,960 tokens",
        "147,456 bytes",
        "151645",
        "What fits a KV cache",
    ):
        assert part in shown, part


def test_scaled_rope_is_spelled_out(qwen3_8b: Path, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_8B, "rope_scaling": yarn}))
    write_tokenizer(tmp_path)
    (tmp_path / "model.safetensors").hardlink_to(qwen3_8b / "model.safetensors")
    report = inspect(tmp_path)["config"]
    assert report["rope"]["kind"] == "yarn"
    assert report["max_position_embeddings"] == 131072
    told = " ".join(text(tmp_path).split())  # a long path leaves the text a narrow column
    assert "yarn: factor 4, beta fast 32, beta slow 1, attention factor 1.139" in told


def test_refused_model_is_sized_and_its_reason_given(qwen3_8b: Path, tmp_path: Path) -> None:
    changed = {**QWEN3_8B, "use_sliding_window": True}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    (tmp_path / "model.safetensors").hardlink_to(qwen3_8b / "model.safetensors")
    command = [sys.executable, "-m", "pdx", "inspect", "model", str(tmp_path), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    report = json.loads(result.stdout)
    assert report["served"] is False
    assert "use_sliding_window = true" in report["refusal"]
    assert report["weights"]["num_parameters"] == 8_190_735_360
    assert report["config"] is None
    assert result.stderr.startswith("error: ")
    assert "use_sliding_window = true" in result.stderr


def test_quantized_weights_are_refused(tiny_qwen3: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_qwen3 / "config.json").read_bytes())
    save_file({"model.norm.weight": np.zeros(64, np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"quantized, the first is model\.norm\.weight: I8"):
        inspect(tmp_path)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    with pytest.raises(CheckpointError, match="no model"):
        inspect(tmp_path)


def test_neither_folder_nor_name_is_a_usage_error() -> None:
    with pytest.raises(ConfigError, match="neither"):
        inspect(Path("/no/such/folder"))


def test_no_torch_is_imported(tiny_qwen3: Path) -> None:
    code = (
        "import sys; from pdx.cli.main import app;"
        "app(['inspect', 'model', sys.argv[1]], standalone_mode=False);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, tiny_qwen3], check=True, capture_output=True)


def test_terminal_gets_tables_and_colour_only_where_it_is_wanted(tiny_qwen3: Path) -> None:
    def on_terminal(env: dict[str, str]) -> str:
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "pdx", "inspect", "model", str(tiny_qwen3)]
        process = subprocess.Popen(
            command, stdout=theirs, env=os.environ | {"TERM": "xterm-256color"} | env
        )
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 65536):
                shown += piece
        except OSError:  # how Linux says that the other end of a terminal is closed
            pass
        finally:
            os.close(ours)
        assert process.wait(timeout=20) == 0
        return shown.decode()

    assert "────" in on_terminal({})
    assert "\x1b[3" not in on_terminal({"NO_COLOR": "1"})
