from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdx.errors import CheckpointError, InvalidRequest
from pdx.text.calls.hermes import HERMES
from pdx.text.chat_template import ChatTemplate

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **special: str) -> str:
    return ChatTemplate(source, special).render(USER if messages is None else messages)


def write_config(folder: Path, **config: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_chatml_ends_with_the_assistants_turn() -> None:
    assert render(CHATML) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_text_parts_are_the_same_as_their_text() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("H", "i")]}]
    assert render(CHATML, parts) == render(CHATML)


def test_image_part_is_refused() -> None:
    parts = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(InvalidRequest, match="image_url"):
        render(CHATML, parts)


def test_block_lines_leave_no_blank_lines() -> None:
    source = (
        "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}"
    )
    assert render(source) == "Hi\n"


def test_what_published_templates_use_is_there() -> None:
    assert render(
        "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ strftime_now('%Y') | length }}") == "4"
    assert render("{% generation %}{{ 'x' }}{% endgeneration %}") == "x"
    assert render("{{ bos_token }}", bos_token="<s>") == "<s>"
    assert render("{% if tools %}no{% endif %}{{ messages[0]['content'].strip() }}") == "Hi"


def test_refusal_of_a_template_is_the_clients_fault() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source", ["{{ 1 / (messages | length - 1) }}", "{{ messages[9].x.y }}", "{{ 1 + 'a' }}"]
)
def test_failing_template_code_is_a_refusal(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source)


def test_template_cannot_leave_the_sandbox() -> None:
    with pytest.raises(InvalidRequest, match=r"unsafe|not safe|undefined"):
        render("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequest):
        render("{{ messages.append(1) }}")


def test_template_is_found_in_each_layout(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    write_config(tmp_path, chat_template="one {{ eos_token }}", eos_token={"content": "</s>"})
    assert _render_folder(tmp_path) == "one </s>"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two"}]
    write_config(tmp_path, chat_template=named)
    assert _render_folder(tmp_path) == "two"
    (tmp_path / "chat_template.jinja").write_text("three {{ bos_token }}")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))
    assert _render_folder(tmp_path) == "three <s>"


def test_templates_in_files_of_their_own_are_found_by_name(tmp_path: Path) -> None:
    """transformers 5's layout: the file is the default, the others are in a folder beside it."""
    write_config(tmp_path, chat_template=[{"name": "tool_use", "template": "old {{ tools }}"}])
    (tmp_path / "chat_template.jinja").write_text("plain")
    others = tmp_path / "additional_chat_templates"
    others.mkdir()
    (others / "tool_use.jinja").write_text("{{ tools[0].function.name }} <tool_call>")
    (others / "rag.jinja").write_text("{{ documents }}")
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert (template.render(USER), template.render(USER, tools=tools)) == ("plain", "f <tool_call>")
    assert (template.takes_tools, template.call_form) == (True, HERMES)
    (others / "tool_use.jinja").write_text("{% if %}")
    with pytest.raises(CheckpointError, match="does not compile"):
        ChatTemplate.from_folder(tmp_path)


def test_template_in_a_file_of_json_goes_before_the_tokenizers(tmp_path: Path) -> None:
    write_config(tmp_path, chat_template="old")
    path = tmp_path / "chat_template.json"
    path.write_text(json.dumps({"chat_template": "new"}))
    assert _render_folder(tmp_path) == "new"
    path.write_text(json.dumps({"chat_template": {"default": "plain", "tool_use": "{{ tools }}"}}))
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert template.takes_tools
    assert template.render(USER) == "plain"


def test_variables_are_those_that_a_template_reads_and_does_not_set() -> None:
    source = (
        "{% set mine = effort or 'low' %}{{ mine }}{% for m in messages %}{{ loop.index }}"
        "{% endfor %}{{ strftime_now('%Y') }}{{ bos_token }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"}, "{{ tools }}{{ date }}")
    assert template.variables == {"effort", "date"}


def test_variable_that_is_null_is_not_set() -> None:
    template = ChatTemplate("{{ 'no' if thinking is defined and not thinking }}", {})
    assert template.render(USER, variables={"thinking": None, "unknown": 1, "self": 2}) == ""


def test_generator_is_a_list_in_json() -> None:
    assert render("{{ messages | map(attribute='role') | tojson }}") == '["user"]'


def _render_folder(folder: Path) -> str:
    template = ChatTemplate.from_folder(folder)
    assert template is not None
    return template.render(USER)


def test_tools_use_their_own_template_where_there_is_one(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    named = [
        {"name": "tool_use", "template": "{{ tools[0].function.name }} <tool_call>"},
        {"name": "default", "template": "plain"},
    ]
    write_config(tmp_path, chat_template=named)
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert template.render(USER, tools=tools) == "f <tool_call>"
    assert template.render(USER) == template.render(USER, tools=[]) == "plain"
    assert (template.takes_tools, template.call_form) == (True, HERMES)
    plain = ChatTemplate(CHATML, {})
    assert not (plain.takes_tools or plain.call_form or plain.tags_reasoning)


def test_calls_of_before_are_said_by_the_template_for_tools_where_no_tools_are_sent() -> None:
    turns = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    template = ChatTemplate(
        turns,
        {},
        "{% for tool in tools %}T{% endfor %}{% for m in messages %}[{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}]{% endfor %}",
    )
    call = {"function": {"name": "f", "arguments": '{"a": "x"}'}}
    question = {"role": "user", "content": "Hi"}
    history = [question, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert template.render(history) == '[Hi][{"a": "x"}]'
    assert template.render([question]) == "[Hi]"


def test_template_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdx.text.chat_template._MAX_RENDER_S", 0)
    template = ChatTemplate(
        "{% for m in messages %}{% for n in messages %}{{ n.content }}{% endfor %}{% endfor %}", {}
    )
    messages = [{"role": "user", "content": "x"}] * 20
    with pytest.raises(InvalidRequest, match="more than 0 s for the 20 messages"):
        template.render(messages)
    monkeypatch.setattr("pdx.text.chat_template._MAX_RENDER_S", 30)
    assert template.render(messages) == "x" * 400


def test_own_variables_of_a_template_are_set_by_name() -> None:
    template = ChatTemplate("{% if enable_thinking is false %}no{% endif %}{{ bos_token }}", {})
    assert template.render(USER, variables={"enable_thinking": False}) == "no"
    assert template.render(USER) == ""
    for name in ("messages", "tools", "add_generation_prompt", "bos_token"):
        with pytest.raises(InvalidRequest, match=name):
            ChatTemplate("", {"bos_token": "x"}).render(USER, variables={name: 1})


def test_developer_is_the_system_to_a_template_that_does_not_know_it() -> None:
    message = [{"role": "developer", "content": "Be brief"}]
    assert "<|im_start|>system" in render(CHATML, message)
    assert render("{% if messages[0].role == 'developer' %}yes{% endif %}", message) == "yes"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].tool_calls[0].function.arguments | tojson }}",
        "{{ '' + messages[0].tool_calls[0].function.arguments }}",
    ],
)
def test_arguments_of_calls_are_what_the_template_wants(source: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "ü"}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert render(source, [message]) == '{"a": "ü"}'


def test_generation_prompt_may_be_left_out() -> None:
    rendered = ChatTemplate(CHATML, {}).render(USER, add_generation_prompt=False)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n"


def test_damaged_files_are_named(tmp_path: Path) -> None:
    write_config(tmp_path, chat_template="{% if %}")
    with pytest.raises(CheckpointError, match="does not compile"):
        ChatTemplate.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer_config"):
        ChatTemplate.from_folder(tmp_path)
