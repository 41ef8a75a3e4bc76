"""Greedy answers of transformers to a few prompts, in fp32: what pdx must give, token for token.

    python models/smollm2-135m-instruct/golden.py        rewrites golden.json beside this file

Runs in a shell or a test; needs transformers. The weights are stored in bf16 and computed in fp32:
in bf16 the texts part after a few tokens, whichever engine computes them.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

__all__ = ["GOLDEN", "QUESTIONS", "TEXTS", "Oracle"]

GOLDEN = Path(__file__).with_name("golden.json")
#: Asked through the chat template.
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Are dogs real?",
)
#: Continued as they are.
TEXTS = ("The capital of France is", "Once upon a time, there was a little")
MAX_TOKENS = 64


class Oracle:
    """transformers' model and tokenizer of one folder, fp32, eager attention."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def chat_ids(self, question: str) -> list[int]:
        """Token ids of a one-question chat."""
        messages = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self.text_ids(text)

    def text_ids(self, text: str) -> list[int]:
        """Token ids of a text; nothing is put in front."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    @torch.inference_mode()
    def answer(self, prompt_ids: list[int], max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
        """The greedy continuation, and the smallest gap between the two best logits on its way."""
        prompt = torch.tensor([prompt_ids])
        out = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=max_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
        ids = out.sequences[0, len(prompt_ids) :].tolist()
        best = torch.topk(torch.cat(out.logits), 2).values
        gap = float((best[:, 0] - best[:, 1]).min())
        return {
            "prompt_ids": prompt_ids,
            "greedy_ids": ids,
            "text": self.tokenizer.decode(ids, skip_special_tokens=True),
            "min_gap": round(gap, 4),
        }


def main() -> None:
    """Command line: writes golden.json."""
    path = Path(__file__).with_name("convert.py")
    spec = importlib.util.spec_from_file_location("smollm2_convert", path)
    assert spec is not None
    assert spec.loader is not None
    convert = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(convert)
    oracle = Oracle(convert.ensure_model())
    cases = [{"question": text, **oracle.answer(oracle.chat_ids(text))} for text in QUESTIONS]
    cases += [{"prompt": text, **oracle.answer(oracle.text_ids(text))} for text in TEXTS]
    with GOLDEN.open("w", encoding="utf-8") as file:
        json.dump({"compute": "float32", "cases": cases}, file, indent=None, ensure_ascii=False)
        file.write("\n")
    for case in cases:
        print(f"{case['min_gap']:8.4f}  {case['text']!r}", file=sys.stderr)


if __name__ == "__main__":
    main()
