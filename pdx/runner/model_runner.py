"""Runs passes: inputs, the model, progress words, sampling. The rank's main thread."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pdx.checkpoint.model import ModelConfig
from pdx.kernels.batch import ForwardBatch
from pdx.kernels.graphs import AgreedCapture, CaptureRefused, DecodeGraphs, GraphSettings
from pdx.kv.layout import KvLayout
from pdx.kv.progress import base_value, end_step, layer_step
from pdx.models.registry import CausalLM
from pdx.models.sharding import TpGroup
from pdx.request.batch import Batch, SampledToken, StepOutput
from pdx.runner.device import RankDevice
from pdx.runner.drafting import Drafter
from pdx.runner.progress import Progress
from pdx.runner.prompt_scores import score_prompts
from pdx.runner.requests import Draw, PassInputs, RequestTable
from pdx.runner.sampling import draw_arrays, draw_tokens, to_tokens

__all__ = ["ModelRunner"]

logger = logging.getLogger(__name__)


class ModelRunner:
    """A loaded model, its KV memory and the requests that live in it."""

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        kv: Tensor,
        layout: KvLayout,
        progress: Progress,
        tp: TpGroup,
        tokenless_ids: Sequence[int] = (),
        device: RankDevice | None = None,
        drafter: Drafter | None = None,
        graph_settings: GraphSettings | None = None,
    ) -> None:
        self._tp = tp
        self._model = model
        self._kv = kv
        self._layout = layout
        self._vocab_size = config.vocab_size
        self._progress = progress
        #: None: no drafts; else the last of ``kv``'s layers is its.
        self._drafter = drafter
        self._device = device or RankDevice(torch.device("cpu"))
        #: What :meth:`warm_up` captures; passes of a rank that drafts have two tokens a request.
        self._graph_settings = None if drafter is not None else graph_settings
        #: Captured graphs of decode steps; None: all passes are launched op by op.
        self.graphs: DecodeGraphs | None = None
        #: Memory of the device that they take.
        self.graph_bytes: int | None = None
        #: int64: ids that no tokenizer knows (see ``pdx.checkpoint.token_ids``).
        self._tokenless_ids = torch.tensor(
            tokenless_ids, dtype=torch.int64, device=self._device.torch_device
        )
        #: Rows at most of a request that decodes: a token and its draft.
        self._decode_rows = 1 if drafter is None else 2
        self._requests = RequestTable(
            page_size=layout.page_size,
            num_pages=layout.num_pages,
            vocab_size=config.vocab_size,
            decode_rows=self._decode_rows,
        )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """A token, and on a GPU a chunk, on scratch memory, to have first-use work behind us; then
        decode steps are captured. Publishes nothing; before the first pass.
        """
        scratch = torch.zeros_like(self._kv[:, :1], memory_format=torch.contiguous_format)
        page_size, most = self._layout.page_size, self._decode_rows
        for num_tokens in (1, min(most + 1, page_size)) if scratch.is_cuda else (1,):
            requests = [(0, num_tokens, [0])]
            tokens = range(num_tokens)
            made = ForwardBatch.build(page_size, requests, decode_rows=most, token_ids=tokens)
            batch, _ = made.on(self._device.staging)
            hidden = self._forward(batch, scratch, lambda layer_idx: None)
            self._model.logits(hidden[-1:])
            if self._drafter is not None:
                self._drafter.likeliest(self._drafter.run(hidden, batch, scratch)[-1:])
            self._device.finish()
        if self._graph_settings is not None:
            self._capture(self._graph_settings)

    def _capture(self, settings: GraphSettings) -> None:
        """Graphs of the model's decode step over the KV memory, which stays as it is; none, and a
        line in the log, where no graph can hold it. All ranks of a group call this together, and
        all get graphs or none does. The progress word is 0 before and after.
        """
        device = self._device.torch_device

        def all_agree(is_captured: bool) -> bool:
            num_yes = self._tp.sum(torch.tensor([float(is_captured)], device=device))
            return int(num_yes) == self._tp.size

        def step(batch: ForwardBatch) -> Tensor:
            self._progress.begin(batch.progress_base)
            return self._forward(batch, self._kv, self._publish_layer)

        agreed = replace(settings, capture=AgreedCapture(settings.capture, all_agree))
        free_bytes = self._device.free_bytes()
        try:
            self.graphs = DecodeGraphs(
                step,
                agreed,
                page_size=self._layout.page_size,
                num_pages=self._layout.num_pages,
                device=device,
            )
            self.graph_bytes = max(0, free_bytes - self._device.free_bytes())
        except CaptureRefused as refusal:
            if self._tp.rank == 0:
                logger.warning("decode steps run without CUDA graphs: %s", refusal)
        self._progress.begin(torch.zeros(1, dtype=torch.int64, device=device))
        self._progress.publish(0)
        self._device.finish()

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepOutput:
        """Run one pass; the progress word rises with each layer's append, and at the end.

        Raises:
            InternalError: the batch does not fit what the rank knows, or the logits are not finite.
        """
        started = time.perf_counter()
        num_layers = self._layout.num_layers
        inputs = self._requests.begin_pass(batch, base_value(batch.pass_idx, num_layers))
        draws = draw_arrays(inputs.draws, self._vocab_size)
        graphs = self._graphs_for(inputs)
        if graphs is None:
            placed, arrays = inputs.batch.on(self._device.staging, draws)
        else:
            placed, arrays = graphs.place(inputs.batch), self._device.upload(draws)
        self._progress.begin(placed.progress_base)
        for page_idx, first_unused in inputs.zero_tails:
            self._kv[:, page_idx, :, :, first_unused:] = 0
        hidden = torch.empty(0)  # a rank without work still takes part in the count of passes
        if graphs is not None:
            hidden = graphs.replay(len(inputs.batch))
        elif len(placed):
            hidden = self._forward(placed, self._kv, self._publish_layer)
        if self._drafter is None:
            self._progress.publish(end_step(num_layers))
        tokens = self._sample(hidden, inputs.draws, arrays)
        if self._drafter is not None:
            self._draft(self._drafter, hidden, inputs)
            self._progress.publish(end_step(num_layers))
        scores = score_prompts(
            *(hidden, self._logits, self._model.ops.likeliest, inputs.score_spans),
            self._vocab_size,
        )
        self._device.finish()
        return StepOutput(
            pass_idx=batch.pass_idx,
            tokens=tokens,
            num_drafts=sum(step.draft_id is not None for step in inputs.steps),
            prompt_scores=scores,
            pass_s=time.perf_counter() - started,
        )

    def _graphs_for(self, inputs: PassInputs) -> DecodeGraphs | None:
        """Those that run a pass: all of its steps are one token, and nothing is scored."""
        if self.graphs is None or inputs.score_spans or not self.graphs.hold(inputs.batch):
            return None
        return self.graphs

    def _forward(
        self, batch: ForwardBatch, kv: Tensor, on_layer_kv_ready: Callable[[int], None]
    ) -> Tensor:
        hidden: Tensor = self._model(batch.token_ids, batch.positions, kv, batch, on_layer_kv_ready)
        return hidden

    def _publish_layer(self, layer_idx: int) -> None:
        self._progress.publish(layer_step(layer_idx))

    def _draft(self, drafter: Drafter, hidden: Tensor, inputs: PassInputs) -> None:
        """Behind a pass: KV of the layer that drafts, and drafts for the next one. A second copy to
        the device, and a second wait.
        """
        if not inputs.steps:
            return
        self._device.finish()  # what was copied before may be read until then
        next_ids = [i for step in inputs.steps for i in self._requests.next_ids(step)]
        rows = {
            step.request_id: row
            for step in inputs.steps
            if (row := self._requests.row_to_draft_from(step)) is not None
        }
        batch = replace(inputs.batch, token_ids=torch.tensor(next_ids, dtype=torch.int32))
        from_rows = {"rows": torch.tensor(list(rows.values()), dtype=torch.int64)}
        placed, arrays = batch.on(self._device.staging, from_rows)
        drafted = drafter.run(hidden, placed, self._kv)
        if rows:
            draft_ids = drafter.likeliest(drafted[arrays["rows"]])
            for request_id, draft_id in zip(
                rows, self._device.download(draft_ids).tolist(), strict=True
            ):
                self._requests.set_draft(request_id, draft_id)

    def _sample(
        self, hidden: Tensor, draws: tuple[Draw, ...], arrays: Mapping[str, Tensor]
    ) -> list[SampledToken]:
        if not draws:
            return []
        tokens, token_ids = self._draw(hidden, draws, arrays)
        standing: list[SampledToken] = []
        by_request = itertools.groupby(range(len(draws)), lambda idx: draws[idx].request_id)
        for request_id, group in by_request:
            places = list(group)
            drawn = [token_ids[idx] for idx in places]
            num_standing = self._requests.append_sampled(request_id, *drawn)
            standing += tokens[places[0] : places[0] + num_standing]  # of the leader's
        return standing

    def _draw(
        self, hidden: Tensor, draws: tuple[Draw, ...], arrays: Mapping[str, Tensor]
    ) -> tuple[list[SampledToken], list[int]]:
        """The leader's tokens, and on all ranks their ids. The host waits once, for one tensor."""
        logits = self._logits(hidden[arrays["draw.rows"]])
        if self._tp.rank != 0:
            ids = self._tp.from_leader(torch.zeros_like(arrays["draw.rows"]))
            return [], self._device.download(ids).tolist()
        num_tops = max(draw.sampling.logprobs or 0 for draw in draws)
        most = min(num_tops, self._vocab_size)
        drawn = draw_tokens(logits, arrays, most, self._model.ops)
        self._tp.from_leader(drawn.token_ids)
        tokens = to_tokens(self._device.download(drawn.report).tolist(), draws)
        return tokens, [token.token_id for token in tokens]

    def _logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> float32 [N, V], -inf for ids without a token: they are never drawn, and no
        probability is theirs.
        """
        logits: Tensor = self._model.logits(hidden)
        return logits.index_fill_(1, self._tokenless_ids, float("-inf"))
