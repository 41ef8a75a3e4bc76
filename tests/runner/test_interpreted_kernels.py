"""A rank that runs Triton's kernels in the interpreter gives the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdx.request.request import SamplingParams
from tests.oracle.transformers_oracle import Oracle
from tests.runner.rank_process import RankProcess, rank_config


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDX_KERNELS", "interpret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def check_greedy_text(folder: Path, oracle: Oracle, prompt: list[int], num_tokens: int) -> None:
    """A prompt in chunks of 64, then a token a pass."""
    with RankProcess(rank_config(folder), timeout_s=300) as rank:
        rank.wait_ready()
        assert "triton" in Path(f"/proc/{rank.process.pid}/maps").read_text()
        tokens = rank.generate(1, prompt, num_tokens, list(range(64))[::-1])
    assert oracle.greedy(prompt, num_tokens).agrees_with([token.token_id for token in tokens])


@pytest.mark.timeout(180)
def test_greedy_text_equals_transformers(
    tiny_llama: Path, tiny_oracle: Oracle, tiny_prompt_ids: list[int]
) -> None:
    check_greedy_text(tiny_llama, tiny_oracle, tiny_prompt_ids[:18], 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("model", "oracle"),
    [
        ("tiny_llama", "tiny_oracle"),
        ("tiny_qwen3", "qwen3_oracle"),
        ("tiny_qwen3_moe", "qwen3_moe_oracle"),
        ("tiny_deepseek", "deepseek_oracle"),
    ],
)
def test_longer_greedy_text_equals_transformers(
    model: str, oracle: str, tiny_prompt_ids: list[int], request: pytest.FixtureRequest
) -> None:
    folder, expected = request.getfixturevalue(model), request.getfixturevalue(oracle)
    check_greedy_text(folder, expected, tiny_prompt_ids[:129], 24)


def test_bfloat16_is_as_near_as_its_rounding(tiny_llama: Path, tiny_prompt_ids: list[int]) -> None:
    """Triton's own interpreter computes it on its bits; a rank's computes what a GPU does."""
    found = []
    for dtype in ("float32", "bfloat16"):
        with RankProcess(rank_config(tiny_llama, dtype=dtype)) as rank:
            rank.wait_ready()
            sampling = SamplingParams(max_tokens=9, temperature=0.0, logprobs=5)
            found += rank.generate(1, tiny_prompt_ids[:20], 1, [3, 1], sampling)
    (_, exact), (_, rounded) = (max(token.top, key=lambda top: top[1]) for token in found)
    assert abs(exact - rounded) < 0.1
    assert exact != rounded


def test_unknown_choice_is_refused(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDX_KERNELS", "fast")
    with RankProcess(rank_config(tiny_llama)) as rank:
        failure = rank.expect_failure()
    assert (failure.kind, failure.message) == ("ConfigError", "PDX_KERNELS is 'fast'")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_draw_what_one_does(tiny_llama: Path, tiny_prompt_ids: list[int]) -> None:
    """The leader draws on its device, and the other rank hears of it there."""
    ids = ",".join(map(str, tiny_prompt_ids[:9]))
    flags = ["--token-ids", ids, "-n", "4", "--dtype", "float32", "--kv-memory", "16M", "--json"]
    found = []
    for kernels, tp_size in (("", 1), ("interpret", 2)):
        ended = subprocess.run(
            [sys.executable, "-m", "pdx", "generate", tiny_llama, *flags, "--tp", str(tp_size)],
            env=os.environ | {"PDX_KERNELS": kernels},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        found.append(json.loads(ended.stdout))
    alone, together = found
    assert together["token_ids"] == alone["token_ids"]


@pytest.mark.timeout(180)
def test_drawn_text_is_that_of_a_cpus_own_ops(
    tiny_llama: Path, tiny_prompt_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(
        max_tokens=9, temperature=0.9, top_k=40, top_p=0.95, seed=2**63 + 5, logprobs=2
    )
    found = []
    for kernels in ("", "interpret"):
        monkeypatch.setenv("PDX_KERNELS", kernels)
        with RankProcess(rank_config(tiny_llama), timeout_s=120) as rank:
            rank.wait_ready()
            found.append(rank.generate(1, tiny_prompt_ids[:4], 4, [5, 2], sampling))
    for ours, theirs in zip(*found, strict=True):
        assert ours.token_id == theirs.token_id
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]
