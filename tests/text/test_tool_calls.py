from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.text.tool_calls import ToolCall, ToolCallFinder

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "ä", "b": [1]}}\n</tool_call>'
FOUND = ToolCall(name="f", arguments='{"a": "ä", "b": [1]}')


def find(pieces: list[str]) -> tuple[str, list[ToolCall]]:
    finder = ToolCallFinder()
    parts = [*map(finder.push, pieces), finder.flush()]
    return "".join(part[0] for part in parts), [call for part in parts for call in part[1]]


@pytest.mark.parametrize(
    ("text", "words", "calls"),
    [
        (CALL, "", [FOUND]),
        (f"Let me see.\n{CALL}", "Let me see.", [FOUND]),
        (f"{CALL}\n{CALL}\n", "", [FOUND, FOUND]),
        (f"{CALL}\nand {CALL} so", "\nand so", [FOUND, FOUND]),
        (CALL.removesuffix("</tool_call>"), "", [FOUND]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [ToolCall(name="f", arguments="{}")]),
        (
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
            "",
            [ToolCall(name="f", arguments='{"a": 1}')],
        ),
    ],
)
def test_calls_are_found_in_any_pieces(text: str, words: str, calls: list[ToolCall]) -> None:
    assert find([text]) == (words, calls)
    assert find(list(text)) == (words, calls)


@pytest.mark.parametrize(
    "text",
    [
        "no call, but 1 < 2 \n",
        "<tool_call>{not json}</tool_call> tail",
        'x \n<tool_call>{"arguments": {}}</tool_call>\n',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        "<tool_call>[1]</tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        '<tool_call>{"name": "f", "argum',
        "<tool_",
        "",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert find([text]) == (text, [])
    if len(text) < 1000:
        assert find(list(text)) == (text, [])


@given(
    st.lists(st.sampled_from([CALL, "<tool_call>", "</tool_call>", "<tool", " ", "\n", "x", "{"]))
)
def test_result_does_not_depend_on_the_pieces(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert find(pieces) == find([text]) == find(list(text))


def test_words_before_a_call_go_out_at_once() -> None:
    finder = ToolCallFinder()
    assert finder.push("Wait. <tool") == ("Wait.", [])
    assert finder.push('_call>{"name": "f"}') == ("", [])
    words, [call] = finder.push("</tool_call>")
    assert (words, call.name, json.loads(call.arguments)) == ("", "f", {})
