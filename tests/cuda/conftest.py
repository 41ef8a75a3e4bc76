"""The driver of these tests: a double of ours, or with `-m gpu` the machine's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.markexpr != "gpu":
        return
    import torch

    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(scope="session")
def double(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the driver is the double."""
    if pytestconfig.option.markexpr == "gpu":
        pytest.skip("a driver does not fail on demand")
    folder = tmp_path_factory.mktemp("cuda")
    subprocess.run(
        [
            *("cc", "-std=gnu17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"),
            *("-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1", _HERE / "libcuda.c"),
        ],
        check=True,
    )
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


@pytest.fixture(scope="session")
def cuda(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> dict[str, str]:
    """An environment with a driver: the machine's with `-m gpu`, else the double."""
    if pytestconfig.option.markexpr == "gpu":
        return dict(os.environ)
    environment: dict[str, str] = request.getfixturevalue("double")
    return environment
