from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdx.text.stop_strings import StopStrings


def whole(text: str, stops: list[str], *, keep: bool = False) -> str:
    """What must come out, by definition: the first stop string to be complete ends the text."""
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    if not ends:
        return text
    end, start = min(ends)
    return text[: end if keep else start]


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    keep=st.booleans(),
)
def test_cut_does_not_depend_on_the_pieces(pieces: list[str], stops: list[str], keep: bool) -> None:
    matcher = StopStrings(stops, keep=keep)
    out = ""
    for piece in pieces:
        out += matcher.push(piece)
        assert whole("".join(pieces), stops, keep=keep).startswith(out)
        if matcher.matched:
            break
    else:
        out += matcher.flush()
    assert out == whole("".join(pieces), stops, keep=keep)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopStrings(["\n\nQ:"])
    assert [matcher.push(p) for p in ("one\n", "two", "\n\n", "Q", "R")] == [
        "one",
        "\ntwo",
        "",
        "",
        "\n\nQR",
    ]


def test_first_complete_stop_string_wins() -> None:
    matcher = StopStrings(["bcd", "c"])
    assert matcher.push("abcd") == "ab"
    assert matcher.matched == "c"


def test_skipped_text_has_no_stop_strings() -> None:
    matcher = StopStrings(["ab"])
    assert matcher.push("a") == ""
    assert matcher.skip("b") == "ab"
    assert matcher.push("ab") == ""
    assert matcher.matched == "ab"
