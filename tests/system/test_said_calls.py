"""Tool calls that a model says in its family's form come through the whole product, alike streamed
and whole. One server for each form says all of its texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdx.text.calls import CallForm
from pdx.text.calls.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from pdx.text.calls.hermes import HERMES
from pdx.text.calls.llama3 import LLAMA3
from pdx.text.calls.qwen3_coder import QWEN3_CODER
from tests.oracle.parrot import Parrot, build
from tests.system.nodes import Decoder
from tests.system.test_serve import serving

Arguments = dict[str, Any]

TEMPLATE = (
    "{%% if tools %%}%s{%% for t in tools %%}{{ t | tojson }}{%% endfor %%}{%% endif %%}"
    "{%% for m in messages %%}{{ m.role }}: {{ m.content }}\n{%% endfor %%}"
    "{%% if false %%}</think>{%% endif %%}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "text": {"type": ["string", "null"]},
                    "line": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                    "place": {"$ref": "#/$defs/Place"},
                },
                "$defs": {"Place": {"type": "object"}},
            },
        },
    }
]
FIRST: Arguments = {"path": "a.py", "text": "Grüße, 日本 🙂\n\n", "line": 5}
SECOND: Arguments = {"path": "b", "text": None, "line": None, "place": {"x": [1, 2.5]}}
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
CODER = "<tool_call>\n<function=edit>\n{}</function>\n</tool_call>"


def coder_call(arguments: Arguments) -> str:
    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    lines = "".join(f"<parameter={k}>\n{text(v)}\n</parameter>\n" for k, v in arguments.items())
    return CODER.format(lines)


@dataclass(frozen=True)
class Family:
    """How the models of a form write."""

    form: CallForm
    #: The template's words that teach it.
    lesson: str
    call: Callable[[Arguments], str]
    #: A text with the form's own markup, as a value.
    quote: str
    section: tuple[str, str] = ("", "")
    separator: str = "\n"

    def calls(self, *arguments: Arguments) -> str:
        start, end = self.section
        return start + self.separator.join(map(self.call, arguments)) + end


FAMILIES = [
    Family(
        form=HERMES,
        lesson="Call in <tool_call></tool_call>.",
        call=lambda a: (
            f'<tool_call>\n{{"name": "edit", "arguments": {json.dumps(a)}}}\n</tool_call>'
        ),
        quote='<tool_call>{"name": "g", "arguments": {}}</tool_call>',
    ),
    Family(
        form=QWEN3_CODER,
        lesson="Call in <tool_call> and <function=name>.",
        call=coder_call,
        quote="a </parameter> b\n<parameter=x>\n1\n</parameter>\n</tool_call>"
        + CODER.format("<parameter=path>\nq\n</parameter>\n"),
    ),
    Family(
        form=LLAMA3,
        lesson='{"name": function name, "parameters": dictionary of argument name and its value}',
        call=lambda a: f'{{"name": "edit", "parameters": {json.dumps(a)}}}',
        quote='{"name": "g", "parameters": {}}; "',
        separator="; ",
    ),
    Family(
        form=DEEPSEEK_V3,
        lesson=f"{BEGIN}{CALL_BEGIN}function{SEPARATOR}name ```json {END}",
        call=lambda a: (
            f"{CALL_BEGIN}function{SEPARATOR}edit\n```json\n{json.dumps(a)}\n```{CALL_END}"
        ),
        quote=f"```json\n{{}}\n```{CALL_END}{END}",
        section=(BEGIN, END),
    ),
    Family(
        form=DEEPSEEK_V31,
        lesson=f"{BEGIN}{CALL_BEGIN}name{SEPARATOR}{{}}{CALL_END}{END}",
        call=lambda a: f"{CALL_BEGIN}edit{SEPARATOR}{json.dumps(a)}{CALL_END}",
        quote=f"```json\n{{}}\n```{CALL_END}",
        section=(BEGIN, END),
        separator="",
    ),
]


@dataclass(frozen=True)
class Case:
    """What is said, and what the client must get."""

    said: str
    content: str
    calls: list[Arguments]
    reasoning: str = ""


def cases_of(family: Family) -> dict[str, Case]:
    one = family.calls(FIRST)
    quoting = {"path": "q", "text": family.quote, "line": 1}
    broken = one.replace("line", "")[: one.index("path") + 3]
    return {
        "one": Case(one, "", [FIRST]),
        "several": Case(family.calls(FIRST, SECOND), "", [FIRST, SECOND]),
        "words around": Case(f"First.\n\n{one}\nThen 2.", "First.\nThen 2.", [FIRST]),
        "words between": Case(f"{one} and {family.calls(SECOND)}", " and", [FIRST, SECOND]),
        "markup in a value": Case(family.calls(quoting, SECOND), "", [quoting, SECOND]),
        "no end": Case(one.removesuffix(family.section[1]), "", [FIRST]),
        "cut": Case(broken, broken, []),
        "broken": Case(f"{broken}\n{one}", broken, [FIRST]),
        "no call": Case('Like {"city": "Bonn"} <b>so</b>.', 'Like {"city": "Bonn"} <b>so</b>.', []),
        "in thoughts": Case(f"<think>\nHm.\n{one}", "", [FIRST], "Hm."),
        "mentioned": Case(f"<think>Is {one} it?</think>No.", "No.", [], f"Is {one} it?"),
    }


def ask(served: Decoder, parrot: Parrot, name: str, **fields: Any) -> Case:
    """The answer, asserted to be the same streamed and whole. Its text is left out."""
    messages = [{"role": "user", "content": "Edit, please."}]
    body = {"messages": messages, "tools": TOOLS, **parrot.say(name), **fields}
    url = f"{served.url}/chat/completions"
    answer = served.client.post(url, json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    message = choice["message"]
    calls = message.get("tool_calls", [])
    streamed = served.client.post(url, json=body | {"stream": True}).text
    frames = [json.loads(frame[6:]) for frame in streamed.split("\n\n")[:-2]]
    choices = [frame["choices"][0] for frame in frames]
    deltas = [piece["delta"] for piece in choices]

    def said(key: str) -> str:
        text = "".join(delta.get(key) or "" for delta in deltas)
        assert text == (message.get(key) or "")
        return text

    streamed_calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["function"] for call in streamed_calls] == [call["function"] for call in calls]
    assert choices[-1]["finish_reason"] == choice["finish_reason"]
    if "max_tokens" not in fields:
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    assert all(call["function"]["name"] == "edit" for call in calls)
    return Case(
        said="",
        content=said("content"),
        calls=[json.loads(call["function"]["arguments"]) for call in calls],
        reasoning=said("reasoning_content"),
    )


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.form.name)
def test_every_call_comes_through(family: Family, tmp_path: Path) -> None:
    template = TEMPLATE % family.lesson
    assert family.form.is_taught_by(template)
    cases = cases_of(family)
    parrot = build(tmp_path / "parrot", template, {name: c.said for name, c in cases.items()})
    with serving(parrot.folder, tmp_path / "log", "--colocated") as served:
        for name, case in cases.items():
            found = ask(served, parrot, name)
            wanted = Case("", case.content, case.calls, case.reasoning)
            assert found == wanted, name
        begun = ask(served, parrot, "one", max_tokens=3)
        assert not begun.calls
        assert begun.content and cases["one"].said.startswith(begun.content)
