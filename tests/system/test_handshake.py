"""Nodes that do not fit together refuse each other at the start, with the reason; exit code 1."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from tests.oracle.tiny_checkpoint import LLAMA, write_hub_layout
from tests.system.conftest import Pair
from tests.system.nodes import Prefiller, run_to_end


def refusal(node: Prefiller, log: Path, *arguments: str) -> str:
    """What a decoder says that the prefiller refuses."""
    command = ["decode", "--peer", node.address, "--kv-memory", "16M", *arguments]
    code, _, said = run_to_end(command, log, timeout_s=30)
    assert code == 1, said
    assert "Traceback" not in said
    return said


def rows(said: str) -> dict[str, list[str]]:
    """The table of differences, by field."""
    table = said.partition("do not match:\n")[2]
    assert table.split()[:2] == ["prefiller", "decoder"]
    split = [line.split() for line in table.splitlines()[1:]]
    return {cells[0]: cells[1:] for cells in split if len(cells) == 3}


def test_other_weights_of_the_same_shape(any_prefiller: Prefiller, tmp_path: Path) -> None:
    write_hub_layout(dataclasses.replace(LLAMA, salt="another seed"), tmp_path / "other")
    said = refusal(any_prefiller, tmp_path / "log", "--model", str(tmp_path / "other"))
    assert set(rows(said)) == {"weights_id"}


def test_another_chat_template(any_prefiller: Prefiller, tiny_llama: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in tiny_llama.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    config = json.loads((other / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages[0]['content'] }}"
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    said = refusal(any_prefiller, tmp_path / "log", "--model", str(other))
    assert set(rows(said)) == {"text_id"}


def test_another_dtype(any_prefiller: Prefiller, tmp_path: Path) -> None:
    said = refusal(any_prefiller, tmp_path / "log", "--dtype", "bfloat16")
    assert rows(said) == {"dtype": ["float32", "bfloat16"]}


def test_no_common_data_path(pair: Pair, tmp_path: Path) -> None:
    other = {"tcp": "shm", "shm": "tcp"}[pair.provider]
    said = refusal(pair.prefiller, tmp_path / "log", "--fabric", other)
    assert f"no common data path: offered ['{other}'], allowed {pair.provider}" in said
