"""Fixtures shared by all tests: tiny checkpoints and the oracle for them, made once a session."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# An example's 200 ms are the wall's: on a busy machine any test of Hypothesis would fail now and
# then, after minutes of shrinking. What is bounded in time has tests of its own.
settings.register_profile("pdx", deadline=None)
settings.register_profile("long", deadline=None, max_examples=100_000, print_blob=True)
settings.load_profile("pdx")

# A shell's background job ignores Ctrl-C, and so would every process that a test starts to send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Helpers are imported as `tests.<folder>.<module>`, also when pytest is started by its own script.
_ROOT = str(Path(__file__).resolve().parents[1])
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in the hub's (transformers 4) layout."""
    from tests.oracle.tiny_checkpoint import LLAMA, write_hub_layout

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    write_hub_layout(LLAMA, folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama_v5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as transformers 5 saves it."""
    from tests.oracle.tiny_checkpoint import LLAMA, write_v5_layout

    folder = tmp_path_factory.mktemp("models") / "tiny-llama-v5"
    write_v5_layout(LLAMA, folder)
    return folder


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with tied embeddings in the hub's layout; its vocabulary is tiny_llama's."""
    from tests.oracle.tiny_checkpoint import QWEN3, write_hub_layout

    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3"
    write_hub_layout(QWEN3, folder)
    return folder


@pytest.fixture(scope="session")
def tiny_qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE in the hub's layout: a tensor per expert, one layer without experts."""
    from tests.oracle.tiny_checkpoint import QWEN3_MOE, write_hub_layout

    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3-moe"
    write_hub_layout(QWEN3_MOE, folder)
    return folder


@pytest.fixture(scope="session")
def tiny_deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V3 in the hub's layout, with a layer that drafts."""
    from tests.oracle.tiny_checkpoint import write_hub_layout
    from tests.oracle.tiny_deepseek import DEEPSEEK

    folder = tmp_path_factory.mktemp("models") / "tiny-deepseek"
    write_hub_layout(DEEPSEEK, folder)
    return folder


@pytest.fixture(scope="session")
def tiny_prompt_ids() -> list[int]:
    """244 ids of ordinary text for the tiny models, BOS first; take a prefix."""
    from tests.oracle.tiny_text import TEXT, build_tokenizer

    ids: list[int] = build_tokenizer(puts_bos=True).encode(TEXT).ids
    return ids


@pytest.fixture(scope="session")
def tiny_oracle(tiny_llama: Path):  # noqa: ANN201 (its module imports torch)
    """transformers on the tiny Llama, float32."""
    from tests.oracle.transformers_oracle import Oracle

    return Oracle(tiny_llama)


@pytest.fixture(scope="session")
def qwen3_oracle(tiny_qwen3: Path):  # noqa: ANN201 (its module imports torch)
    """transformers on the tiny Qwen3, float32."""
    from tests.oracle.transformers_oracle import Oracle

    return Oracle(tiny_qwen3)


@pytest.fixture(scope="session")
def qwen3_moe_oracle(tiny_qwen3_moe: Path):  # noqa: ANN201 (its module imports torch)
    """transformers on the tiny Qwen3-MoE, float32."""
    from tests.oracle.transformers_oracle import Oracle

    return Oracle(tiny_qwen3_moe)


@pytest.fixture(scope="session")
def deepseek_oracle(tiny_deepseek: Path):  # noqa: ANN201 (its module imports torch)
    """transformers on the tiny DeepSeek-V3, float32."""
    from tests.oracle.transformers_oracle import Oracle

    return Oracle(tiny_deepseek)
