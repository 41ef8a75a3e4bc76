"""Qwen3's greedy text through the real rank process, in chunks over its pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models.comparison import altered
from tests.oracle.transformers_oracle import Oracle
from tests.runner.rank_process import RankProcess, rank_config

NUM_PAGES, CHUNK = 64, 64
LENGTHS = [1, 9, 33, CHUNK - 1, CHUNK, CHUNK + 1, 170]


@pytest.fixture(scope="module")
def rank(tiny_qwen3: Path) -> Iterator[RankProcess]:
    with RankProcess(rank_config(tiny_qwen3, num_pages=NUM_PAGES)) as process:
        process.wait_ready()
        yield process


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_text_equals_transformers(
    length: int, rank: RankProcess, qwen3_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    prompt = tiny_prompt_ids[:length]
    tokens = rank.generate(length, prompt, 48, list(range(NUM_PAGES))[::-1])
    assert qwen3_oracle.greedy(prompt, 48).agrees_with([t.token_id for t in tokens])


@pytest.mark.parametrize("model", ["tiny_qwen3_v5", "tiny_qwen3_untied", "yarn", "own head"])
def test_greedy_text_of_other_checkpoints_equals_transformers(
    model: str,
    tiny_qwen3: Path,
    tmp_path: Path,
    tiny_prompt_ids: list[int],
    request: pytest.FixtureRequest,
) -> None:
    if model == "yarn":
        yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
        folder = expected = altered(tiny_qwen3, tmp_path / "yarn", rope_scaling=yarn)
    elif model == "own head":
        # The config ties it, and the checkpoint has another: transformers 5 uses what is stored.
        expected = request.getfixturevalue("tiny_qwen3_untied")
        folder = altered(expected, tmp_path / "tied", tie_word_embeddings=True)
    else:
        folder = expected = request.getfixturevalue(model)
    prompt = tiny_prompt_ids[:130]
    with RankProcess(rank_config(folder)) as process:
        process.wait_ready()
        tokens = process.generate(1, prompt, 48, list(range(16)))
    assert Oracle(expected).greedy(prompt, 48).agrees_with([t.token_id for t in tokens])
