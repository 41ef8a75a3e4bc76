"""Other families through two nodes: the tokens are the colocated engine's and transformers'."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.oracle.transformers_oracle import Oracle
from tests.system.nodes import Decoder, decoder, prefiller
from tests.system.prompts import prompt_of

PAGE, CHUNK = 16, 64
LENGTHS = [1, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 170]


@pytest.fixture(scope="module")
def qwen3_decoder(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    """The decoder of a Qwen3 pair over shm."""
    logs = tmp_path_factory.mktemp("qwen3")
    options = ["--fabric", "shm", "--kv-memory", "16M"]
    with (
        prefiller(tiny_qwen3, logs / "prefill.log", *options) as prefill_node,
        decoder(prefill_node.address, logs / "decode.log", *options) as decode_node,
    ):
        yield decode_node


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_of_qwen3_equal_transformers(
    qwen3_decoder: Decoder, qwen3_oracle: Oracle, tiny_prompt_ids: list[int], length: int
) -> None:
    prompt = prompt_of(tiny_prompt_ids, length)
    wanted = qwen3_oracle.greedy(prompt, 24)
    assert wanted.agrees_with(qwen3_decoder.complete(prompt, 24))
    qwen3_decoder.wait_clean()


def test_tokens_of_qwen3_equal_the_colocated_engine(
    qwen3_decoder: Decoder, tiny_qwen3: Path, tiny_prompt_ids: list[int]
) -> None:
    prompt = prompt_of(tiny_prompt_ids, 100)
    options = {
        "--token-ids": ",".join(map(str, prompt)),
        "--max-tokens": "48",
        "--dtype": "float32",
        "--chunk": str(CHUNK),
        "--page-size": str(PAGE),
        "--kv-memory": "16M",
        "--threads": "1",
    }
    flags = [word for option in options.items() for word in option]
    printed = subprocess.run(
        [sys.executable, "-m", "pdx", "generate", tiny_qwen3, "--json", "--ignore-eos", *flags],
        capture_output=True,
        check=True,
    ).stdout
    assert qwen3_decoder.complete(prompt, 48) == json.loads(printed)["token_ids"]


def test_chat_of_qwen3_is_served(qwen3_decoder: Decoder) -> None:
    body = {"messages": [{"role": "user", "content": "Ship?"}], "max_tokens": 8, "temperature": 0}
    answer = qwen3_decoder.client.post(f"{qwen3_decoder.url}/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"]
