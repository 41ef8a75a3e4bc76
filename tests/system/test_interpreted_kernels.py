"""Both nodes run the kernels interpreted: from a prompt to its tokens, over the fabric."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracle.transformers_oracle import Oracle
from tests.runner.rank_process import RankProcess, rank_config
from tests.system.nodes import decoder, prefiller
from tests.system.prompts import prompt_of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "oracle", "length"),
    [
        *(("tiny_llama", "tiny_oracle", length) for length in (1, 17, 130)),
        ("tiny_qwen3_moe", "qwen3_moe_oracle", 70),
        ("tiny_deepseek", "deepseek_oracle", 70),
    ],
)
def test_tokens_are_the_oracles(
    model: str,
    oracle: str,
    tiny_prompt_ids: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    length: int,
    request: pytest.FixtureRequest,
) -> None:
    folder: Path = request.getfixturevalue(model)
    expected: Oracle = request.getfixturevalue(oracle)
    monkeypatch.setenv("PDX_KERNELS", "interpret")
    fabric = ["--fabric", "tcp", "--kv-memory", "16M"]
    prompt = prompt_of(tiny_prompt_ids, length)
    with (
        prefiller(folder, tmp_path / "prefill.log", *fabric) as prefill_node,
        decoder(prefill_node.address, tmp_path / "decode.log", *fabric) as decode_node,
    ):
        tokens = decode_node.complete(prompt, 8)
        decode_node.wait_clean()
    assert expected.greedy(prompt, 8).agrees_with(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_deepseek"])
def test_a_float8_cache_arrives_as_it_was_sent(
    model: str,
    tiny_prompt_ids: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """The tokens of two nodes are those of one rank, with the same cache and no transfer."""
    folder: Path = request.getfixturevalue(model)
    monkeypatch.setenv("PDX_KERNELS", "interpret")
    prompt = prompt_of(tiny_prompt_ids, 40)
    with RankProcess(rank_config(folder, kv_dtype="float8")) as rank:
        rank.wait_ready()
        expected = [token.token_id for token in rank.generate(1, prompt, 6, list(range(8)))]
    flags = ["--fabric", "tcp", "--kv-memory", "16M", "--kv-dtype", "float8"]
    with (
        prefiller(folder, tmp_path / "prefill.log", *flags, "--dtype", "float32") as prefill_node,
        decoder(prefill_node.address, tmp_path / "decode.log", *flags) as decode_node,
    ):
        assert decode_node.complete(prompt, 6) == expected
        decode_node.wait_clean()
