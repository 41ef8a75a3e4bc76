"""Tools, tool calls and reasoning, as a template of the Qwen kind yields them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from pdx.request.request import FinishReason
from pdx.request.stream import Submit
from pdx.server.messages import checked_messages
from pdx.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from conftest import Frontend

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% if tools %}Tools:{% for t in tools %} {{ t | tojson }}{% endfor %}"
    " Call with <tool_call></tool_call>.\n{% endif %}"
    "{% for m in messages %}<|im_start|>"
    "{{ m.role }}{{ ' (' + m.name + ')' if m.name else '' }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if open_thinking %}<think>\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
USER = [{"role": "user", "content": "Weather in Bonn?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    ours = tmp_path_factory.mktemp("tools")
    (ours / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (ours / "chat_template.jinja").write_text(TEMPLATE)
    return ours


@pytest.fixture(scope="module")
def qwen(model: Path, make_frontend: Callable[..., Frontend]) -> Iterator[Frontend]:
    frontend = make_frontend(model, context_len=2000)
    yield frontend
    assert frontend.stop() == 0


def ask(qwen: Frontend, **body: Any) -> dict[str, Any]:
    response = httpx.post(qwen.url + CHAT, json={"messages": USER} | body, timeout=20)
    assert response.status_code == 200, response.text
    TypeAdapter(ChatCompletion).validate_python(response.json())
    answer: dict[str, Any] = response.json()
    return answer


def stream(qwen: Frontend, **body: Any) -> list[dict[str, Any]]:
    """The deltas of a streamed answer, checked, and the last finish reason at the end."""
    body = {"messages": USER, "stream": True} | body
    response = httpx.post(qwen.url + CHAT, json=body, timeout=20)
    assert response.status_code == 200, response.text
    events = [json.loads(f[6:]) for f in response.text.split("\n\n")[:-2]]
    for event in events:
        TypeAdapter(ChatCompletionChunk).validate_python(event)
    return [event["choices"][0] for event in events]


def prompt_of(qwen: Frontend, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(qwen.next(Submit).token_ids, skip_special_tokens=False)


def test_calls_are_told_apart_from_the_words(qwen: Frontend, make_say: Callable[..., Any]) -> None:
    qwen.script = make_say(f"Let me see.\n{CALL}\n{CALL}", FinishReason.STOP)
    answer = ask(qwen, tools=TOOLS)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    first, second = choice["message"]["tool_calls"]
    assert first["type"] == "function"
    assert first["function"] == {"name": "weather", "arguments": '{"city": "Bonn"}'}
    assert first["id"] != second["id"]
    one = ask(qwen, tools=TOOLS, parallel_tool_calls=False)["choices"][0]
    assert len(one["message"]["tool_calls"]) == 1
    assert one["finish_reason"] == "tool_calls"


def test_calls_are_streamed_as_deltas(qwen: Frontend, make_say: Callable[..., Any]) -> None:
    qwen.script = make_say(f"Wait.{CALL}{CALL}", FinishReason.STOP)
    choices = stream(qwen, tools=TOOLS)
    calls = [call for c in choices for call in c["delta"].get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert [call["function"]["name"] for call in calls] == ["weather", "weather"]
    assert "".join(c["delta"].get("content") or "" for c in choices) == "Wait."
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_openai_client_accumulates_streamed_calls(
    qwen: Frontend, make_say: Callable[..., Any]
) -> None:
    qwen.script = make_say(CALL, FinishReason.STOP)
    with openai.OpenAI(base_url=qwen.url + "/v1", api_key="x", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="org/tiny",
            messages=[{"role": "user", "content": "x"}],
            tools=TOOLS,  # type: ignore[arg-type]
        )
        [call] = answer.choices[0].message.tool_calls or []
        assert answer.choices[0].message.content is None
        with client.chat.completions.stream(
            model="org/tiny",
            messages=[{"role": "user", "content": "x"}],
            tools=TOOLS,  # type: ignore[arg-type]
        ) as events:
            final = events.get_final_completion()
    [streamed] = final.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.arguments == streamed.function.arguments == '{"city": "Bonn"}'
    assert final.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "text", ["<tool_call>{broken</tool_call>", 'x <tool_call>{"arguments": {}}</tool_call>']
)
def test_malformed_call_stays_content(
    qwen: Frontend, make_say: Callable[..., Any], text: str
) -> None:
    qwen.script = make_say(text, FinishReason.STOP)
    choice = ask(qwen, tools=TOOLS)["choices"][0]
    assert choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    streamed = stream(qwen, tools=TOOLS)
    assert "".join(c["delta"].get("content") or "" for c in streamed) == text


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_nothing_is_a_call(
    qwen: Frontend, make_say: Callable[..., Any], tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    while not qwen.messages.empty():
        qwen.messages.get()
    qwen.script = make_say(CALL, FinishReason.STOP)
    assert ask(qwen, **fields)["choices"][0]["message"]["content"] == CALL
    assert "Tools:" not in prompt_of(qwen, tokenizer)


def test_length_is_told_before_calls(qwen: Frontend, make_say: Callable[..., Any]) -> None:
    qwen.script = make_say(CALL, FinishReason.LENGTH)
    choice = ask(qwen, tools=TOOLS)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["tool_calls"]) == 1


def test_history_of_calls_goes_through_the_template(
    qwen: Frontend, make_say: Callable[..., Any], tokenizer: Tokenizer
) -> None:
    while not qwen.messages.empty():
        qwen.messages.get()
    qwen.script = make_say("ok", FinishReason.STOP)
    function = {"name": "weather", "arguments": '{"city": "Köln"}'}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "Ada", "content": "x"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sun"}]},
    ]
    ask(qwen, messages=messages, tools=TOOLS)
    prompt = prompt_of(qwen, tokenizer)
    assert f"Tools: {json.dumps(TOOLS[0])}" in prompt
    assert "system\nBe brief." in prompt
    assert "user (Ada)\nx" in prompt
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>' in prompt
    assert "tool\nsun" in prompt


def test_own_answer_can_be_sent_back(
    qwen: Frontend, make_say: Callable[..., Any], tokenizer: Tokenizer
) -> None:
    """As a client dumps it: with null for all that the answer has not."""
    qwen.script = make_say(CALL, FinishReason.STOP)
    with openai.OpenAI(base_url=qwen.url + "/v1", api_key="x", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="org/tiny",
            messages=[{"role": "user", "content": "x"}],
            tools=TOOLS,  # type: ignore[arg-type]
        )
    dumped = answer.choices[0].message.model_dump()
    assert (dumped["content"], dumped["refusal"]) == (None, None)
    call_id = dumped["tool_calls"][0]["id"]
    result = {"role": "tool", "tool_call_id": call_id, "content": None}
    prompts = []
    for message in (dumped, {"role": "assistant", "tool_calls": dumped["tool_calls"]}):
        while not qwen.messages.empty():
            qwen.messages.get()
        ask(qwen, messages=[*USER, message, result], tools=TOOLS)
        prompts.append(prompt_of(qwen, tokenizer))
    assert prompts[0] == prompts[1]
    assert '{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>' in prompts[0]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": 5},
        {"role": "assistant", "tool_calls": [{"function": {"name": 5}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [5]}}]},
        {"role": "assistant", "tool_calls": [5]},
        {"role": "assistant", "function_call": {"arguments": "{}"}},
        {"role": "assistant", "function_call": 5},
        {"role": "assistant", "content": [5]},
    ],
)
def test_message_that_is_none_is_named(qwen: Frontend, message: dict[str, Any]) -> None:
    response = httpx.post(qwen.url + CHAT, json={"messages": [*USER, message]}, timeout=20)
    assert response.status_code == 400
    error = response.json()["error"]
    assert "messages[1]" in error["message"]
    assert error["param"] == "messages"


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_null_content_is_an_empty_one(role: str) -> None:
    message = {"role": role, "content": None}
    assert checked_messages([*USER, message]) == [*USER, message]


def test_call_that_a_template_leaves_out_is_named(frontend: Frontend, http: httpx.Client) -> None:
    function = {"name": "weather", "arguments": "{}"}
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    response = http.post(CHAT, json={"messages": [*USER, message]})
    assert response.status_code == 400
    assert "the call of 'weather' of messages[1]" in response.json()["error"]["message"]


def test_template_without_tools_refuses_them(frontend: Frontend, http: httpx.Client) -> None:
    response = http.post(CHAT, json={"messages": USER, "tools": TOOLS})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"


THOUGHT = "<think>\nBonn is in Germany.\n\nSo.\n</think>\n\nIt is sunny."


@pytest.mark.parametrize(
    ("text", "variables", "reasoning", "content"),
    [
        (THOUGHT, {}, "Bonn is in Germany.\n\nSo.", "It is sunny."),
        (
            THOUGHT.removeprefix("<think>\n"),
            {"open_thinking": True},
            "Bonn is in Germany.\n\nSo.",
            "It is sunny.",
        ),
        ("It is sunny.", {"enable_thinking": False}, None, "It is sunny."),
        ("<think>\nBonn", {}, "Bonn", ""),
        ("Not <think>this</think>", {}, None, "Not <think>this</think>"),
    ],
)
def test_reasoning_is_told_apart_from_the_answer(
    qwen: Frontend,
    make_say: Callable[..., Any],
    text: str,
    variables: dict[str, Any],
    reasoning: str | None,
    content: str,
) -> None:
    qwen.script = make_say(text, FinishReason.STOP)
    fields = {"chat_template_kwargs": variables}
    message = ask(qwen, **fields)["choices"][0]["message"]
    assert message.get("reasoning_content") == reasoning
    assert message["content"] == content
    deltas = [choice["delta"] for choice in stream(qwen, **fields)]
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == (reasoning or "")
    assert "".join(d.get("content") or "" for d in deltas) == content


def test_reasoning_comes_before_a_call(qwen: Frontend, make_say: Callable[..., Any]) -> None:
    qwen.script = make_say(f"<think>Hm {CALL}</think>\n{CALL}", FinishReason.STOP)
    choice = ask(qwen, tools=TOOLS)["choices"][0]
    assert choice["message"]["reasoning_content"] == f"Hm {CALL}"
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"


def parts(qwen: Frontend, **body: Any) -> tuple[str, str, list[str], str]:
    """Reasoning, content, calls' arguments and finish reason, the same whole and streamed."""
    choice = ask(qwen, **body)["choices"][0]
    message = choice["message"]
    calls = [call["function"]["arguments"] for call in message.get("tool_calls", [])]
    whole = (
        message.get("reasoning_content", ""),
        message["content"] or "",
        calls,
        choice["finish_reason"],
    )
    pieces = stream(qwen, **body)
    deltas = [piece["delta"] for piece in pieces]
    streamed = (
        "".join(d.get("reasoning_content") or "" for d in deltas),
        "".join(d.get("content") or "" for d in deltas),
        [call["function"]["arguments"] for d in deltas for call in d.get("tool_calls", [])],
        pieces[-1]["finish_reason"],
    )
    assert whole == streamed
    return whole


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"<think>Hm.\n{CALL}", ("Hm.", "", 1, "tool_calls")),
        (f"<think>Hm. {CALL}{CALL} So.", ("Hm.", " So.", 2, "tool_calls")),
        (f"<think>{CALL.removesuffix('</tool_call>')}", ("", "", 1, "tool_calls")),
        (f"<think>Hm {CALL} so</think> Yes.", (f"Hm {CALL} so", "Yes.", 0, "stop")),
        (f"<think>Hm {CALL}\n</think>{CALL}", (f"Hm {CALL}", "", 1, "tool_calls")),
        ("<think>A <tool_call> tag", ("A <tool_call> tag", "", 0, "stop")),
        ("<think>A <tool_call>{} tag", ("A <tool_call>{} tag", "", 0, "stop")),
        (
            '<think>So <tool_call>\n{"name": "weather", "argu',
            ('So <tool_call>\n{"name": "weather", "argu', "", 0, "stop"),
        ),
    ],
)
def test_a_call_ends_reasoning_that_nothing_else_ends(
    qwen: Frontend, make_say: Callable[..., Any], text: str, wanted: tuple[str, str, int, str]
) -> None:
    qwen.script = make_say(text, FinishReason.STOP)
    reasoning, content, calls, finish_reason = parts(qwen, tools=TOOLS)
    assert (reasoning, content, len(calls), finish_reason) == wanted


@pytest.mark.parametrize(
    ("text", "fields", "wanted"),
    [
        ("<think>One\n\ntwo</think>\n\nA\n\nB", {"stop": "\n\n"}, ("One\n\ntwo", "A")),
        ("<think>One</think>The one", {"stop": ["One", "one"]}, ("One", "The ")),
        ("<think>One</think>x</think>y", {"stop": "</think>"}, ("One", "x")),
        ("No thoughts, one", {"stop": "one"}, ("", "No thoughts, ")),
        (
            "<think>One</think>The one",
            {"stop": "one", "include_stop_str_in_output": True},
            ("One", "The one"),
        ),
        ("<think>a a</think>a b a c", {"stop": "a", "min_tokens": 16}, ("a a", "a b ")),
        (
            f"<think>a</think>{CALL}",
            {"stop": '"city"', "tools": TOOLS},
            ("a", CALL.partition('"city"')[0]),
        ),
    ],
)
def test_stop_strings_count_from_the_end_of_the_reasoning_on(
    qwen: Frontend,
    make_say: Callable[..., Any],
    tokenizer: Tokenizer,
    text: str,
    fields: dict[str, Any],
    wanted: tuple[str, str],
) -> None:
    qwen.script = make_say(text, None)
    if "min_tokens" in fields:
        shown = "<think>a a</think>a b"
        fields = fields | {"min_tokens": len(tokenizer.encode(shown))}
    reasoning, content, calls, finish_reason = parts(qwen, max_tokens=100, **fields)
    assert (reasoning, content) == wanted
    assert (calls, finish_reason) == ([], "stop")


def test_a_stop_string_in_the_reasoning_is_no_stop(
    qwen: Frontend, make_say: Callable[..., Any]
) -> None:
    qwen.script = make_say("<think>One two", FinishReason.LENGTH)
    assert parts(qwen, stop="two") == ("One two", "", [], "length")


def test_template_variables_reach_the_prompt(
    qwen: Frontend, make_say: Callable[..., Any], tokenizer: Tokenizer
) -> None:
    while not qwen.messages.empty():
        qwen.messages.get()
    qwen.script = make_say("x", FinishReason.STOP)
    ask(qwen, chat_template_kwargs={"enable_thinking": False})
    assert prompt_of(qwen, tokenizer).endswith("<think>\n\n</think>\n\n")
