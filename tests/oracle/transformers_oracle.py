"""transformers in float32 with its plain attention: what our tokens and logits must equal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

#: A first difference in greedy text passes only where the oracle itself was this undecided: matrix
#: shapes and the order of sums change the last bits.
TIE_GAP = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """Greedy text, and how clear each choice was (top logit minus the second)."""

    token_ids: list[int]
    gaps: list[float]

    def agrees_with(self, token_ids: list[int]) -> bool:
        """Whether the ids are equal up to a tie, after which the texts may part."""
        assert len(token_ids) == len(self.token_ids)
        for ours, theirs, gap in zip(token_ids, self.token_ids, self.gaps, strict=True):
            if ours != theirs:
                return gap < TIE_GAP
        return True


class Oracle:
    """One loaded checkpoint."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        # Tests share small machines, and more threads only wait for one another on a tiny model.
        torch.set_num_threads(1)
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        # It fills what is missing at random and only warns.
        assert not info["missing_keys"], info
        # It knows the layer that drafts by the number that it has in one model.
        drafts = f"model.layers.{model.config.num_hidden_layers}."
        unexpected = [key for key in info["unexpected_keys"] if not key.startswith(drafts)]
        assert not unexpected, unexpected
        self._model = model.eval()

    def save(self, folder: Path) -> None:
        """Write the model as this version of transformers does, in float32."""
        self._model.save_pretrained(folder)

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[T, V] of a whole sequence."""
        logits: torch.Tensor = self._model(torch.tensor([token_ids])).logits[0]
        return logits

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int) -> Continuation:
        """Continue without regard to EOS, one token a step over a cache."""
        token_ids: list[int] = []
        gaps: list[float] = []
        step, cache = prompt, None
        while len(token_ids) < num_tokens:
            out: Any = self._model(torch.tensor([step]), cache=cache, use_cache=True)
            cache = out.cache
            best = out.logits[0, -1].topk(2)
            token_ids.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            step = token_ids[-1:]
        return Continuation(token_ids=token_ids, gaps=gaps)
