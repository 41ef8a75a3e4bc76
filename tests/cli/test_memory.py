"""Memory that this host does not have is refused before anything starts, with what would fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdx.cli.main import app
from pdx.errors import ConfigError
from pdx.host.memory import read_memory_facts

TOO_MUCH = "400000G"


def refusal(*words: str) -> ConfigError:
    result = CliRunner().invoke(app, list(words))
    assert isinstance(result.exception, ConfigError), result.exception
    return result.exception


@pytest.mark.parametrize("command", ["generate", "serve", "colocated"])
def test_a_start_says_what_fits(command: str, tiny_llama: Path) -> None:
    words = {
        "generate": ["generate", str(tiny_llama), "--token-ids", "1"],
        "serve": ["serve", str(tiny_llama), "--http", "127.0.0.1:0"],
        "colocated": ["serve", "--colocated", str(tiny_llama), "--http", "127.0.0.1:0"],
    }
    error = refusal(*words[command], "--kv-memory", TOO_MUCH)
    assert error.exit_code == 1
    num_nodes = 2 if command == "serve" else 1
    assert f"{num_nodes * 400_000:,}.0 GiB of KV cache" in error.message
    assert ("2 nodes on this host take" in error.message) is (num_nodes == 2)
    proposed = re.match(r"--kv-memory (\d+)M would fit", str(error.hint))
    assert proposed is not None
    least = min(limit.free_bytes for limit in read_memory_facts().shared)
    assert 0.5 * least < num_nodes * int(proposed[1]) << 20 < least


def test_two_nodes_take_twice_what_one_has(tiny_llama: Path) -> None:
    """Each of the two would fit alone."""
    least = min(limit.free_bytes for limit in read_memory_facts().shared)
    more_than_half = f"{least * 7 // 10 >> 20}M"
    checked = CliRunner().invoke(
        app, ["prefill", "--model", str(tiny_llama), "--kv-memory", more_than_half, "--check"]
    )
    assert checked.exit_code == 0, checked.exception
    words = ["serve", str(tiny_llama), "--http", "127.0.0.1:0", "--kv-memory", more_than_half]
    assert "2 nodes on this host take" in refusal(*words).message


def test_check_says_it_too(tiny_llama: Path) -> None:
    words = ["prefill", "--model", str(tiny_llama), "--check", "--kv-memory", TOO_MUCH]
    error = refusal(*words)
    assert "this node takes 400,000.0 GiB of memory" in error.message
    assert "would fit" in error.message


def test_the_memory_of_another_host_is_not_looked_at(tiny_llama: Path, tmp_path: Path) -> None:
    """A deployment is planned where its weights are not."""
    (tmp_path / "config.json").write_bytes((tiny_llama / "config.json").read_bytes())
    words = ["prefill", "--model", str(tmp_path), "--check", "--kv-memory", TOO_MUCH]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.exception
    assert "not here, so not looked at" in result.stdout
