"""Float8 weights: values times their blocks' scales, also of parts that begin within a block."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdx.checkpoint.model import ModelConfig
from pdx.checkpoint.quantization import Float8Blocks
from pdx.errors import CheckpointError
from pdx.weights.float8 import dequantised
from tests.models.comparison import altered, loaded

BLOCKS = Float8Blocks(num_rows=4, num_columns=3)


def whole(stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Value by value."""
    wide = stored.float()
    for row in range(wide.shape[-2]):
        for column in range(wide.shape[-1]):
            wide[..., row, column] *= scales[..., row // 4, column // 3]
    return wide


@pytest.mark.parametrize(
    "source",
    [(), (slice(2, 9),), (slice(None), slice(1, 8)), (slice(3, 5), slice(2, 3))],
    ids=str,
)
def test_any_part_of_a_matrix(source: tuple[slice, ...]) -> None:
    torch.manual_seed(0)
    stored = torch.randn(10, 8).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 3) + 0.5
    expected = whole(stored, scales)[source]
    assert torch.equal(dequantised(stored, scales, source, BLOCKS), expected)


def test_part_of_a_stack() -> None:
    torch.manual_seed(0)
    stored = torch.randn(2, 9, 7).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, 3) + 0.5
    source = (slice(1, 2), slice(3, 8))
    expected = whole(stored, scales)[source]
    assert torch.equal(dequantised(stored, scales, source, BLOCKS), expected)


WEIGHT = "model.layers.1.self_attn.o_proj.weight"


def changed(folder: Path, copy: Path, **tensors: torch.Tensor | None) -> Path:
    altered(folder, copy)
    weights = load_file(folder / "model.safetensors") | tensors
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.oracle.tiny_deepseek import DEEPSEEK_FLOAT8, write_float8

    path = tmp_path_factory.mktemp("models") / "float8"
    write_float8(DEEPSEEK_FLOAT8, path)
    return path


def test_lost_scales_are_named(folder: Path, tmp_path: Path) -> None:
    broken = changed(folder, tmp_path / "copy", **{f"{WEIGHT}_scale_inv": None})
    with pytest.raises(CheckpointError, match=r"missing: .*o_proj\.weight_scale_inv"):
        loaded(broken)


def test_scales_of_another_grid_are_named(folder: Path, tmp_path: Path) -> None:
    broken = changed(folder, tmp_path / "copy", **{f"{WEIGHT}_scale_inv": torch.ones(1, 1)})
    with pytest.raises(CheckpointError, match=r"_scale_inv is \[1, 1\], wanted \[2, 1\]"):
        loaded(broken)


def test_a_weight_may_be_left_as_it_was(folder: Path, tmp_path: Path) -> None:
    plain = torch.randn(160, 128).to(torch.bfloat16)
    mixed = changed(folder, tmp_path / "copy", **{WEIGHT: plain, f"{WEIGHT}_scale_inv": None})
    parameters = dict(loaded(mixed).named_parameters())
    assert torch.equal(parameters[WEIGHT], plain.float())


def test_float8_without_blocks_in_the_config_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = altered(folder, tmp_path / "copy", quantization_config=None)
    assert ModelConfig.load(copy).quantization is None
    with pytest.raises(CheckpointError, match=r"wrong type: .* is F8_E4M3"):
        loaded(copy)
