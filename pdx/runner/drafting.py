"""A rank's drafts, by the model's own layer that drafts (multi-token prediction). Main thread.

Behind a pass the layer runs over the pass's rows, each with the token that follows it, which is
known by then: from the prompt, or sampled. So its KV, the last layer of the pages, is as far as the
others', and no hidden state is kept between passes. What it makes of a request's last row is the
draft that the request's next step feeds behind its token. A draft never changes a text, only how
many passes it takes: ``pdx.kernels.reference.verify_drafts`` says which tokens stand.

Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", sections 2.2 and 5.4.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdx.kernels.batch import ForwardBatch
from pdx.models.decoder import CausalLM, LayerPass
from pdx.models.registry import DraftLayer
from pdx.models.sharding import TpGroup

__all__ = ["Drafter"]


class Drafter:
    """The layer with what it borrows from its model."""

    def __init__(self, model: CausalLM, layer: DraftLayer, tp: TpGroup) -> None:
        self._model = model
        self._layer = layer
        self._tp = tp

    def run(self, hidden: Tensor, batch: ForwardBatch, kv: Tensor) -> Tensor:
        """The layer over the rows of a pass; its KV is appended.

        Args:
            hidden: [T, H], of the model's final norm.
            batch: that of the pass, but its ``token_ids`` are those that follow each row; any where
                none is known.
            kv: [L + 1, P, ...], this layer's last.

        Returns:
            [T, H], for :meth:`likeliest`.
        """
        layer_pass = LayerPass(
            cos_sin=self._model.model.rotary(batch.positions),
            kv=kv[-1],
            batch=batch,
            on_kv_ready=lambda: None,
        )
        return self._layer.draft(hidden, batch.token_ids, layer_pass)

    def likeliest(self, drafted: Tensor) -> Tensor:
        """[N, H] of :meth:`run` -> int64 [N]: a token each, the same on all ranks."""
        logits = self._model.logits(drafted, self._layer.head)
        return self._tp.from_leader(torch.argmax(logits, dim=-1))
