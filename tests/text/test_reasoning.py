from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.text.reasoning import ReasoningSplitter


def split(pieces: list[str], *, is_open: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(is_open=is_open)
    parts = [*map(splitter.push, pieces), splitter.flush()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "answer"),
    [
        ("<think>\nIt is.\n\nYes.\n</think>\n\nParis", False, "It is.\n\nYes.", "Paris"),
        ("It is.</think>Paris </think>", True, "It is.", "Paris </think>"),
        ("\n<think>It is", False, "It is", ""),
        ("\n<think>It is</think>Paris", True, "It is", "Paris"),
        ("<think></think>Paris", True, "", "Paris"),
        ("</think>Paris", True, "", "Paris"),
        ("It <think> is</think>Paris", True, "It <think> is", "Paris"),
        (" <thi", True, "<thi", ""),
        ("<thin air</think>Paris", True, "<thin air", "Paris"),
        ("It is", True, "It is", ""),
        ("<think>\n\n</think>\n\nParis", False, "", "Paris"),
        ("Paris <think>not</think> this", False, "", "Paris <think>not</think> this"),
        ("  <thin air", False, "", "  <thin air"),
        ("\n\n  ", False, "", "\n\n  "),
        ("\n \n<think> \n \n</think> \n \n", False, "", ""),
        (" <thi", False, "", " <thi"),
        ("a < b </thin", True, "a < b </thin", ""),
        ("", False, "", ""),
        ("", True, "", ""),
    ],
)
def test_parts_do_not_depend_on_the_pieces(
    text: str, is_open: bool, reasoning: str, answer: str
) -> None:
    assert split([text], is_open=is_open) == (reasoning, answer)
    assert split(list(text), is_open=is_open) == (reasoning, answer)


@given(
    pieces=st.lists(st.sampled_from(["<think>", "</think>", "</", "<", " ", "\n", "a"])),
    is_open=st.booleans(),
)
def test_no_word_is_lost(pieces: list[str], is_open: bool) -> None:
    reasoning, answer = split(pieces, is_open=is_open)
    assert (reasoning + answer).count("a") == "".join(pieces).count("a")
    assert (reasoning, answer) == split(["".join(pieces)], is_open=is_open)


def test_reasoning_goes_out_as_it_comes() -> None:
    splitter = ReasoningSplitter(is_open=False)
    pushed = [
        splitter.push(p) for p in ("<think>", "\nFirst", " this", "\n", "</think>", "\n", "A")
    ]
    assert pushed == [
        ("", ""),
        ("First", ""),
        (" this", ""),
        ("", ""),
        ("", ""),
        ("", ""),
        ("", "A"),
    ]
