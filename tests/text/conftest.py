"""Small real tokenizers, trained here: byte-level BPE (as SmolLM2, Llama 3, Qwen, DeepSeek) and
byte-fallback BPE (as Llama 2)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from pdx.text.tokenizer import Tokenizer

CORPUS = [
    "The capital of France is Paris. Numbers: 12345 67.89",
    "def f(x):\n    return x  # comment\t\ttabs",
    "日本語のテキスト、中文文本，한국어 텍스트",
    "Emoji 🙂🎉👩‍👩‍👧‍👦 café naïve e\u0301",
    "العربية हिन्दी ไทย",
] * 4


def byte_level(vocab_size: int = 480) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(CORPUS, trainer)
    # Not special, as Qwen's <think>; the second has characters outside the byte alphabet.
    inner.add_tokens(["<think>", "two words 語"])
    return inner


def byte_fallback() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    inner.train_from_iterator([text.replace(" ", "▁") for text in CORPUS[:2]], trainer)
    # The trainer marks all of them as special; in Llama's file the byte tokens are ordinary ones.
    parsed = json.loads(inner.to_str())
    parsed["added_tokens"] = [t for t in parsed["added_tokens"] if t["id"] < 3]
    inner = tokenizers.Tokenizer.from_str(json.dumps(parsed))
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return inner


@pytest.fixture(scope="session", params=["byte_level", "byte_fallback"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    inner = {"byte_level": byte_level, "byte_fallback": byte_fallback}[request.param]()
    folder: Path = tmp_path_factory.mktemp(request.param)
    inner.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)
