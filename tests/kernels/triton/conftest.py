"""The interpreter suite: kernels run on a CPU in Triton's interpreter, checked and shuffled.

Whether a kernel is interpreted is settled when Triton is imported, so this is a process of its own:
`pytest tests/kernels/triton`. With `-m gpu` the same tests run compiled, on a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "gpu":
        return
    assert "triton" not in sys.modules, "run this folder in a process of its own"
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.kernels.triton import checked

    checked.install()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.markexpr != "gpu":
        return
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan() -> Iterator[None]:
    """Outputs and workspaces are poisoned too: torch.empty fills what it gives with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
