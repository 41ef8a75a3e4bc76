"""Loading large checkpoints: a rank takes memory for what it keeps, not for what the files hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pdx.checkpoint.model_files import weight_files
from pdx.checkpoint.weight_headers import read_weight_headers
from tests.oracle.hollow_checkpoint import write_hollow_checkpoint, write_hollow_file
from tests.oracle.tiny_checkpoint import QWEN3_MOE
from tests.oracle.tiny_deepseek import DEEPSEEK

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
#: Both: hidden size, experts, their size, layers.
QWEN: dict[str, Any] = {**QWEN3_MOE.shared, **QWEN3_MOE.hub_only, "mlp_only_layers": []}
FLOAT8: dict[str, Any] = {
    **DEEPSEEK.shared,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def load_in_process(folder: Path, tp_size: int) -> dict[str, Any]:
    """What the loading process told."""
    words = ["-m", "tests.weights.loading_process", str(folder), str(tp_size), "bfloat16"]
    printed = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=True,
    ).stdout
    told: dict[str, Any] = json.loads(printed)
    return told


def check(folder: Path, tp_size: int, num_bytes: int, share: float) -> None:
    """The rank keeps about ``share`` of the stored bytes, and memory grew by not much more."""
    told = load_in_process(folder, tp_size)
    assert 0.8 * share < told["kept"] / num_bytes < 1.2 * share
    assert told["grown"] < 1.2 * told["kept"]


def test_a_rank_takes_memory_for_its_part_alone(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "num_experts": 32, "moe_intermediate_size": 256}
    num_bytes = write_hollow_checkpoint(tmp_path, {**QWEN, **sizes}, num_files=5)
    assert num_bytes > 90 * MIB
    check(tmp_path, 2, num_bytes, share=0.5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_of_large_experts_takes_memory_for_its_part_alone(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "num_experts": 128, "moe_intermediate_size": 768}
    num_bytes = write_hollow_checkpoint(tmp_path, {**QWEN, **sizes}, num_files=50)
    assert num_bytes > 2 << 30
    check(tmp_path, 2, num_bytes, share=0.5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_of_float8_weights_takes_memory_for_its_part_alone(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "n_routed_experts": 208, "moe_intermediate_size": 896}
    num_bytes = write_hollow_checkpoint(tmp_path, {**FLOAT8, **sizes}, num_files=50)
    assert num_bytes > 2 << 30
    # Two bytes for one, half of them on this rank, and the drafting layer, a fourth, left on disk.
    check(tmp_path, 2, num_bytes, share=0.75)


def test_index_of_700_files_is_read_in_seconds_without_strays(tmp_path: Path) -> None:
    weight_map = {}
    for index in range(700):
        file = f"model-{index + 1:05}-of-00700.safetensors"
        names = [f"model.layers.{index}.mlp.experts.{i}.up_proj.weight" for i in range(130)]
        write_hollow_file(tmp_path / file, dict.fromkeys(names, ("BF16", (2048, 7168))))
        weight_map |= dict.fromkeys(names, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "model-stray.safetensors").write_bytes(b"not the model's")
    started = time.process_time()
    tensors = read_weight_headers(tmp_path)
    assert time.process_time() - started < 10  # 0.6 s on an idle core
    assert tensors.keys() == weight_map.keys()
    assert len(weight_files(tmp_path)) == 700
    assert sum(tensor.num_bytes for tensor in tensors.values()) == 91_000 * 2048 * 7168 * 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_deepseek_r1_in_full_size_is_checked_in_seconds(tmp_path: Path) -> None:
    """All 92,000 tensors of 163 files, against what the model of its configuration wants."""
    import torch

    from pdx.checkpoint.model import ModelConfig
    from pdx.errors import CheckpointError
    from pdx.kernels.ops import REFERENCE_OPS
    from pdx.models.registry import build_drafts, build_model
    from pdx.weights.load import load_parameters

    fields = json.loads((ROOT / "models" / "deepseek-r1" / "config.json").read_text())
    num_bytes = write_hollow_checkpoint(tmp_path, fields, num_files=163)
    assert 680e9 < num_bytes < 690e9
    # One tensor more than there should be: all is checked before anything is loaded.
    last = tmp_path / "model-00163-of-00163.safetensors"
    stored = read_weight_headers(tmp_path)
    tensors = {n: (t.dtype, t.shape) for n, t in stored.items() if t.path == last}
    write_hollow_file(last, {**tensors, "model.layers.60.stray": ("BF16", (1,))})
    config = ModelConfig.load(tmp_path)
    started = time.process_time()
    with torch.device("meta"):
        model, drafts = build_model(config, REFERENCE_OPS), build_drafts(config, REFERENCE_OPS)
    with pytest.raises(CheckpointError, match=r"config\.json: unused: model\.layers\.60\.stray$"):
        load_parameters(
            *(model, tmp_path, torch.bfloat16, lambda done, total: None, config.quantization),
            left_on_disk=drafts,
        )
    assert time.process_time() - started < 30  # 2.5 s on an idle core
