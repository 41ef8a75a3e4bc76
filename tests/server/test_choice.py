"""One choice, read from its tokens without a frontend."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from pdx.request.request import FinishReason, SamplingParams
from pdx.request.stream import StreamUpdate
from pdx.server.checks import Prompt, ReadingOptions
from pdx.server.choice import ChoiceReader
from pdx.server.deltas import Delta, joined
from pdx.text.calls.hermes import HERMES
from pdx.text.tokenizer import Tokenizer

SPECIAL = ["<|eos|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Of bytes, with a special token for each tag."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: idx for idx, char in enumerate(alphabet)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return Tokenizer(inner)


def read(tokenizer: Tokenizer, text: str, **options: Any) -> Delta:
    sampling = SamplingParams(max_tokens=1000)
    prompt = Prompt(token_ids=[0], samplings=[sampling])
    reader = ChoiceReader(0, prompt, sampling, ReadingOptions(**options), tokenizer)
    token_ids = tokenizer.encode(text)
    updates = [StreamUpdate(stream_id=1, token_ids=[token_id]) for token_id in token_ids]
    updates.append(StreamUpdate(stream_id=1, token_ids=[], finish_reason=FinishReason.LENGTH))
    return joined([reader.take(update) for update in updates])


def test_tags_may_be_special_tokens(tokenizer: Tokenizer) -> None:
    text = f"<think>Hm</think>So.<|eos|>{CALL}"
    found = read(tokenizer, text, split_reasoning=True, call_form=HERMES)
    assert (found.reasoning, found.text, len(found.tool_calls)) == ("Hm", "So.", 1)


def test_special_tokens_are_skipped_where_nothing_is_taken_apart(tokenizer: Tokenizer) -> None:
    assert read(tokenizer, f"<think>Hm{CALL}").text == 'Hm{"name": "f", "arguments": {}}'
