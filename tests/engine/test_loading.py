"""What is refused before a rank starts, which would load torch first."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdx.config.engine import EngineConfig
from pdx.engine import loading
from pdx.engine.loading import load_model
from pdx.errors import ConfigError


async def test_memory_that_holds_no_page_is_refused_before_a_rank_starts(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_ranks(tp_size: int) -> None:
        raise AssertionError("a rank starts")

    monkeypatch.setattr(loading, "RankGroup", start_ranks)
    config = EngineConfig(page_size=100_000, kv_memory_bytes=1 << 20)
    with pytest.raises(ConfigError, match=r"1,048,576 bytes .* hold no page of 100,000 tokens"):
        await load_model(tiny_llama, config, lambda message: None)
    enough = EngineConfig(page_size=16, kv_memory_bytes=1 << 20)
    with pytest.raises(AssertionError, match="a rank starts"):
        await load_model(tiny_llama, enough, lambda message: None)
