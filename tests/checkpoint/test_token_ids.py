"""ids_without_token: what a tokenizer.json of each kind knows, padding and holes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdx.checkpoint.token_ids import ids_without_token
from pdx.errors import CheckpointError


def write(folder: Path, vocab: Any, added: list[int]) -> Path:
    tokens = [{"id": i, "content": f"<{i}>", "special": True} for i in added]
    file = {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": tokens}
    (folder / "tokenizer.json").write_text(json.dumps(file))
    return folder


@pytest.mark.parametrize("vocab", [{"a": 1, "b": 0, "c": 2}, [["a", -1.0], ["b", -2.0], ["c", 0]]])
def test_padding_and_holes_between_added_tokens_have_none(tmp_path: Path, vocab: Any) -> None:
    folder = write(tmp_path, vocab, added=[3, 5, 9])
    assert ids_without_token(folder, 8) == [4, 6, 7]
    assert ids_without_token(folder, 3) == []


def test_a_folder_without_a_tokenizer_hides_nothing(tmp_path: Path) -> None:
    assert ids_without_token(tmp_path, 8) == []


def test_every_id_of_the_tiny_models_has_a_token(tiny_llama: Path) -> None:
    assert ids_without_token(tiny_llama, 512) == []


@pytest.mark.parametrize("content", [b"", b"{}", b'{"model": {"vocab": {"a": "b"}}}', b"\xff"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        ids_without_token(tmp_path, 8)
