"""What is told of a request afterwards: its timeline, on both fabrics."""

from __future__ import annotations

import re
from itertools import pairwise

from tests.system.conftest import Pair
from tests.system.prompts import prompt_of

CHUNK = 64


def test_timeline_tells_of_every_step_in_order(pair: Pair, tiny_prompt_ids: list[int]) -> None:
    prompt = prompt_of(tiny_prompt_ids, 200, shift=3)
    answer = pair.decoder.post(prompt, 24).json()
    found = pair.decoder.timeline(answer["id"])
    assert (found["prompt_len"], found["output_len"]) == (200, 24)
    names = ["admitted_s", "dispatched_s", "prefill_start_s", "last_layer_s", "arrived_s"]
    moments = [found[name] for name in [*names, "first_token_s", "finished_s"]]
    assert all(before <= after for before, after in pairwise([0.0, *moments]))
    assert found["last_layer_s"] <= found["posted_s"] <= found["finished_s"]


def test_timeline_tells_of_every_chunk_and_of_what_landed(
    pair: Pair, tiny_prompt_ids: list[int]
) -> None:
    prompt = prompt_of(tiny_prompt_ids, 200, shift=5)
    answer = pair.decoder.post(prompt, 24).json()
    found = pair.decoder.timeline(answer["id"])
    chunks, landed = found["chunks"], found["landed"]
    assert [chunk["end_position"] for chunk in chunks] == [CHUNK, 2 * CHUNK, 3 * CHUNK, 199]
    assert chunks[0]["start_s"] == found["prefill_start_s"]
    for before, after in pairwise(chunks):
        assert before["start_s"] < before["end_s"] <= after["start_s"]
    assert chunks[-1]["start_s"] < found["last_layer_s"]
    assert 2 <= len(landed) <= 32
    for before, after in pairwise(landed):
        assert before["at_s"] <= after["at_s"]
        assert before["share"] <= after["share"]
    assert landed[0]["at_s"] > found["prefill_start_s"]
    assert landed[-1]["at_s"] <= found["arrived_s"]
    assert landed[-1]["share"] == 1


def test_request_that_a_stop_string_ended_has_a_timeline_and_counts(
    pair: Pair, tiny_prompt_ids: list[int]
) -> None:
    prompt = prompt_of(tiny_prompt_ids, 100, shift=7)
    text = pair.decoder.post(prompt, 48).json()["choices"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    bytes_before = _received(pair)
    answer = pair.decoder.post(prompt, 48, stop=stop).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    found = pair.decoder.timeline(answer["id"])
    assert found["output_len"] >= answer["usage"]["completion_tokens"]
    assert found["output_len"] < 48
    assert found["transfer_bytes"] > 0
    assert found["finished_s"] >= found["first_token_s"]
    assert _received(pair) - bytes_before == found["transfer_bytes"]
    pair.decoder.wait_clean()


def _received(pair: Pair) -> float:
    page = pair.decoder.client.get(f"{pair.decoder.url.removesuffix('/v1')}/metrics").text
    [value] = re.findall(r"^pdx_transfer_bytes_total (\S+)$", page, re.MULTILINE)
    return float(value)
