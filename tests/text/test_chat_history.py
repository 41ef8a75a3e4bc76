"""Histories as clients send them: whatever the spelling, the prompt is the same, and every word and
every call is in it."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.errors import InvalidRequest
from pdx.text.chat_template import ChatTemplate
from tests.text.templates import SHAPES

Message = dict[str, Any]

TOOLS = [{"type": "function", "function": {"name": "weather"}}]
USER = {"role": "user", "content": "What of Bonn?"}
TEMPLATES = {name: ChatTemplate(source, {}) for name, source in SHAPES.items()}


def a_call(city: str = "Paris", **fields: Any) -> Message:
    function = {"name": "weather", "arguments": json.dumps({"city": city})}
    return {"id": f"call-{city}", "type": "function", "function": function} | fields


def a_result(city: str = "Paris", words: Any = "rain") -> Message:
    return {"role": "tool", "tool_call_id": f"call-{city}", "content": words}


def asked(*more: Message) -> list[Message]:
    return [USER, *more]


@pytest.fixture(params=SHAPES)
def template(request: pytest.FixtureRequest) -> ChatTemplate:
    return TEMPLATES[request.param]


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}], "\n\n"])
def test_call_without_words_is_in_the_prompt(template: ChatTemplate, content: Any) -> None:
    history = asked({"role": "assistant", "content": content, "tool_calls": [a_call()]}, a_result())
    prompt = template.render(history)
    assert re.search(r"(?s)weather.{1,40}city.{1,15}Paris", prompt)
    assert "None" not in prompt
    assert r"\"" not in prompt
    assert "{'" not in prompt
    without = copy.deepcopy(history)
    del without[1]["content"]
    assert prompt == template.render(without)


BLANK_KEYS = ("tool_calls", "function_call", "refusal", "audio", "name", "annotations", "unknown")


@pytest.mark.parametrize("blank", [None, [], {}, ""], ids=repr)
def test_key_that_says_nothing_is_no_key(template: ChatTemplate, blank: Any) -> None:
    plain = asked({"role": "assistant", "content": "Sunny."}, {"role": "user", "content": "And?"})
    dumped = [message | dict.fromkeys(BLANK_KEYS, blank) for message in plain]
    assert template.render(dumped, tools=[]) == template.render(plain)


def test_words_beside_calls_are_kept_and_so_are_all_calls(template: ChatTemplate) -> None:
    calls = [a_call("Paris"), a_call("Rome")]
    history = asked(
        {"role": "assistant", "content": "Let us see.", "tool_calls": calls},
        a_result("Rome", "sun"),
        a_result("Paris", "rain"),
        {"role": "assistant", "content": "Wet and dry."},
        {"role": "user", "content": "Thanks"},
    )
    prompt = template.render(history)
    for words in ("Let us see.", "Paris", "Rome", "sun", "rain", "Wet and dry.", "Thanks"):
        assert prompt.count(words) == 1
    assert prompt.count("weather") == 2


def test_call_that_was_cut_off_goes_on_as_it_is(template: ChatTemplate) -> None:
    cut = a_call(function={"name": "weather", "arguments": '{"city": "Par'})
    prompt = template.render(asked({"role": "assistant", "tool_calls": [cut]}, a_result()))
    assert re.search(r'\{\\?"city\\?": \\?"Par\W', prompt)


@pytest.mark.parametrize("arguments", ["[1, 23]", "23", '"23"', "23 oC", '{"a": "23\\ud83d"}'])
def test_arguments_that_are_no_object_of_text_are_kept(
    template: ChatTemplate, arguments: str
) -> None:
    odd = a_call(function={"name": "weather", "arguments": arguments})
    prompt = template.render(asked({"role": "assistant", "tool_calls": [odd]}, a_result()))
    assert "23" in prompt
    prompt.encode()


@pytest.mark.parametrize("arguments", [None, "", " ", "{}", {}, []], ids=repr)
def test_call_without_arguments_is_kept(template: ChatTemplate, arguments: Any) -> None:
    bare = a_call(function={"name": "weather", "arguments": arguments})
    prompt = template.render(asked({"role": "assistant", "tool_calls": [bare]}, a_result()))
    assert "weather" in prompt
    assert "None" not in prompt


def test_first_form_of_calls_is_the_same_as_todays(template: ChatTemplate) -> None:
    function = a_call()["function"]
    legacy = asked(
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "weather", "content": "rain"},
    )
    today = asked({"role": "assistant", "tool_calls": [{"function": function}]}, a_result())
    today[-1] = {"role": "tool", "name": "weather", "content": "rain"}
    assert template.render(legacy) == template.render(today)
    assert "rain" in template.render(legacy)


def test_result_without_words_is_a_result(template: ChatTemplate) -> None:
    answer = {"role": "assistant", "tool_calls": [a_call()]}
    prompts = {template.render(asked(answer, a_result(words=w))) for w in (None, "", [])}
    assert len(prompts) == 1
    assert "None" not in prompts.pop()


def test_results_without_an_id_answer_the_calls_in_their_order() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content }}{% if m.role == 'tool' %} of {{ m.tool_call_id }};"
        "{% endif %}{% for c in m.tool_calls %}{{ c.function.name ~ c.function.arguments }}"
        "{% endfor %}{% endfor %}",
        {},
    )
    calls = [a_call("Rome"), a_call("Bonn"), a_call("Oslo", function={"name": "time"})]
    results = [
        {"role": "tool", "name": "time", "content": "noon"},
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "hail"},
        {"role": "tool", "content": "over"},
    ]
    prompt = template.render(asked({"role": "assistant", "tool_calls": calls}, *results))
    assert prompt.endswith("noon of call-Oslo;sun of call-Rome;hail of call-Bonn;over of ;")


def test_name_of_a_result_is_there_for_templates_that_need_it() -> None:
    source = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name "
        "}}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% if m.role == 'tool' %}{{ ' from ' + m.name }}{% endif %}{% endfor %}"
    )
    history = asked({"role": "assistant", "tool_calls": [a_call()]}, a_result())
    assert ChatTemplate(source, {}).render(history).endswith("rain from weather")


def test_tool_without_description_is_there_for_templates_that_need_it() -> None:
    source = (
        "{% for t in tools %}{{ t.function.name + ': ' + t.function.description }}"
        "{{ t.function.parameters.properties | length }}{% endfor %}{{ messages[0].content }}"
    )
    dumped = [{"type": "function", "function": TOOLS[0]["function"] | {"description": None}}]
    for tools in (TOOLS, dumped):
        assert ChatTemplate(source, {}).render([USER], tools=tools) == "weather: 0What of Bonn?"
    shown = ChatTemplate("{{ tools | tojson }}", {})
    assert shown.render([USER], tools=dumped) == json.dumps(TOOLS)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_have_the_name_that_the_template_reads(key: str) -> None:
    history = asked({"role": "assistant", "content": "Yes.", key: "Hm."})
    for read in ("reasoning_content", "reasoning", "thinking"):
        source = f"{{% for m in messages %}}{{{{ m.{read} }}}}{{{{ m.content }}}}{{% endfor %}}"
        assert ChatTemplate(source, {}).render(history) == "What of Bonn?Hm.Yes."


def test_thoughts_may_be_left_out(template: ChatTemplate) -> None:
    answer = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert "Yes." in template.render(asked(answer, USER))


def test_refusal_is_the_content_of_a_message_without_one(template: ChatTemplate) -> None:
    refusal = {"role": "assistant", "content": None, "refusal": "I must not."}
    parts = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I must not."}]}
    plain = {"role": "assistant", "content": "I must not."}
    assert len({template.render(asked(each, USER)) for each in (refusal, parts, plain)}) == 1


def test_system_message_that_is_said_only_in_the_first_turn_joins_the_users() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' and loop.last and messages[0].role == "
        "'system' %}{{ messages[0].content }} {% endif %}"
        "{% if m.role != 'system' %}{{ m.content }};{% endif %}{% endfor %}"
    )
    template = ChatTemplate(source, {})
    chat = [{"role": "system", "content": "Be brief."}, USER]
    assert template.render(chat) == "Be brief. What of Bonn?;"
    more = [*chat, {"role": "assistant", "content": "Sun."}]
    assert template.render(more) == "Be brief.\n\nWhat of Bonn?;Sun.;"


FORGETFUL = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "assistant", "content": "Sun."}, "the content"),
        ({"role": "critic", "content": "Sun."}, "the content"),
        ({"role": "assistant", "tool_calls": [a_call()]}, "the call of 'weather'"),
        ({"role": "system", "content": "Be brief."}, "the content"),
    ],
)
def test_part_that_no_reading_keeps_is_named(message: Message, said: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"leaves out {said} of messages\[1\]") as caught:
        ChatTemplate(FORGETFUL, {}).render(asked(message))
    assert caught.value.param == "messages"


def test_template_that_refuses_says_why() -> None:
    history = asked({"role": "assistant", "content": "Sun."}, {"role": "assistant", "content": "x"})
    with pytest.raises(InvalidRequest, match="alternate"):
        TEMPLATES["turns that alternate, ids of nine characters"].render(history)


def test_words_of_the_texts_do_not_decide_what_is_lost(template: ChatTemplate) -> None:
    """The call's words are in the question as well, and its marks can be in nobody's text."""
    history = [
        {"role": "user", "content": "weather city Paris q0v0z qdeadbeefv0z"},
        {"role": "assistant", "content": "", "tool_calls": [a_call()]},
        a_result(),
    ]
    assert template.render(history).count("Paris") == 2


def test_long_chat_needs_no_more_than_a_short_one(template: ChatTemplate) -> None:
    calls = [a_call("Paris"), a_call("Rome")]
    turn = [
        USER,
        {"role": "assistant", "content": "Let us see.", "tool_calls": calls},
        a_result("Paris"),
        a_result("Rome", "sun"),
        {"role": "assistant", "content": "Wet and dry."},
    ]
    prompt = template.render([*turn * 60, USER])
    for words in ("Let us see.", "Paris", "Rome", "rain", "sun", "Wet and dry."):
        assert prompt.count(words) == 60


def test_long_chat_is_rendered_a_few_times_only() -> None:
    """A hopeless one too: each loss would suggest another reading."""
    lengths: list[int] = []
    template = ChatTemplate(FORGETFUL + "{% set _ = tick(messages | length) %}", {})
    template._template.globals["tick"] = lengths.append
    calls = [a_call(str(idx)) for idx in range(2)]
    turns = [
        [USER, {"role": "assistant", "content": "x", "tool_calls": calls}, a_result("0")]
        for _ in range(2000)
    ]
    with pytest.raises(InvalidRequest, match="leaves out"):
        template.render([message for turn in turns for message in turn])
    assert sum(lengths) < 16 * 5 * 2000


class Chats:
    """Chats from a seed, in the plainest spelling and in another. No word comes twice."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._num_words = 0

    def history(self) -> list[Message]:
        """Some turns, with calls in some of them."""
        history: list[Message] = []
        for _ in range(self._random.randint(1, 3)):
            history.append({"role": "user", "content": self._words()})
            for _ in range(self._random.choice((0, 1, 1, 2))):
                history += self._step()
            history.append({"role": "assistant", "content": self._words()})
        return [*history, {"role": "user", "content": self._words()}]

    def spelled_otherwise(self, message: Message) -> Message:
        """The same message, as another client would send it."""
        other = dict(message)
        content = message["content"]
        if not content and message["role"] != "user":
            other["content"] = self._random.choice((None, "", []))
            if self._is_so():
                del other["content"]
        elif self._is_so():
            cut = self._random.randint(0, len(content))
            texts = (content[:cut], content[cut:])
            other["content"] = [{"type": "text", "text": text} for text in texts]
        if "tool_calls" in message:
            other["tool_calls"] = [self._call_otherwise(call) for call in message["tool_calls"]]
        if message["role"] == "tool" and self._is_so():
            del other["tool_call_id"]  # results come in the order of the calls
        for key in self._random.sample(("reasoning_content", *BLANK_KEYS), 3):
            if key not in message:
                other[key] = self._random.choice((None, [], ""))
        return other

    def _step(self) -> list[Message]:
        said = self._words() if self._is_so() else ""
        calls = [self._call() for _ in range(self._random.choice((1, 1, 2, 3)))]
        results = [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": self._random.choice(("", self._words())),
            }
            for call in calls
        ]
        return [{"role": "assistant", "content": said, "tool_calls": calls}, *results]

    def _call(self) -> Message:
        arguments = {self._word(): self._value(2) for _ in range(self._random.randint(0, 3))}
        function = {"name": self._word(), "arguments": arguments}
        return {"id": f"id-{self._word()}", "type": "function", "function": function}

    def _value(self, depth: int) -> Any:
        kind = self._random.randint(0, 5 if depth else 3)
        if kind == 4:
            return [self._value(depth - 1) for _ in range(self._random.randint(0, 2))]
        if kind == 5:
            return {self._word(): self._value(depth - 1) for _ in range(self._random.randint(0, 2))}
        return self._words() if kind else self._random.choice((0, 1.5, True, None, ""))

    def _call_otherwise(self, call: Message) -> Message:
        arguments = call["function"]["arguments"]
        indented = json.dumps(arguments, ensure_ascii=False, indent=1)
        spellings = [arguments, json.dumps(arguments), indented]
        if not arguments:
            spellings += [None, ""]
        spelled = self._random.choice(spellings)
        function = {"name": call["function"]["name"], "arguments": spelled, "parameters": None}
        other = {"id": call["id"], "type": "function", "function": function, "index": None}
        if self._is_so():
            del other["type"]
        return other

    def _is_so(self) -> bool:
        return self._random.random() < 0.5

    def _words(self) -> str:
        gap = self._random.choice(" \n")
        return gap.join(self._word() for _ in range(self._random.randint(1, 3)))

    def _word(self) -> str:
        self._num_words += 1
        stem = self._random.choice(("é", "b", "語", "🙂", "<x>", '"', "{{", "\\"))
        return f"{stem}{self._num_words}w"


def leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner)


def said_in(history: list[Message]) -> Iterator[str]:
    """The number of every word of contents, calls and results."""
    for message in history:
        yield from re.findall(r"\d+w", message["content"])
        for call in message.get("tool_calls", ()):
            yield from re.findall(r"\d+w", call["function"]["name"])
            for text in leaves(call["function"]["arguments"]):
                yield from re.findall(r"\d+w", text)


@given(seed=st.integers(0, 1 << 32), has_tools=st.booleans())
@pytest.mark.parametrize("name", SHAPES)
def test_any_spelling_of_a_history_gives_one_prompt_with_all_of_it(
    seed: int, has_tools: bool, name: str
) -> None:
    template, chats = TEMPLATES[name], Chats(seed)
    tools = TOOLS if has_tools else None
    history = chats.history()
    prompt = template.render(history, tools=tools)
    assert set(said_in(history)) <= set(re.findall(r"(?<!\d)\d+w", prompt))
    other = [chats.spelled_otherwise(message) for message in history]
    assert template.render(other, tools=tools) == prompt
