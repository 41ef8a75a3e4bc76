from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.text.calls import FORMS, CallFinder, CallForm, ToolCall, call_form_of
from pdx.text.calls.deepseek import DEEPSEEK_V31
from pdx.text.calls.hermes import HERMES
from pdx.text.calls.llama3 import LLAMA3
from pdx.text.calls.qwen3_coder import QWEN3_CODER

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "ä", "b": [1]}}\n</tool_call>'
FOUND = ToolCall(name="f", arguments='{"a": "ä", "b": [1]}')


def find(pieces: list[str], form: CallForm = HERMES) -> tuple[str, list[ToolCall]]:
    finder = CallFinder(form)
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
        *(
            (CALL.replace('{"a": "ä", "b": [1]}', none), "", [ToolCall(name="f", arguments="{}")])
            for none in ("null", '""', "[]", "{}")
        ),
        # Brackets at the end are missing, or are too many.
        (CALL.replace("}}\n", "}"), "", [FOUND]),
        (CALL.replace("}}\n", ""), "", [FOUND]),
        (CALL.replace("}}", "}}}"), "", [FOUND]),
        (f'<tool_call>{{"function": {CALL[12:-13]}}}</tool_call>', "", [FOUND]),
        (
            r'<tool_call>{"name": "f", "arguments": {"a": "\d C:\users \\ \"it\'s\" \u00e4"}}',
            "",
            [ToolCall(name="f", arguments=r"""{"a": "\\d C:\\users \\ \"it's\" \u00e4"}""")],
        ),
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
    finder = CallFinder(HERMES)
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
        (f"{LLAMA}, {LLAMA}, so", ", so", [FOUND, FOUND]),
        (LLAMA.replace("parameters", "arguments"), "", [FOUND]),
        (LLAMA.replace('"name"', '"type": "function", "function"'), "", [FOUND]),
        (f'{{"type": "function", "function": {LLAMA}}}', "", [FOUND]),
        (f"I call {LLAMA}", f"I call {LLAMA}", []),
        (f"{LLAMA} now", " now", [FOUND]),
        ('{"name": "Bonn", "people": 3}', '{"name": "Bonn", "people": 3}', []),
        ('{"name": "f", "parameters": 5}', '{"name": "f", "parameters": 5}', []),
        ("{broken", "{broken", []),
        (" <|pyth", " <|pyth", []),
        ("  ", "  ", []),
        ("", "", []),
    ],
)
def test_calls_of_llama_have_no_tags(text: str, words: str, calls: list[ToolCall]) -> None:
    assert find([text], LLAMA3) == (words, calls)
    assert find(list(text), LLAMA3) == (words, calls)


def test_llamas_words_go_out_as_they_come() -> None:
    finder = CallFinder(LLAMA3)
    assert finder.push(" The") == (" The", [])
    assert finder.push(' {"name"') == (' {"name"', [])


@pytest.mark.parametrize(
    ("text", "words", "calls"),
    [
        (START + V3_CALL + END, "", [FOUND]),
        (f"Wait.\n\n{START}{V3_CALL}\n{V3_CALL}{END}", "Wait.", [FOUND, FOUND]),
        (START + V31_CALL + V31_CALL + END, "", [FOUND, FOUND]),
        (START + V31_CALL, "", [FOUND]),
        (START + "so: " + V31_CALL + END, START + "so:", [FOUND]),
        (START + V31_CALL.removesuffix("<｜tool▁call▁end｜>"), "", [FOUND]),
        (START + V31_CALL.replace("}", "") + END, "", [FOUND]),
        (START + V3_CALL.replace("json", "JSON") + END, "", [FOUND]),
        (START + V3_CALL.replace("```json\n", "").replace("\n```", "") + END, "", [FOUND]),
        (
            START + V3_CALL.replace("function<｜tool▁sep｜>f\n", "f<｜tool▁sep｜>") + END,
            "",
            [FOUND],
        ),
        *(
            (text, text, [])
            for text in (
                START + END,
                START + "f" + END,
                START + V31_CALL.replace("f<", "<", 1) + END,
                "no call: <｜tool",
            )
        ),
    ],
)
def test_calls_of_deepseek_are_found_in_any_pieces(
    text: str, words: str, calls: list[ToolCall]
) -> None:
    assert find([text], DEEPSEEK_V31) == (words, calls)
    assert find(list(text), DEEPSEEK_V31) == (words, calls)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("within <tool_call></tool_call> XML tags", HERMES),
        ("<tool_call>\n<function=name>\n<parameter=a>", QWEN3_CODER),
        (LLAMA_TEMPLATE, LLAMA3),
        ("{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name}}", DEEPSEEK_V31),
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
        (XML.replace("\n", "\r\n"), "", [FOUND]),
        # One end tag is missing.
        (XML.replace("</function>", ""), "", [FOUND]),
        (XML.replace("</parameter>\n<parameter", "<parameter"), "", [FOUND]),
        (XML.replace("</parameter>\n</function>", "</function>"), "", [FOUND]),
        (XML.replace("</parameter>\n</function>\n", ""), "", [FOUND]),
        (f"{XML.replace('</function>', '')} so {XML}", " so", [FOUND, FOUND]),
        (
            XML.replace("</parameter>\n</function>\n</tool_call>", "") + XML,
            XML.replace("\n</parameter>\n</function>\n</tool_call>", ""),
            [FOUND],
        ),
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
        finder = CallFinder(QWEN3_CODER, TOOLS)
        parts = [*map(finder.push, pieces), finder.flush()]
        assert "".join(part[0] for part in parts) == words
        assert [call for part in parts for call in part[1]] == calls


@pytest.mark.parametrize(
    "parameters", [None, 5, {}, {"properties": 5}, {"properties": {"a": 5, "b": {}}}]
)
def test_values_of_odd_schemas_are_texts(parameters: object) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    finder = CallFinder(QWEN3_CODER, [tool])
    finder.push(XML)
    _, [call] = finder.flush()
    assert json.loads(call.arguments) == {"a": "ä", "b": "[1]"}


@pytest.mark.parametrize(
    ("form", "start", "end"),
    [
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "', '"}}</tool_call>'),
        (LLAMA3, '{"name": "f", "parameters": {"a": "', '"}}'),
        (DEEPSEEK_V31, START + "<｜tool▁call▁begin｜>f<｜tool▁sep｜>" + '{"a": "', '"}' + END),
        (
            QWEN3_CODER,
            "<tool_call>\n<function=f>\n<parameter=a>\n",
            "\n</parameter>\n</function>\n</tool_call>",
        ),
    ],
    ids=lambda part: getattr(part, "name", ""),
)
@pytest.mark.parametrize("piece", ["word ", "<", "\n"])
def test_a_piece_costs_the_same_however_much_is_held(
    form: CallForm, start: str, end: str, piece: str
) -> None:
    """No push copies what is held, of one call that comes token by token."""
    num_pieces = 20_000
    finder = CallFinder(form)
    finder.push(start)
    for _ in range(num_pieces - 1):
        assert finder.push(piece) == ("", [])
    assert memory_of(lambda: finder.push(piece)) < num_pieces / 4
    _, calls = finder.push(end)
    [call] = calls + finder.flush()[1]
    assert json.loads(call.arguments) == {"a": piece * num_pieces}


def memory_of(run: Callable[[], object]) -> int:
    """Bytes that are allocated meanwhile, at most at a time."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        run()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_white_space_is_held_in_pieces(form: CallForm) -> None:
    finder = CallFinder(form)
    for _ in range(20_000):
        assert finder.push("\n") == ("", [])
    assert memory_of(lambda: finder.push("\n")) < 5_000
    assert finder.push("x") == ("\n" * 20_001 + "x", [])


@pytest.mark.parametrize(
    ("form", "bad"),
    [
        (HERMES, '<tool_call>{" , " : "'),
        (QWEN3_CODER, "<tool_call>\n<function=g>\n<parameter=a>\n"),
        (QWEN3_CODER, "<tool_call>\n<function=g>\n<parameter=a>\n1\n</parameter>\n</tool_call>\n"),
    ],
)
def test_a_call_behind_many_broken_ones_is_found(form: CallForm, bad: str) -> None:
    good = CALL if form is HERMES else XML.replace("[1]", "b")
    _, calls = find([bad * 50 + "\n" + good], form)
    assert [call.name for call in calls][-1:] == ["f"]


def test_reading_broken_calls_again_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = "<tool_call>\n<function=g>\n<parameter=a>\n" * 200
    monkeypatch.setattr("pdx.text.calls.finder._FREE_CHARS", 0)
    assert find([bad], QWEN3_CODER) == (bad, [])
