"""weight_files: the index decides, stray files do not count, an incomplete folder is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdx.checkpoint.model_files import weight_files
from pdx.errors import CheckpointError


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()


def write_index(folder: Path, *names: str) -> None:
    weight_map = {f"tensor{i}": name for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def names(folder: Path) -> list[str]:
    return [path.name for path in weight_files(folder)]


def test_single_file_without_index(tmp_path: Path) -> None:
    touch(tmp_path, "model.safetensors", "adapter.safetensors", "golden.safetensors")
    assert names(tmp_path) == ["model.safetensors"]


def test_index_wins_over_stray_files(tmp_path: Path) -> None:
    touch(tmp_path, "b.safetensors", "a.safetensors", "model-old.safetensors")
    write_index(tmp_path, "b.safetensors", "a.safetensors", "b.safetensors")
    assert names(tmp_path) == ["a.safetensors", "b.safetensors"]


def test_file_named_by_index_but_missing_is_named(tmp_path: Path) -> None:
    touch(tmp_path, "a.safetensors")
    write_index(tmp_path, "a.safetensors", "b.safetensors")
    with pytest.raises(CheckpointError, match=r"b\.safetensors"):
        weight_files(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    touch(tmp_path, "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="no model"):
        weight_files(tmp_path)


def test_some_of_several_shards_without_index(tmp_path: Path) -> None:
    touch(tmp_path, "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")
    with pytest.raises(CheckpointError, match="2 of 3"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": {"t": 1}}',
        "[]",
        '{"weight_map": {"t": 1, "u": "model.safetensors"}}',
        '{"weight_map": ["model.safetensors"]}',
    ],
)
def test_damaged_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="index") as refused:
        weight_files(tmp_path)
    assert "Error(" not in refused.value.message  # no exception of Python's


def test_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    write_index(tmp_path, "../../other/model.safetensors")
    with pytest.raises(CheckpointError, match="weight_map"):
        weight_files(tmp_path)
