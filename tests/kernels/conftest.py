"""Kernel tests run on one thread: they share small machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

#: Suites that need a process of their own: `test_suites.py` starts them. Compiled kernels on a GPU
#: do not.
_SUITES = {Path(__file__).parent / "triton": "gpu", Path(__file__).parent / "gate": None}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path not in _SUITES:
        return None
    wanted = [Path(arg.partition("::")[0]).resolve() for arg in config.args]
    is_named = any(path.is_relative_to(collection_path) for path in wanted)
    runs_here = is_named or config.option.markexpr == _SUITES[collection_path]
    return None if runs_here else True


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
