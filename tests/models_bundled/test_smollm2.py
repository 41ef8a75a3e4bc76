"""The bundled model: convert.py makes a Hugging Face folder that gives the committed answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdx.text.calls import CallFinder
from pdx.text.chat_template import ChatTemplate
from tests.models_bundled.bundled import CASES, FOLDER, load


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> Any:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    return load(FOLDER / "golden.py").Oracle(smollm2)


def prompt_of(oracle: Any, case: dict[str, Any]) -> list[int]:
    if "question" in case:
        return oracle.chat_ids(case["question"])
    return oracle.text_ids(case["prompt"])


@pytest.mark.timeout(300)
def test_prompts_have_the_golden_token_ids(oracle: Any) -> None:
    for case in CASES:
        assert prompt_of(oracle, case) == case["prompt_ids"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=["question", "text"])
def test_transformers_repeats_the_golden_answer(oracle: Any, case: dict[str, Any]) -> None:
    answer = oracle.answer(case["prompt_ids"], max_tokens=min(16, len(case["greedy_ids"])))
    assert answer["greedy_ids"] == case["greedy_ids"][:16]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_transformers_repeats_every_golden_answer(oracle: Any, case: dict[str, Any]) -> None:
    answer = oracle.answer(case["prompt_ids"])
    assert answer["greedy_ids"] == case["greedy_ids"]
    assert answer["text"] == case["text"]


def test_digits_are_tokens_of_their_own_and_text_comes_back(oracle: Any) -> None:
    text = "In 2024, 31415 naïve cafés – 日本語 🙂\n\n  def f(x):\treturn x"
    ids = oracle.text_ids(text)
    assert oracle.tokenizer.decode(ids) == text
    pieces = [oracle.tokenizer.decode([idx]) for idx in ids]
    assert all(len(piece.strip()) == 1 for piece in pieces if any(map(str.isdigit, piece)))


def test_a_converted_folder_is_used_again(smollm2: Path) -> None:
    before = (smollm2 / "model.safetensors").stat()
    result = subprocess.run(
        [sys.executable, FOLDER / "convert.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == str(smollm2)
    assert result.stderr == ""
    assert (smollm2 / "model.safetensors").stat().st_ino == before.st_ino


def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    keep = tmp_path / "notes.txt"
    keep.write_text("mine")
    with pytest.raises(RuntimeError, match="not made by this script"):
        load(FOLDER / "convert.py").ensure_model(tmp_path)
    assert keep.read_text() == "mine"


CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi\n"},
        {"role": "assistant", "content": "Hello."},
        {"role": "system", "content": "Be long."},
        {"role": "user", "content": "So?"},
    ],
]


@pytest.mark.parametrize("chat", CHATS, ids=["question", "turns"])
@pytest.mark.parametrize("generate", [True, False])
def test_our_template_says_of_a_plain_chat_what_the_models_own_does(
    smollm2: Path, chat: list[dict[str, Any]], generate: bool
) -> None:
    ours = ChatTemplate.from_folder(smollm2)
    assert ours is not None
    own = json.loads((smollm2 / "tokenizer_config.json").read_text("utf-8"))["chat_template"]
    expected = ChatTemplate(own, {}).render(chat, add_generation_prompt=generate)
    assert ours.render(chat, add_generation_prompt=generate) == expected


def test_our_template_shows_tools_and_calls_in_a_form_that_is_read(smollm2: Path) -> None:
    template = ChatTemplate.from_folder(smollm2)
    assert template is not None
    assert template.takes_tools
    assert template.call_form is not None
    tool = {"type": "function", "function": {"name": "weather", "description": "Of a place."}}
    call = {"function": {"name": "weather", "arguments": '{"place": "Bonn"}'}}
    chat = [
        *CHATS[1],
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call, call]},
        {"role": "tool", "content": "rain"},
    ]
    prompt = template.render(chat, tools=[tool])
    assert prompt.startswith("<|im_start|>system\nBe brief.\n")
    assert prompt.count("Be brief.") == 1
    assert json.dumps(tool["function"]) in prompt
    finder = CallFinder(template.call_form, [tool])
    said = prompt.partition("Let me see.")[2].partition("<|im_end|>")[0]
    found = [*finder.push(said)[1], *finder.flush()[1]]
    assert [(one.name, json.loads(one.arguments)) for one in found] == [
        ("weather", {"place": "Bonn"})
    ] * 2
