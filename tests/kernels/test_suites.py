"""Starts the suites that need a process of their own: kernels interpreted, kernels compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: On an idle core each takes half a minute; the bound is for a machine that is busy.
TIMEOUT_S = 600
pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)


def run_suite(folder: str, *arguments: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "pytest", "-q", f"tests/kernels/{folder}", *arguments]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-8000:]


def test_interpreted_kernels_equal_their_references() -> None:
    run_suite("triton")


@pytest.mark.slow
def test_interpreted_kernels_equal_their_references_in_more_shapes() -> None:
    run_suite("triton", "-m", "slow")


def test_changed_kernels_compile_within_the_limits() -> None:
    run_suite("gate")
