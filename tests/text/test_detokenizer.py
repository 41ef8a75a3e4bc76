"""Streaming of any tokens, for each kind of decoder: the pieces join to the whole, nothing is held
that cannot change, and a token's work does not grow with what came before."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from pdx.text.detokenizer import PairDetokenizer
from pdx.text.tokenizer import Tokenizer
from tests.text.conftest import OTHER_KINDS, byte_fallback, byte_level, of_decoder

KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
} | {kind: (lambda kind=kind: of_decoder(kind)) for kind in OTHER_KINDS}
SMOLLM2 = Path(__file__).parents[2] / ".cache/models/SmolLM2-135M-Instruct"
#: Random ids of a large vocabulary are hardly ever these: its bytes and special tokens.
MOST_IDS = st.integers(0, 600)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(KINDS[request.param]())


def stream(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    return [*(detokenizer.push([i]) for i in ids), detokenizer.flush()]


@given(ids=st.lists(MOST_IDS, max_size=30), skip=st.booleans())
def test_pieces_of_any_tokens_join_to_the_whole(
    tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    pieces = stream(tokenizer, ids, skip=skip)
    assert "".join(pieces) == whole
    for end, sent in enumerate(itertools.accumulate(pieces[:-1])):
        so_far = tokenizer.decode(ids[: end + 1], skip_special_tokens=skip)
        assert len(so_far) - len(sent) <= 3


@given(ids=st.lists(MOST_IDS, max_size=30), skip=st.booleans())
def test_text_is_that_of_the_library(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    """But for runs of bytes that are no characters, of which it replaces also those that are."""
    theirs = tokenizer._inner.decode(ids, skip_special_tokens=skip)
    ours = tokenizer.decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in theirs:
        assert ours == theirs
    assert len(ours.encode()) <= len(theirs.encode())


@given(data=st.data(), skip=st.booleans())
def test_pieces_of_a_published_tokenizer_join_to_the_whole(data: st.DataObject, skip: bool) -> None:
    if not (SMOLLM2 / "tokenizer.json").is_file():
        pytest.skip("the demo's model is not there")
    tokenizer = smollm2()
    ids = data.draw(st.lists(MOST_IDS | st.integers(0, 49_200), max_size=30))
    pieces = stream(tokenizer, ids, skip=skip)
    assert "".join(pieces) == tokenizer._inner.decode(ids, skip_special_tokens=skip)


_loaded: list[Tokenizer] = []


def smollm2() -> Tokenizer:
    if not _loaded:
        _loaded.append(Tokenizer.from_folder(SMOLLM2))
    return _loaded[0]


RUNS = {
    "stray bytes": ["<0x80>", "Ģ"],
    "bytes that begin a character": ["<0xF0>", "ð"],
    "replacement characters": ["\ufffd", "�", "ï¿½"],
    "combining characters": ["\u200d", "##\u0301", "âĢ"],
    "special tokens": ["</s>", "<|im_end|>"],
    "tokens without text": ["", "##", "</w>"],
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("skip", [False, True], ids=["shown", "skipped"])
def test_run_of_one_token_is_not_held_back(tokenizer: Tokenizer, run: str, skip: bool) -> None:
    found = [tokenizer._inner.token_to_id(token) for token in RUNS[run]]
    token_id = next((i for i in found if i is not None), None)
    if token_id is None:
        return  # a tokenizer of this kind has no such token
    pieces = stream(tokenizer, [token_id] * 200, skip=skip)
    whole = tokenizer.decode([token_id] * 200, skip_special_tokens=skip)
    assert "".join(pieces) == whole
    assert len("".join(pieces[:100])) * 2 >= len(whole) - 8


class CountingTokenizer:
    """The real tokenizer; counts the tokens that it is asked to decode."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        self.num_decoded = 0

    def id_to_token(self, token_id: int) -> str | None:
        token: str | None = self._inner.id_to_token(token_id)
        return token

    def decode(self, ids: list[int], **options: Any) -> str:
        self.num_decoded += len(ids)
        return self._inner.decode(ids, **options)


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_work_of_a_token_is_bounded(kind: str) -> None:
    inner = of_decoder(kind)
    for token_id in range(inner.get_vocab_size()):
        counting: Any = CountingTokenizer(inner)
        detokenizer = PairDetokenizer(counting, frozenset(), has_bytes="byte" in kind)
        before = 0
        for _ in range(20):
            detokenizer.push([token_id])
            assert counting.num_decoded - before <= 6
            before = counting.num_decoded
