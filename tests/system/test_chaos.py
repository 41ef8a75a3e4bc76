"""A short run of the chaos: see tests/system/chaos.py."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.oracle.transformers_oracle import Oracle
from tests.system.chaos import Chaos


@pytest.mark.timeout(240)
def test_killed_processes_cost_no_page_and_no_answer_of_another_node(
    tiny_llama: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int], tmp_path: Path
) -> None:
    chaos = Chaos(
        tiny_llama,
        tiny_oracle,
        tiny_prompt_ids,
        tmp_path,
        fabric="auto",
        num_prefillers=1,
        seed=7,
    )
    with contextlib.closing(chaos):
        chaos.run(["prefiller", "decoder's rank"], num_clients=3, pause_s=0.5)
    assert not chaos.violations
    assert chaos.counts["answered"] > 10
