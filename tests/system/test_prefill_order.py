"""A short prompt does not wait for the long ones that came before it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.system.nodes import Decoder, decoder, prefiller
from tests.system.prompts import prompt_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LONG, SHORT, NUM_LONG, NUM_SHORT = 4000, 20, 10, 5


@pytest.fixture(scope="module")
def long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a longer context."""
    from tests.oracle.tiny_checkpoint import LLAMA, write_hub_layout

    folder = tmp_path_factory.mktemp("models") / "long-llama"
    shared = LLAMA.shared | {"max_position_embeddings": 8192}
    write_hub_layout(dataclasses.replace(LLAMA, shared=shared), folder)
    return folder


def seconds_to_first_token(node: Decoder, prompt: list[int]) -> float:
    seconds: float = node.timeline(node.post(prompt, 1).json()["id"])["first_token_s"]
    return seconds


def test_a_short_prompt_beside_ten_long_ones_waits_for_a_chunk_at_most(
    long_llama: Path, tiny_prompt_ids: list[int], tmp_path: Path
) -> None:
    options = ["--kv-memory", "128M", "--fabric", "shm", "--chunk", "512"]
    short = prompt_of(tiny_prompt_ids, SHORT)
    with (
        prefiller(long_llama, tmp_path / "prefill", *options) as prefill_node,
        decoder(prefill_node.address, tmp_path / "decode", *options) as node,
    ):
        alone = max(seconds_to_first_token(node, short) for _ in range(NUM_SHORT))
        ids = (tiny_prompt_ids * LONG)[:LONG]
        calls = [node.call([i + 3, *ids[1:]], 1) for i in range(NUM_LONG)]
        prefill_node.wait_status(
            lambda status: status["requests_active"] == NUM_LONG, what="all are there"
        )
        beside = [seconds_to_first_token(node, short) for _ in range(NUM_SHORT)]
        assert prefill_node.status()["requests_active"], "the long ones are over already"
        answers = [call.answer() for call in calls]
        assert {status for status, _ in answers} == {200}
        timelines = [node.timeline(body["id"]) for _, body in answers]
    chunk = max(
        each["end_s"] - each["start_s"]
        for timeline in timelines
        for each in timeline["chunks"]
        if each["end_s"] is not None
    )
    print(f"alone {alone:.3f} s, beside {beside}, a chunk {chunk:.3f} s")
    assert max(beside) <= 2 * alone + chunk
