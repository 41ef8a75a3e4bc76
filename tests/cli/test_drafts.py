"""`pdx generate --draft`: the text without it, in fewer passes; or why there are no drafts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from pdx.checkpoint.weight_headers import opened_weights
from tests.models.comparison import altered
from tests.oracle.transformers_oracle import Oracle

NUM_TOKENS = 40


def pdx(folder: Path, prompt: list[int], *flags: str) -> subprocess.CompletedProcess[str]:
    options = ["--dtype", "float32", "--kv-memory", "8M", "--threads", "1", "--poison", "--json"]
    ids = ",".join(map(str, prompt))
    command = [sys.executable, "-m", "pdx", "generate", str(folder), "--token-ids", ids, *options]
    return subprocess.run([*command, *flags], capture_output=True, text=True, check=False)


def generated(folder: Path, prompt: list[int], *flags: str) -> dict[str, Any]:
    run = pdx(folder, prompt, "--ignore-eos", "-n", str(NUM_TOKENS), *flags)
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout)
    return result


@pytest.mark.parametrize("flags", [["--chunk", "24"], ["--tp", "2"]], ids=" ".join)
def test_text_is_that_of_transformers(
    flags: list[str], tiny_deepseek: Path, deepseek_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    prompt = tiny_prompt_ids[:60]
    result = generated(tiny_deepseek, prompt, "--draft", *flags)
    assert deepseek_oracle.greedy(prompt, NUM_TOKENS).agrees_with(result["token_ids"])
    fed, right = result["num_drafts"], result["num_right_drafts"]
    assert fed + right in (NUM_TOKENS, NUM_TOKENS - 1) and right >= 5


def test_drawn_text_is_the_one_without(tiny_deepseek: Path, tiny_prompt_ids: list[int]) -> None:
    flags = ["--temperature", "0.5", "--seed", "5"]
    prompt = tiny_prompt_ids[:50]
    plain = generated(tiny_deepseek, prompt, *flags)
    assert "num_drafts" not in plain
    with_drafts = generated(tiny_deepseek, prompt, *flags, "--draft")
    assert with_drafts["token_ids"] == plain["token_ids"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_interpreted_kernels_give_the_text_of_transformers(
    tiny_deepseek: Path,
    deepseek_oracle: Oracle,
    tiny_prompt_ids: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PDX_KERNELS", "interpret")
    prompt = tiny_prompt_ids[:60]
    result = generated(tiny_deepseek, prompt, "--draft", "-n", "16", "--chunk", "40")
    assert deepseek_oracle.greedy(prompt, 16).agrees_with(result["token_ids"])
    assert result["num_right_drafts"] >= 1


def test_a_model_without_such_a_layer_is_refused(
    tiny_llama: Path, tiny_deepseek: Path, tmp_path: Path
) -> None:
    two = altered(tiny_deepseek, tmp_path / "two", num_nextn_predict_layers=2)
    for folder, number in ((tiny_llama, 0), (two, 2)):
        run = pdx(folder, [1, 2], "--draft")
        assert run.returncode == 2
        assert f"{folder.name} has {number} layers that draft" in run.stderr
        assert "leave out --draft" in run.stderr


def test_a_promised_layer_that_is_not_there_is_named(tiny_deepseek: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lost"
    shutil.copytree(tiny_deepseek, folder)
    (weights,) = folder.glob("*.safetensors")
    with opened_weights(weights, "pt") as file:
        kept = [name for name in file.keys() if ".layers.4." not in name]  # noqa: SIM118
        tensors = {name: file.get_tensor(name) for name in kept}
    save_file(tensors, weights)
    run = pdx(folder, [1, 2], "--draft")
    assert run.returncode == 1
    assert "no tensors model.layers.4.*" in run.stderr and "leave out --draft" in run.stderr
    assert pdx(folder, [1, 2], "-n", "2").returncode == 0
