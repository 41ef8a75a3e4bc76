from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.text.tool_calls import CallForm, ToolCall, call_finder, call_form_of

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "ä", "b": [1]}}\n</tool_call>'
FOUND = ToolCall(name="f", arguments='{"a": "ä", "b": [1]}')


def find(pieces: list[str], form: CallForm = CallForm.TAGGED) -> tuple[str, list[ToolCall]]:
    finder = call_finder(form)
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
    finder = call_finder(CallForm.TAGGED)
    assert finder.push("Wait. <tool") == ("Wait.", [])
    assert finder.push('_call>{"name": "f"}') == ("", [])
    words, [call] = finder.push("</tool_call>")
    assert (words, call.name, json.loads(call.arguments)) == ("", "f", {})


#: As Llama 3.1 to 3.3 write calls, and what they teach.
LLAMA = '{"name": "f", "parameters": {"a": "ä", "b": [1]}}'
LLAMA_TEMPLATE = (
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and '
    "its value}."
)
#: As DeepSeek's V3 and R1 write calls, and V3.1.
V3_CALL = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"a": "ä", "b": [1]}\n```<｜tool▁call▁end｜>'
)
V31_CALL = '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "ä", "b": [1]}<｜tool▁call▁end｜>'
START, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


@pytest.mark.parametrize(
    ("text", "words", "calls"),
    [
        (LLAMA, "", [FOUND]),
        (f"\n\n{LLAMA}\n", "", [FOUND]),
        (f"<|python_tag|>{LLAMA}", "", [FOUND]),
        (f"{LLAMA}; {LLAMA}", "", [FOUND, FOUND]),
        (LLAMA.replace("parameters", "arguments"), "", [FOUND]),
        (f"I call {LLAMA}", f"I call {LLAMA}", []),
        (f"{LLAMA} now", f"{LLAMA} now", []),
        ('{"name": "Bonn", "people": 3}', '{"name": "Bonn", "people": 3}', []),
        ('{"name": "f", "parameters": 5}', '{"name": "f", "parameters": 5}', []),
        ("{broken", "{broken", []),
        (" <|pyth", " <|pyth", []),
        ("  ", "  ", []),
        ("", "", []),
    ],
)
def test_calls_of_llama_are_the_whole_answer(text: str, words: str, calls: list[ToolCall]) -> None:
    assert find([text], CallForm.BARE) == (words, calls)
    assert find(list(text), CallForm.BARE) == (words, calls)


def test_llamas_words_go_out_as_they_come() -> None:
    finder = call_finder(CallForm.BARE)
    assert finder.push(" The") == (" The", [])
    assert finder.push(' {"name"') == (' {"name"', [])


@pytest.mark.parametrize(
    ("text", "words", "calls"),
    [
        (START + V3_CALL + END, "", [FOUND]),
        (f"Wait.\n\n{START}{V3_CALL}\n{V3_CALL}{END}", "Wait.", [FOUND, FOUND]),
        (START + V31_CALL + V31_CALL + END, "", [FOUND, FOUND]),
        (START + V31_CALL, "", [FOUND]),
        (START + V31_CALL.removesuffix("<｜tool▁call▁end｜>"), "", [FOUND]),
        *(
            (text, text, [])
            for text in (
                START + END,
                START + "f" + END,
                START + V31_CALL.replace("}", "") + END,
                START + V31_CALL.replace("f<", "<", 1) + END,
                START + "so: " + V31_CALL + END,
                "no call: <｜tool",
            )
        ),
    ],
)
def test_calls_of_deepseek_are_found_in_any_pieces(
    text: str, words: str, calls: list[ToolCall]
) -> None:
    assert find([text], CallForm.DEEPSEEK) == (words, calls)
    assert find(list(text), CallForm.DEEPSEEK) == (words, calls)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("within <tool_call></tool_call> XML tags", CallForm.TAGGED),
        ("<tool_call>\n<function=name>\n<parameter=a>", CallForm.TAGGED_XML),
        (LLAMA_TEMPLATE, CallForm.BARE),
        ("{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name}}", CallForm.DEEPSEEK),
        ("{{ messages }}", None),
    ],
)
def test_the_form_is_the_one_that_the_template_teaches(
    template: str, form: CallForm | None
) -> None:
    assert call_form_of(template) is form


#: As Qwen3-Coder writes a call, and the tool that it was shown.
XML = (
    "<tool_call>\n<function=f>\n<parameter=a>\nä\n</parameter>\n<parameter=b>\n[1]\n</parameter>\n"
    "</function>\n</tool_call>"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "string"}, "b": {"type": "array"}},
            },
        },
    }
]


@pytest.mark.parametrize(
    ("text", "words", "calls"),
    [
        (f"I see.\n\n{XML}\n{XML}", "I see.", [FOUND, FOUND]),
        (XML.removesuffix("</tool_call>"), "", [FOUND]),
        (
            "<tool_call><function=f></function></tool_call>",
            "",
            [ToolCall(name="f", arguments="{}")],
        ),
        (
            XML.replace("ä", "1\n\n2").replace("[1]", "[1"),  # a text of lines; no array
            "",
            [ToolCall(name="f", arguments='{"a": "1\\n\\n2", "b": "[1"}')],
        ),
        (
            XML.replace("=f", "=g").replace("ä", "5"),  # a tool that nobody has shown
            "",
            [ToolCall(name="g", arguments='{"a": "5", "b": "[1]"}')],
        ),
        *(
            (text, text, [])
            for text in (
                XML.replace("</function>", ""),
                XML.replace("<parameter=a>", "<parameter>"),
                XML.replace("<function=f>", "<function=f> so"),
                "<tool_call></tool_call>",
            )
        ),
    ],
)
def test_calls_of_qwen3_coder_are_typed_by_the_tools_schemas(
    text: str, words: str, calls: list[ToolCall]
) -> None:
    for pieces in ([text], list(text)):
        finder = call_finder(CallForm.TAGGED_XML, TOOLS)
        parts = [*map(finder.push, pieces), finder.flush()]
        assert "".join(part[0] for part in parts) == words
        assert [call for part in parts for call in part[1]] == calls


@pytest.mark.parametrize(
    "parameters", [None, 5, {}, {"properties": 5}, {"properties": {"a": 5, "b": {}}}]
)
def test_values_of_odd_schemas_are_texts(parameters: object) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    _, [call] = call_finder(CallForm.TAGGED_XML, [tool]).push(XML)
    assert json.loads(call.arguments) == {"a": "ä", "b": "[1]"}
