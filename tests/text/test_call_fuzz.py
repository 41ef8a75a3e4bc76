"""Any well-formed call comes back byte for byte, whatever its arguments, the words around it and
the cuts of the text. To look for longer, an hour or so:

    pytest tests/text/test_call_fuzz.py --hypothesis-profile=long --timeout=0
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdx.text.calls import FORMS, CallFinder, CallForm, ToolCall
from pdx.text.calls.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from pdx.text.calls.form import JsonCall, NamedJson
from pdx.text.calls.hermes import HERMES
from pdx.text.calls.llama3 import LLAMA3
from pdx.text.calls.qwen3_coder import QWEN3_CODER
from pdx.text.reasoning import ReasoningSplitter

NAMES = ["f", "weather", "get.weather-2", "日本"]
KEYS = ["a", "b", "path", "ä b"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {k: {"type": "string"} for k in KEYS}},
        },
    }
    for name in NAMES
]
#: Tags of all forms, and what JSON is made of.
MARKUP = sorted(
    {
        tag
        for form in FORMS
        for pair in (form.section, form.call)
        if pair
        for tag in (pair.start, pair.end)
    }
    | {"<function=g>", "</function>", "<parameter=a>", "<parameter=x>", "</parameter>"}
    | {"<｜tool▁sep｜>", "```", "```json", "<|python_tag|>", "<think>", "</think>"}
    | {"{", "}", "[", "]", '"', "\\", ";", ",", ":", "<", ">", "\n", "\n\n", " ", "\r\n", "\t"}
    | {'{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {"a": 1}}', "é", "🙂"}
)
texts = st.lists(st.sampled_from(MARKUP) | st.text(max_size=5), max_size=8).map("".join)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
#: No form finds anything in these, and none has white space at its ends.
words = st.sampled_from(["", "So.", "I see:\n\nnow", "a < b > c", '1 } 2 ] "', "</b> <i>x"])
gaps = st.sampled_from(["", " ", "\n", "\n\n", " \n\t"])


def read(pieces: list[str], form: CallForm) -> tuple[str, list[ToolCall]]:
    finder = CallFinder(form, TOOLS)
    parts = [*map(finder.push, pieces), finder.flush()]
    return "".join(part[0] for part in parts), [call for part in parts for call in part[1]]


@st.composite
def cuts(draw: st.DrawFn, text: str) -> list[str]:
    """The text in pieces."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@st.composite
def jsons(draw: st.DrawFn, value: Any) -> str:
    """The value as JSON, in one of the ways to write it."""
    indent = draw(st.sampled_from([None, None, 2]))
    separators = draw(st.sampled_from([None, (",", ":")]))
    return json.dumps(value, indent=indent, separators=separators, ensure_ascii=draw(st.booleans()))


@st.composite
def json_calls(draw: st.DrawFn, form: CallForm) -> tuple[str, ToolCall]:
    """A call in a form with JSON, as the text between the call's tags."""
    name = draw(st.sampled_from(NAMES))
    arguments = draw(jsons(draw(st.dictionaries(texts, values, max_size=3))))
    body = form.body
    gap = draw(gaps)
    if isinstance(body, JsonCall):
        key = draw(st.sampled_from(body.arguments_keys))
        text = f'{{"{body.name_key}":{gap}"{name}", "{key}": {arguments}}}'
    else:
        assert isinstance(body, NamedJson)
        text = f"{name}{body.separator}{arguments}"
        if body.is_fenced:
            text = f"function{body.separator}{name}\n{body.fence}json\n{arguments}\n{body.fence}"
    if form.call is not None:
        inner = "" if isinstance(body, NamedJson) else gap
        text = f"{form.call.start}{inner}{text}{inner}{form.call.end}"
    return text, ToolCall(name=name, arguments=arguments)


def enclosed(form: CallForm, calls: list[str], gap: str) -> str:
    """Calls between the section's tags, where the form has them."""
    joined = (";" if form.separators else gap).join(calls)
    return joined if form.section is None else form.section.start + joined + form.section.end


@pytest.mark.parametrize("form", [HERMES, DEEPSEEK_V3, DEEPSEEK_V31, LLAMA3], ids=lambda f: f.name)
@given(data=st.data())
def test_calls_with_json_come_back(form: CallForm, data: st.DataObject) -> None:
    rounds = data.draw(st.lists(st.tuples(words, gaps, st.integers(1, 3)), min_size=1, max_size=3))
    text, said, wanted = "", "", []
    for before, gap, num_calls in rounds:
        calls = [data.draw(json_calls(form)) for _ in range(num_calls)]
        text += before + gap + enclosed(form, [call for call, _ in calls], gap)
        said += before
        wanted += [call for _, call in calls]
    after = data.draw(words)
    assert read(data.draw(cuts(text + after)), form) == (said + after, wanted)
    assert read(list(text + after), form) == (said + after, wanted)


#: What a value may hold beside plain text: whole parameters, whole calls, tags that close nothing.
QUOTES = [
    "<parameter=x>\n1\n</parameter>",
    "<parameter=x>1</parameter>",
    "<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>",
    "<parameter=x>1</parameter>\n<parameter=y>2</parameter>",
    "<function=g>\n<parameter=x>\n1\n</parameter>\n</function>",
    "<tool_call>\n<function=g>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "<tool_call><function=g><parameter=a>1</parameter></function></tool_call>",
    "one </parameter> two",
    "</parameter> two",
    "one </parameter>",
    "</parameter>",
    "</function>",
    "</tool_call>",
    "</function>\n</tool_call>",
    "one <parameter=b> two",
    "<function=g>",
    "<tool_call>\n<function=g>\n1",
    "one <tool_call> two <function=g> three",
    "</parameter></function></tool_call>",
    "one </parameter></function></tool_call> two",
    "\n",
    "\n\n",
    " ",
    "one\ntwo",
    "<",
    "</",
    "<parameter=",
    "<parameter",
    "if a<b: <c>",
    '{"name": "f"}',
    "'<parameter=' + name + '>\\n' + value + '\\n</parameter>\\n</function>\\n</tool_call>'",
]
#: Tags that do close the parameter in which they are quoted: nobody could tell.
CLOSING = re.compile(r"^</parameter>\s*(<parameter=|</function>|QUOTE)", re.MULTILINE)


def is_clear(value: str) -> bool:
    """Whether what the value quotes is balanced, or closes nothing."""
    for quote in QUOTES[:7]:
        value = value.replace(quote, "QUOTE")
    return CLOSING.search(value) is None


quoting = (
    st.lists(st.sampled_from(QUOTES) | st.text(max_size=5), max_size=4)
    .map("\n".join)
    .filter(is_clear)
)


def written(name: str, arguments: Mapping[str, str]) -> str:
    lines = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


@st.composite
def coder_calls(draw: st.DrawFn) -> tuple[str, ToolCall]:
    name = draw(st.sampled_from(NAMES))
    arguments = draw(st.dictionaries(st.sampled_from(KEYS), quoting, max_size=3))
    text = json.dumps(arguments, ensure_ascii=False)
    return written(name, arguments), ToolCall(name=name, arguments=text)


@given(data=st.data())
def test_calls_with_parameters_come_back(data: st.DataObject) -> None:
    rounds = data.draw(st.lists(st.tuples(words, gaps, coder_calls()), min_size=1, max_size=3))
    after = data.draw(words)
    text = "".join(before + gap + call for before, gap, (call, _) in rounds) + after
    wanted = "".join(before for before, _, _ in rounds) + after, [call for *_, (_, call) in rounds]
    assert read(data.draw(cuts(text)), QWEN3_CODER) == wanted
    assert read(list(text), QWEN3_CODER) == wanted


@pytest.mark.parametrize(
    "value",
    [
        *QUOTES,
        "<function=g>\n<parameter=x>\n1\n</parameter>",
        "<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
        "\n".join(QUOTES[:7]),
    ],
)
def test_a_value_may_quote_tags(value: str) -> None:
    for arguments in ({"a": value}, {"a": value, "b": "2"}, {"b": "2", "a": value, "path": value}):
        wanted = ToolCall(name="f", arguments=json.dumps(arguments, ensure_ascii=False))
        assert read([written("f", arguments)], QWEN3_CODER) == ("", [wanted])


pieces = st.lists(st.sampled_from(MARKUP) | st.text(max_size=3), max_size=20)
CALLS = {
    HERMES.name: '<tool_call>\n{"name": "f", "arguments": {"a": "1"}}\n</tool_call>',
    QWEN3_CODER.name: written("f", {"a": "1"}),
    DEEPSEEK_V3.name: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
    '```json\n{"a": "1"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    DEEPSEEK_V31.name: '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "1"}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    LLAMA3.name: '{"name": "f", "parameters": {"a": "1"}}',
}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@given(pieces=pieces)
def test_any_text_is_read_alike_in_any_pieces(form: CallForm, pieces: list[str]) -> None:
    text = "".join(pieces)
    found = read([text], form)
    assert found == read(pieces, form) == read(list(text), form)
    if not found[1]:
        assert found[0] == text
    for call in found[1]:
        assert isinstance(json.loads(call.arguments), dict)
        call.arguments.encode()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@given(pieces=pieces)
@example(pieces=['<|python_tag|>"'])
def test_a_call_is_found_whatever_is_in_front(form: CallForm, pieces: list[str]) -> None:
    text = "".join(pieces)
    _, calls = read([text + "\n" + CALLS[form.name]], form)
    assert ToolCall(name="f", arguments='{"a": "1"}') in calls


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@given(pieces=pieces)
def test_a_call_is_found_whatever_follows(form: CallForm, pieces: list[str]) -> None:
    text = "".join(pieces)
    _, calls = read([CALLS[form.name] + " so " + text], form)
    assert calls[0] == ToolCall(name="f", arguments='{"a": "1"}')


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@given(pieces=pieces, is_open=st.booleans())
def test_reasoning_is_told_alike_in_any_pieces(
    form: CallForm, pieces: list[str], is_open: bool
) -> None:
    def split(pieces: list[str]) -> tuple[str, str]:
        splitter = ReasoningSplitter(is_open=is_open, finder=CallFinder(form, TOOLS))
        parts = [*map(splitter.push, pieces), splitter.flush()]
        return "".join(part[0] for part in parts), "".join(part[1] for part in parts)

    text = "".join(pieces)
    assert split([text]) == split(pieces) == split(list(text))
    for part in split([text]):
        assert part in text
