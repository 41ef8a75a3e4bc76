"""Runs passes: inputs, the model, progress words, sampling. The rank's main thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pdx.config.model import ModelConfig
from pdx.kernels.cpu.progress import ProgressWord
from pdx.kernels.paged_batch import PagedBatch
from pdx.kv.layout import KvLayout
from pdx.kv.progress import end_value, layer_value
from pdx.models.registry import CausalLM
from pdx.models.sharding import TpGroup
from pdx.request.batch import Batch, SampledToken, StepOutput
from pdx.runner.memory import kv_tensor
from pdx.runner.prompt_scores import score_prompts
from pdx.runner.requests import Draw, PassInputs, RequestTable
from pdx.runner.sampler import sample

__all__ = ["ModelRunner"]


class ModelRunner:
    """A loaded model, its KV memory and the requests that live in it."""

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        kv: Tensor,
        layout: KvLayout,
        progress: ProgressWord,
        tp: TpGroup,
        tokenless_ids: Sequence[int] = (),
    ) -> None:
        self._tp = tp
        self._model = model
        self._kv = kv
        self._layout = layout
        self._vocab_size = config.vocab_size
        self._progress = progress
        #: int64: ids that no tokenizer knows (see ``pdx.config.token_ids``).
        self._tokenless_ids = torch.tensor(tokenless_ids, dtype=torch.int64)
        self._requests = RequestTable(
            page_size=layout.page_size, num_pages=layout.num_pages, vocab_size=config.vocab_size
        )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """One token on scratch memory, to have first-use work behind us. Publishes nothing."""
        scratch = kv_tensor(
            bytearray(self._layout.total_bytes // self._layout.num_pages),
            _with_one_page(self._layout),
            self._kv.dtype,
        )
        token = torch.zeros(1, dtype=torch.int64)
        paged = PagedBatch.build(self._layout.page_size, [(0, 1, [0])])
        hidden = self._model(token, token, scratch, paged, lambda layer_idx: None)
        self._model.logits(hidden)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepOutput:
        """Run one pass; the progress word rises with each layer's append, and at the end.

        Raises:
            InternalError: the batch does not fit what the rank knows, or the logits are not finite.
        """
        started = time.perf_counter()
        inputs = self._requests.begin_pass(batch)
        for page_idx, first_unused in inputs.zero_tails:
            self._kv[:, page_idx, :, :, first_unused:] = 0
        hidden = self._run_model(inputs, self._publisher(batch.pass_idx))
        self._progress.publish(end_value(batch.pass_idx, self._layout.num_layers))
        tokens = self._sample(hidden, inputs.draws)
        scores = score_prompts(hidden, self._logits, inputs.score_spans, self._vocab_size)
        return StepOutput(
            pass_idx=batch.pass_idx,
            tokens=tokens,
            prompt_scores=scores,
            pass_s=time.perf_counter() - started,
        )

    def _sample(self, hidden: Tensor, draws: tuple[Draw, ...]) -> list[SampledToken]:
        if not draws:
            return []
        rows = torch.tensor([draw.row for draw in draws])
        logits = self._logits(hidden[rows])
        tokens = sample(logits, draws) if self._tp.rank == 0 else []
        token_ids = torch.tensor([t.token_id for t in tokens] or [0] * len(draws))
        for draw, token_id in zip(draws, self._tp.from_leader(token_ids).tolist(), strict=True):
            self._requests.append_sampled(draw.request_id, token_id)
        return tokens

    def _logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> float32 [N, V], -inf for ids without a token: they are never drawn, and no
        probability is theirs.
        """
        logits: Tensor = self._model.logits(hidden)
        return logits.index_fill_(1, self._tokenless_ids, float("-inf"))

    def _run_model(self, inputs: PassInputs, on_layer_kv_ready: Callable[[int], None]) -> Tensor:
        if not len(inputs.token_ids):
            return torch.empty(0)  # a rank without work still takes part in the count of passes
        hidden: Tensor = self._model(
            inputs.token_ids, inputs.positions, self._kv, inputs.paged, on_layer_kv_ready
        )
        return hidden

    def _publisher(self, pass_idx: int) -> Callable[[int], None]:
        num_layers = self._layout.num_layers

        def publish(layer_idx: int) -> None:
            self._progress.publish(layer_value(pass_idx, layer_idx, num_layers))

        return publish


def _with_one_page(layout: KvLayout) -> KvLayout:
    return KvLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        page_size=layout.page_size,
        num_pages=1,
        itemsize=layout.itemsize,
        num_parts=layout.num_parts,
    )
