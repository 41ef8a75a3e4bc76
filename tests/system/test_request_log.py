"""A request is followed through the logs of all nodes that it concerned, by either of its ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.conftest import Pair
from tests.system.nodes import Node, decoder, prefiller, wait_until
from tests.system.prompts import prompt_of


@pytest.fixture(scope="module")
def talking(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two nodes that log as JSON what they do; the prefiller has rejected its first prompt."""
    logs = tmp_path_factory.mktemp("talking")
    options = ["--kv-memory", "16M", "--log-level", "info", "--log-format", "json"]
    fault = {"PDX_FAULT": "reject-prefill@1"}
    with (
        prefiller(tiny_llama, logs / "prefill.log", *options, **fault) as source,
        decoder(source.address, logs / "decode.log", *options) as target,
    ):
        pair = Pair(source, target, "shm")
        ask(pair, "rejected", prompt=[5] * 33, max_tokens=1)
        yield pair


def lines_of(node: Node, x_request_id: str) -> list[dict[str, Any]]:
    """What a node has logged of a request."""
    lines = [line for line in node.stderr().splitlines() if line.startswith("{")]
    return [found for line in lines if x_request_id in line for found in [json.loads(line)]]


def ask(talking: Pair, x_request_id: str, **body: Any) -> dict[str, Any]:
    """The line of a request that has ended."""
    node = talking.decoder
    answer = node.client.post(
        f"{node.url}/completions", json=body, headers={"X-Request-Id": x_request_id}
    )
    assert answer.headers["x-request-id"] == x_request_id

    def ended() -> list[dict[str, Any]]:
        return [each for each in lines_of(node, x_request_id) if "total_s" in each]

    wait_until(lambda: bool(ended()), timeout_s=5, what="its line is there")
    [line] = ended()
    assert line["status"] == answer.status_code
    return line


@pytest.mark.parametrize("stop", [None, " "])
def test_a_request_has_a_line_on_both_nodes(
    talking: Pair, tiny_prompt_ids: list[int], stop: str | None
) -> None:
    name = f"followed-{stop is None}"
    shift = 3 if stop is None else 4
    prompt = prompt_of(tiny_prompt_ids, 100, shift=shift)
    line = ask(talking, name, prompt=prompt, max_tokens=5, stop=stop, ignore_eos=True)
    assert line["role"] == "frontend"
    assert line["path"] == "/v1/completions"
    assert line["request_id"].startswith("cmpl-")
    assert (line["prompt_tokens"], line["cached_tokens"]) == (100, 0)
    assert line["end"] == ("length" if line["output_tokens"] == 5 else "stop")
    assert 0 < line["ttft_s"] <= line["total_s"]
    assert line["prefiller"] == talking.prefiller.address
    source = talking.prefiller
    wait_until(lambda: bool(lines_of(source, name)), timeout_s=5, what="the prefiller's is there")
    [there] = lines_of(source, name)
    assert (there["end"], there["prompt_tokens"]) == ("prefilled", 99)
    assert (there["request_id"], there["x_request_id"]) == (line["request_id"], name)
    assert talking.decoder.timeline(name)["prompt_len"] == 100


def test_a_prompt_that_the_prefiller_rejected_is_found_in_both_logs(talking: Pair) -> None:
    assert any("rejected" in each["message"] for each in lines_of(talking.prefiller, "rejected"))
    told = [each for each in lines_of(talking.decoder, "rejected") if each["role"] == "decode"]
    assert any("no KV cache came from" in each["message"] for each in told)
    [line] = [each for each in lines_of(talking.decoder, "rejected") if "total_s" in each]
    assert line["status"] == 200
    assert "prefiller" not in line, "the decoder prefilled it"


def test_a_refused_body_has_a_line_too(talking: Pair) -> None:
    line = ask(talking, "refused", prompt=[], max_tokens=1)
    assert (line["status"], line["end"]) == (400, "failed")
