"""Other families through two nodes: the tokens are the colocated engine's and transformers'."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdx.checkpoint.model import ModelConfig
from tests.oracle.transformers_oracle import Oracle
from tests.system.nodes import Decoder, decoder, prefiller
from tests.system.prompts import prompt_of

PAGE, CHUNK = 16, 64
LENGTHS = [1, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 170]


@dataclass(frozen=True)
class Served:
    """A family's decoder, and its judge."""

    folder: Path
    oracle: Oracle
    decoder: Decoder


@contextmanager
def served(
    family: str,
    prefill_tp: int,
    decode_tp: int,
    request: pytest.FixtureRequest,
    logs: Path,
    on_prefiller: Sequence[str] = (),
) -> Iterator[Served]:
    """A pair over shm, of so many ranks each."""
    folder: Path = request.getfixturevalue(f"tiny_{family}")
    oracle: Oracle = request.getfixturevalue(f"{family}_oracle")
    common = ["--fabric", "shm", "--kv-memory", "16M"]
    prefill = [*common, "--tp", str(prefill_tp), *on_prefiller]
    decode = [*common, "--tp", str(decode_tp), "--page-size", str(PAGE)]
    with (
        prefiller(folder, logs / "prefill.log", *prefill) as prefill_node,
        decoder(prefill_node.address, logs / "decode.log", *decode) as decode_node,
    ):
        yield Served(folder, oracle, decode_node)


def check_lengths(pair: Served, prompt_ids: list[int]) -> None:
    """Every length gives transformers' tokens."""
    for length in LENGTHS:
        prompt = prompt_of(prompt_ids, length)
        wanted = pair.oracle.greedy(prompt, 24)
        assert wanted.agrees_with(pair.decoder.complete(prompt, 24)), length
    pair.decoder.wait_clean()


@pytest.fixture(
    scope="module", params=[("qwen3", 1, 1), ("qwen3_moe", 2, 1), ("deepseek", 1, 2)], ids=str
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """One pair of each family."""
    family, prefill_tp, decode_tp = request.param
    logs = tmp_path_factory.mktemp(family)
    with served(family, prefill_tp, decode_tp, request, logs) as started:
        yield started


def test_tokens_equal_transformers(pair: Served, tiny_prompt_ids: list[int]) -> None:
    check_lengths(pair, tiny_prompt_ids)


def test_tokens_equal_the_colocated_engine(pair: Served, tiny_prompt_ids: list[int]) -> None:
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
        [sys.executable, "-m", "pdx", "generate", pair.folder, "--json", "--ignore-eos", *flags],
        capture_output=True,
        check=True,
    ).stdout
    colocated = json.loads(printed)["token_ids"]
    wanted = pair.oracle.greedy(prompt, 48)
    assert wanted.agrees_with(colocated)
    assert wanted.agrees_with(pair.decoder.complete(prompt, 48))


def test_a_layer_that_is_left_out_is_told(pair: Served) -> None:
    has_drafts = ModelConfig.load(pair.folder).num_draft_layers > 0
    assert ("nodes do not draft yet" in pair.decoder.stderr()) == has_drafts


def test_chat_is_served(pair: Served) -> None:
    body = {"messages": [{"role": "user", "content": "Ship?"}], "max_tokens": 8, "temperature": 0}
    answer = pair.decoder.client.post(f"{pair.decoder.url}/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("decode_tp", [1, 2])
@pytest.mark.parametrize("prefill_tp", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek"])
def test_tokens_of_every_ratio_equal_transformers(
    family: str,
    prefill_tp: int,
    decode_tp: int,
    request: pytest.FixtureRequest,
    tiny_prompt_ids: list[int],
    tmp_path: Path,
) -> None:
    with served(family, prefill_tp, decode_tp, request, tmp_path) as started:
        check_lengths(started, tiny_prompt_ids)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek"])
def test_tokens_with_larger_pages_on_the_prefiller_equal_transformers(
    family: str, request: pytest.FixtureRequest, tiny_prompt_ids: list[int], tmp_path: Path
) -> None:
    larger = ["--page-size", "64", "--chunk", "24"]
    with served(family, 2, 2, request, tmp_path, larger) as started:
        check_lengths(started, tiny_prompt_ids)
