"""transformers in float32 with its plain attention: what our tokens and logits must equal."""

from __future__ import annotations

import unittest.mock
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
    def hidden_states(self, token_ids: list[int]) -> list[torch.Tensor]:
        """[T, H] each: after the embedding, each layer but the last, and the final norm."""
        out = self._model(torch.tensor([token_ids]), output_hidden_states=True)
        return [state[0] for state in out.hidden_states]

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

    def first_draft(self, prompt: list[int]) -> tuple[int, torch.Tensor]:
        """The token after the prompt, and the logits [V] of the one that the layer behind the last
        drafts to follow it.
        """
        from transformers.generation.candidate_generator import MTPCandidateGenerator

        layer = self._model.config.num_hidden_layers
        # It knows the layer by the number that it has in one model.
        self._model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layer}\."]
        drafted: list[torch.Tensor] = []
        plain = MTPCandidateGenerator.get_candidates

        def watched(generator: Any, *args: Any, **kwargs: Any) -> Any:
            candidates = plain(generator, *args, **kwargs)
            if candidates[1] is not None:
                drafted.append(candidates[1][0, 0].float())
            return candidates

        with unittest.mock.patch.object(MTPCandidateGenerator, "get_candidates", watched):
            ids = self._model.generate(
                torch.tensor([prompt]), max_new_tokens=3, do_sample=False, use_mtp=True
            )
        return int(ids[0, len(prompt)]), drafted[0]
