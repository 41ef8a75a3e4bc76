from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.errors import CheckpointError, InvalidRequest
from pdx.text.detokenizer import PairDetokenizer
from pdx.text.tokenizer import Tokenizer

TRICKY = [
    "",
    " ",
    "a",
    "  two leading spaces",
    "日本語 🙂 café",
    "👩‍👩‍👧‍👦 e\u0301 \u200f\u202e",
    "tabs\t\tand\n\nlines\r\n",
    "x" * 300,
    "<think>two words 語</think>",
    "half a \ufffd character",
]

# Any ids, some past the vocabulary: an untrained model draws them all.
token_lists = st.lists(st.integers(0, 440), max_size=40)


def pieces(tokenizer: Tokenizer, ids: list[int], size: int) -> list[str]:
    decoder = tokenizer.detokenizer()
    steps = [ids[i : i + size] for i in range(0, len(ids), size)]
    return [*(decoder.push(step) for step in steps), decoder.flush()]


@given(ids=token_lists, size=st.integers(1, 5))
def test_pieces_of_any_tokens_join_to_the_whole(
    tokenizer: Tokenizer, ids: list[int], size: int
) -> None:
    assert "".join(pieces(tokenizer, ids, size)) == tokenizer.decode(ids)


@given(text=st.text(max_size=60))
def test_no_piece_of_a_valid_text_shows_a_broken_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    got = pieces(tokenizer, ids, 1)
    assert "".join(got) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in got)


@pytest.mark.parametrize("text", TRICKY)
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert "".join(pieces(tokenizer, ids, 1)) == text


def test_character_is_held_until_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("𒀀a", add_special_tokens=False)  # in no corpus: one token a byte
    got = pieces(tokenizer, ids, 1)
    assert sum(piece != "" for piece in got) <= 3
    assert "".join(got).strip() == "𒀀a"


def test_unfinished_character_is_replaced_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("𒀀", add_special_tokens=False)[:-1]
    *before, last = pieces(tokenizer, ids, 1)
    assert "".join(before).strip() == ""
    assert "\ufffd" in last
    assert "".join([*before, last]) == tokenizer.decode(ids)


def test_special_tokens_show_in_no_piece(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab cd", add_special_tokens=False)
    mixed = [0, 1, *ids[:1], 2, *ids[1:], 0]
    assert "".join(pieces(tokenizer, mixed, 1)) == tokenizer.decode(ids)


def test_special_tokens_are_shown_where_asked_for(tokenizer: Tokenizer) -> None:
    ids = [1, *tokenizer.encode("ab", add_special_tokens=False), 2]
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer.token_of(1) in shown
    decoder = tokenizer.detokenizer(skip_special_tokens=False)
    got = [decoder.push([i]) for i in ids]
    assert "".join([*got, decoder.flush()]) == shown


@given(text=st.text(max_size=30))
def test_bytes_of_the_tokens_are_the_texts(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if "▁" not in text and tokenizer.decode(ids) == text:
        joined = b"".join(map(tokenizer.bytes_of, ids))
        # The space that some put before a text, also before one that begins with a space.
        assert joined in (text.encode(), b" " + text.encode())


def test_id_without_a_token_has_no_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.bytes_of(100_000) == b""
    assert tokenizer.token_of(100_000) is None
    assert tokenizer.bytes_of(2) == str(tokenizer.token_of(2)).encode()


def test_bytes_that_can_never_be_a_character_are_not_held_back(tmp_path: Path) -> None:
    """An endless run of stray bytes must stream, and must not make each step dearer."""
    import tokenizers
    from tokenizers import decoders, models

    inner = tokenizers.Tokenizer(models.BPE(vocab={"Ģ": 0, "a": 1}, merges=[]))  # Ģ stands for 0x80
    inner.decoder = decoders.ByteLevel()
    decoder = Tokenizer(inner).detokenizer()
    assert [decoder.push([0]) for _ in range(5)] == ["\ufffd"] * 5


def test_special_token_first_does_not_eat_the_space_after_it(tokenizer: Tokenizer) -> None:
    decoder = tokenizer.detokenizer()
    ids = tokenizer.encode("a b", add_special_tokens=False)
    got = [decoder.push([i]) for i in [*ids, 1, 2, *ids]]
    assert "".join([*got, decoder.flush()]) == tokenizer.decode([*ids, *ids])


def test_bos_is_what_the_post_processor_says(tokenizer: Tokenizer) -> None:
    with_special, without = (
        tokenizer.encode("Hi", add_special_tokens=flag) for flag in (True, False)
    )
    adds_bos = isinstance(tokenizer.detokenizer(), PairDetokenizer)
    assert with_special == ([1, *without] if adds_bos else without)


def test_batch_equals_one_by_one(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_batch(TRICKY) == [tokenizer.encode(text) for text in TRICKY]


def test_truncation_and_padding_in_the_file_are_ignored(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    inner = tokenizer._inner
    inner.enable_truncation(3)
    inner.enable_padding(length=9)
    inner.save(str(tmp_path / "tokenizer.json"))
    inner.no_truncation()
    inner.no_padding()
    again = Tokenizer.from_folder(tmp_path)
    for text in ("a", "a longer text than that"):
        assert again.encode(text) == tokenizer.encode(text)


def test_lone_surrogates_are_the_clients_fault(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogates"):
        tokenizer.encode("a\ud800b")


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": "?"}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be loaded"):
        Tokenizer.from_folder(tmp_path)
