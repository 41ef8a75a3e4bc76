"""Preempted streams go on with the tokens they would have had, with a prefiller or without."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.oracle.transformers_oracle import Oracle
from tests.system.nodes import decoder, prefiller, wait_until
from tests.system.prompts import prompt_of

NUM_STREAMS, NUM_TOKENS = 4, 150
PAGE, LAYERS = 16, 3
#: All of the prompts fit, all of the outputs do not.
TIGHT = ["--pages", "36", "--reserve-output", "4"]
#: Prompts are never prefilled by the decoder itself.
REMOTE = ["--no-local-fallback", "--prefiller-wait", "0.5"]


def test_preempted_streams_go_on_when_their_prefiller_is_gone(
    tiny_llama: Path, tmp_path: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    prompts = [prompt_of(tiny_prompt_ids, 30 + i) for i in range(NUM_STREAMS)]
    wanted = [tiny_oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    with (
        prefiller(tiny_llama, tmp_path / "prefill.log", "--kv-memory", "16M") as source,
        decoder(source.address, tmp_path / "decode.log", *TIGHT, *REMOTE) as node,
        ThreadPoolExecutor(NUM_STREAMS) as threads,
    ):
        answers = [threads.submit(node.complete, prompt, NUM_TOKENS) for prompt in prompts]
        atoms = sum(-(-(len(prompt) - 1) // PAGE) * LAYERS for prompt in prompts)

        def all_have_begun() -> bool:
            counts = node.counts()
            return counts["atoms_counted"] >= atoms and not counts["transfers_open"]

        wait_until(all_have_begun, timeout_s=20, what="all streams have begun")
        source.kill()
        for answer, want in zip(answers, wanted, strict=True):
            assert want.agrees_with(answer.result())
        node.wait_clean()
        refused = node.post(prompts[0], 4)
        assert refused.status_code == 503
        assert "no prefiller is connected" in refused.json()["error"]["message"]
        assert not node.counts()["pages_quarantined"]
