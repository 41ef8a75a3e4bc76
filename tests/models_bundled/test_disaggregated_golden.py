"""The bundled model on two real nodes gives transformers' fp32 answers, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.models_bundled.bundled import CASES, ROOT, load

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(params=["tcp", "shm"], scope="module")
def api_url(request: pytest.FixtureRequest, smollm2: Path) -> Iterator[str]:
    driver = load(ROOT / "scripts" / "demo.py")
    # One thread: on few cores shared with other tests, OpenMP's barriers crawl.
    common = ["--dtype", "float32", "--fabric", request.param, "--poison", "--threads", "1"]
    with driver.running("prefill", ["--model", str(smollm2), *common]) as prefiller:
        peer = prefiller.wait_for(r"--peer[ =](\S+)")
        with driver.running("decode", ["--peer", peer, *common]) as decoder:
            yield decoder.wait_for(r"(http://\S+/v1)")


def check(api_url: str, case: dict[str, Any], max_tokens: int) -> None:
    body = {
        "prompt": case["prompt_ids"],
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_token_ids": True,
    }
    response = httpx.post(f"{api_url}/completions", json=body, timeout=100)
    assert response.status_code == httpx.codes.OK, response.text
    choice = response.json()["choices"][0]
    assert choice["token_ids"] == case["greedy_ids"][:max_tokens]


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=["question", "text"])
def test_two_nodes_give_the_golden_tokens(api_url: str, case: dict[str, Any]) -> None:
    check(api_url, case, max_tokens=12)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_nodes_give_every_golden_token(api_url: str, case: dict[str, Any]) -> None:
    check(api_url, case, max_tokens=len(case["greedy_ids"]))
