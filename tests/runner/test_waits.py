"""The host waits for the device once a pass, for its tokens, and nowhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(160)
ROOT = Path(__file__).parents[2]


def run_passes(folder: Path) -> list[dict[str, Any]]:
    """A chunk; a step and a chunk; two steps; a step through a layer that waits."""
    kernels = {"PDX_KERNELS": "interpret", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.runner.waits", str(folder)],
        cwd=ROOT,
        env={**os.environ, **kernels},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    passes: list[dict[str, Any]] = json.loads(ended.stdout)
    return passes


@pytest.mark.parametrize(
    "model",
    [
        "tiny_llama",
        *(
            pytest.param(model, marks=pytest.mark.slow)
            for model in ("tiny_qwen3", "tiny_qwen3_moe", "tiny_deepseek")
        ),
    ],
)
def test_a_pass_is_one_copy_in_and_one_out(model: str, request: pytest.FixtureRequest) -> None:
    chunk, mixed, steps, waiting = run_passes(request.getfixturevalue(model))
    assert [each["waits"] for each in (chunk, mixed, steps)] == [[], [], []]
    assert (chunk["uploads"], chunk["downloads"]) == (1, 0)
    for each in (mixed, steps):
        assert (each["uploads"], each["downloads"]) == (1, 1)
        assert len(each["tokens"]) == 2
    assert [wait.split(":")[0] for wait in waiting["waits"]] == [
        "aten.item in __main__",
        "item in __main__",
    ]
