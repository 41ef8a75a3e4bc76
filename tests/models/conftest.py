"""The tiny checkpoints of this folder, each made once a session, and what transformers makes of
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.oracle.tiny_checkpoint import (
    QWEN3,
    QWEN3_MOE,
    QWEN3_UNTIED,
    write_hub_layout,
    write_v5_layout,
)
from tests.oracle.tiny_deepseek import (
    DEEPSEEK,
    DEEPSEEK_FLOAT8,
    DEEPSEEK_PLAIN,
    write_float8,
    write_without_float8,
)
from tests.oracle.transformers_oracle import Oracle


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_qwen3_v5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny_qwen3 as transformers 5 saves it."""
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3-v5"
    write_v5_layout(QWEN3, folder)
    return folder


@pytest.fixture(scope="session")
def tiny_qwen3_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an output head of its own, in two files and an index."""
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3-untied"
    write_hub_layout(QWEN3_UNTIED, folder)
    return folder


@pytest.fixture(scope="session")
def tiny_qwen3_untied_v5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny_qwen3_untied as transformers 5 saves it."""
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3-untied-v5"
    write_v5_layout(QWEN3_UNTIED, folder)
    return folder


@pytest.fixture(scope="session")
def tiny_qwen3_moe_v5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny_qwen3_moe as transformers 5 saves it."""
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3-moe-v5"
    write_v5_layout(QWEN3_MOE, folder)
    return folder


@pytest.fixture(scope="session")
def untied_oracle(tiny_qwen3_untied: Path) -> Oracle:
    """transformers on tiny_qwen3_untied, float32."""
    return Oracle(tiny_qwen3_untied)


@pytest.fixture(scope="session")
def tiny_deepseek_v5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny_deepseek as transformers 5 saves it, but with the layer that drafts, which it loses."""
    folder = tmp_path_factory.mktemp("models") / "tiny-deepseek-v5"
    write_v5_layout(DEEPSEEK, folder)
    return folder


@pytest.fixture(scope="session")
def tiny_deepseek_plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a query latent, groups, YaRN and a layer that drafts."""
    folder = tmp_path_factory.mktemp("models") / "tiny-deepseek-plain"
    write_hub_layout(DEEPSEEK_PLAIN, folder)
    return folder


@pytest.fixture(scope="session")
def tiny_deepseek_float8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its matrices in float8 blocks that do not divide them."""
    folder = tmp_path_factory.mktemp("models") / "tiny-deepseek-float8"
    write_float8(DEEPSEEK_FLOAT8, folder)
    return folder


@pytest.fixture(scope="session")
def deepseek_plain_oracle(tiny_deepseek_plain: Path) -> Oracle:
    """transformers on tiny_deepseek_plain, float32."""
    return Oracle(tiny_deepseek_plain)


@pytest.fixture(scope="session")
def deepseek_float8_oracle(
    tiny_deepseek_float8: Path, tmp_path_factory: pytest.TempPathFactory
) -> Oracle:
    """transformers on what tiny_deepseek_float8 means: its own reading of partial blocks is
    another one than the checkpoints'.
    """
    folder = tmp_path_factory.mktemp("models") / "tiny-deepseek-wide"
    write_without_float8(tiny_deepseek_float8, folder)
    return Oracle(folder)
