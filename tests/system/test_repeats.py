"""A prompt that comes again moves no byte that the decoder has, whatever its length."""

from __future__ import annotations

import secrets

import pytest

from tests.system.conftest import Generate, Pair
from tests.system.prompts import prompt_of

PAGE = 16


@pytest.mark.parametrize("length", [1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1])
def test_a_repeated_prompt_is_not_transferred_again(
    pair: Pair, colocated: Generate, tiny_prompt_ids: list[int], length: int
) -> None:
    node, salt = pair.decoder, secrets.token_hex(4)
    prompt = prompt_of(tiny_prompt_ids, length)
    moved = []
    for _ in range(3):
        body = node.post(prompt, 2, cache_salt=salt).json()
        assert body["choices"][0]["token_ids"] == colocated(prompt, 2)
        moved.append(node.timeline(body["id"])["transfer_bytes"])
    assert bool(moved[0]) == (length > 1)
    assert moved[1:] == [0, 0]
    node.wait_clean()
