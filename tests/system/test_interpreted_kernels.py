"""Both nodes run the kernels interpreted: from a prompt to its tokens, over the fabric."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracle.transformers_oracle import Oracle
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
