"""What is refused before a rank starts, which would load torch first."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pdx import LLM, SamplingParams
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


def test_a_stored_head_is_split_over_ranks_and_told(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its config ties the head to the embedding: the text is that of the head, on two ranks too."""
    tied = tmp_path / "tied"
    shutil.copytree(tiny_llama, tied)
    fields = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": True}))
    found = []
    for folder, tp_size in ((tiny_llama, 1), (tied, 2)):
        with LLM(folder, dtype="float32", tp_size=tp_size, num_pages=8) as llm:
            sampling = SamplingParams(max_tokens=12, temperature=0.0)
            [output] = llm.generate([[5, 6, 7]], sampling, ignore_eos=True)
        found.append(output.token_ids)
    assert found[0] == found[1]
    assert "the stored head is used" in caplog.text
