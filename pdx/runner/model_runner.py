"""Runs passes: inputs, the model, progress words, sampling. The rank's main thread."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from pdx.config.model import ModelConfig
from pdx.kernels.device_batch import host_arrays, on_device
from pdx.kernels.paged_batch import STEP_ROWS, PagedBatch
from pdx.kv.layout import KvLayout
from pdx.models.registry import CausalLM
from pdx.models.sharding import TpGroup
from pdx.request.batch import Batch, SampledToken, StepOutput
from pdx.runner.decode_graphs import DecodeGraphs, GraphSettings, capture_decode_graphs
from pdx.runner.device import RankDevice
from pdx.runner.device_sampler import draw_arrays, draw_tokens, to_tokens
from pdx.runner.drafting import Drafter
from pdx.runner.progress import Progress
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
        self._device = device or RankDevice.host()
        #: What :meth:`warm_up` captures; passes of a rank that drafts have two tokens a request.
        self._graph_settings = None if drafter is not None else graph_settings
        #: Of decode steps; None: all passes are launched op by op.
        self.graphs: DecodeGraphs | None = None
        #: int64: ids that no tokenizer knows (see ``pdx.config.token_ids``).
        self._tokenless_ids = torch.tensor(
            tokenless_ids, dtype=torch.int64, device=self._device.torch_device
        )
        self._requests = RequestTable(
            page_size=layout.page_size, num_pages=layout.num_pages, vocab_size=config.vocab_size
        )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """A token, and on a GPU a chunk, on scratch memory, to have first-use work behind us; then
        decode steps are captured. Publishes nothing; before the first pass.
        """
        scratch = torch.zeros_like(self._kv[:, :1], memory_format=torch.contiguous_format)
        lengths = (1, min(STEP_ROWS + 1, self._layout.page_size)) if scratch.is_cuda else (1,)
        for num_tokens in lengths:
            tokens = torch.arange(num_tokens)
            paged = PagedBatch.build(self._layout.page_size, [(0, num_tokens, [0])])
            arrays = self._arrays(tokens, tokens, paged, pass_base=0)
            hidden = self._forward(arrays, paged, scratch, lambda layer_idx: None)
            self._model.logits(hidden[-1:])
            if self._drafter is not None:
                batch = self._batch(paged, arrays)
                ids, positions = arrays["token_ids"], arrays["positions"]
                drafted = self._drafter.run(hidden, ids, positions, scratch, batch)
                self._drafter.likeliest(drafted[-1:])
            self._device.finish()
        if self._graph_settings is not None:
            self.graphs = capture_decode_graphs(
                *(self._model, self._kv, self._progress, self._tp, self._device),
                self._graph_settings,
            )

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepOutput:
        """Run one pass; the progress word rises with each layer's append, and at the end.

        Raises:
            InternalError: the batch does not fit what the rank knows, or the logits are not finite.
        """
        started = time.perf_counter()
        inputs, num_layers = self._requests.begin_pass(batch), self._layout.num_layers
        graphs = self.graphs if self.graphs is not None and self.graphs.hold(inputs) else None
        pass_base = batch.pass_idx * (num_layers + 1)
        arrays = self._pass_arrays(pass_base, inputs, is_captured=graphs is not None)
        self._progress.begin(pass_base, arrays["pass_base"])
        for page_idx, first_unused in inputs.zero_tails:
            self._kv[:, page_idx, :, :, first_unused:] = 0
        hidden = torch.empty(0)  # a rank without work still takes part in the count of passes
        if graphs is not None:
            hidden = graphs.run(inputs, pass_base)
        elif len(inputs.token_ids):
            hidden = self._forward(
                arrays, inputs.paged, self._kv, lambda layer: self._progress.publish(layer + 1)
            )
        if self._drafter is None:
            self._progress.publish(num_layers + 1)
        tokens = self._sample(hidden, inputs.draws, arrays)
        if self._drafter is not None:
            self._draft(self._drafter, batch.pass_idx, hidden, inputs)
            self._progress.publish(num_layers + 1)
        scores = score_prompts(hidden, self._logits, inputs.score_spans, self._vocab_size)
        self._device.finish()
        return StepOutput(
            pass_idx=batch.pass_idx,
            tokens=tokens,
            num_drafts=sum(step.draft_id is not None for step in inputs.steps),
            prompt_scores=scores,
            pass_s=time.perf_counter() - started,
        )

    def _pass_arrays(
        self, pass_base: int, inputs: PassInputs, *, is_captured: bool
    ) -> dict[str, Tensor]:
        """All that a pass reads, on the device; of a captured one what is behind its graph."""
        more = {}
        if self._device.staged and inputs.draws:
            more = draw_arrays(inputs.draws, self._vocab_size)
        if is_captured:
            return self._device.upload({"pass_base": torch.tensor([pass_base]), **more})
        return self._arrays(
            inputs.token_ids, inputs.positions, inputs.paged, pass_base=pass_base, more=more
        )

    def _arrays(
        self,
        token_ids: Tensor,
        positions: Tensor,
        paged: PagedBatch,
        *,
        pass_base: int,
        more: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        tables = host_arrays(paged) if self._device.staged else {}
        return self._device.upload(
            {
                "pass_base": torch.tensor([pass_base]),
                "token_ids": token_ids,
                "positions": positions,
                **tables,
                **(more or {}),
            }
        )

    def _forward(
        self,
        arrays: Mapping[str, Tensor],
        paged: PagedBatch,
        kv: Tensor,
        on_layer_kv_ready: Callable[[int], None],
    ) -> Tensor:
        batch = self._batch(paged, arrays)
        hidden: Tensor = self._model(
            arrays["token_ids"], arrays["positions"], kv, batch, on_layer_kv_ready
        )
        return hidden

    def _batch(self, paged: PagedBatch, arrays: Mapping[str, Tensor]) -> PagedBatch:
        return on_device(paged, arrays) if self._device.staged else paged

    def _draft(self, drafter: Drafter, pass_idx: int, hidden: Tensor, inputs: PassInputs) -> None:
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
        arrays = self._arrays(
            torch.tensor(next_ids, dtype=torch.int64),
            inputs.positions,
            inputs.paged,
            pass_base=pass_idx * (self._layout.num_layers + 1),
            more={"draft.rows": torch.tensor(list(rows.values()), dtype=torch.int64)},
        )
        batch = self._batch(inputs.paged, arrays)
        drafted = drafter.run(hidden, arrays["token_ids"], arrays["positions"], self._kv, batch)
        if rows:
            draft_ids = drafter.likeliest(drafted[arrays["draft.rows"]])
            for request_id, draft_id in zip(
                rows, self._device.download(draft_ids).tolist(), strict=True
            ):
                self._requests.set_draft(request_id, draft_id)

    def _sample(
        self, hidden: Tensor, draws: tuple[Draw, ...], arrays: Mapping[str, Tensor]
    ) -> list[SampledToken]:
        if not draws:
            return []
        draw_on = self._draw_on_device if self._device.staged else self._draw_on_host
        tokens, token_ids = draw_on(hidden, draws, arrays)
        standing: list[SampledToken] = []
        by_request = itertools.groupby(range(len(draws)), lambda idx: draws[idx].request_id)
        for request_id, group in by_request:
            places = list(group)
            drawn = [token_ids[idx] for idx in places]
            num_standing = self._requests.append_sampled(request_id, *drawn)
            standing += tokens[places[0] : places[0] + num_standing]  # of the leader's
        return standing

    def _draw_on_host(
        self, hidden: Tensor, draws: tuple[Draw, ...], arrays: Mapping[str, Tensor]
    ) -> tuple[list[SampledToken], list[int]]:
        """The leader's tokens, and on all ranks their ids."""
        logits = self._logits(hidden[torch.tensor([draw.row for draw in draws])])
        tokens = sample(logits, draws) if self._tp.rank == 0 else []
        token_ids = torch.tensor([t.token_id for t in tokens] or [0] * len(draws))
        return tokens, self._tp.from_leader(token_ids).tolist()

    def _draw_on_device(
        self, hidden: Tensor, draws: tuple[Draw, ...], arrays: Mapping[str, Tensor]
    ) -> tuple[list[SampledToken], list[int]]:
        """As on the host; the host waits once, for a single tensor."""
        logits = self._logits(hidden[arrays["draw.rows"]])
        if self._tp.rank != 0:
            ids = self._tp.from_leader(torch.zeros_like(arrays["draw.rows"]))
            return [], self._device.download(ids).tolist()
        num_tops = max(draw.sampling.logprobs or 0 for draw in draws)
        most = min(num_tops, self._vocab_size)
        drawn = draw_tokens(logits, arrays, most, self._model.ops)
        ids = self._tp.from_leader(drawn.token_ids)
        # Ids are exact in float64.
        columns = torch.cat([ids[:, None].double(), drawn.told], dim=1)
        rows = self._device.download(columns).tolist()
        token_ids = [int(row[0]) for row in rows]
        return to_tokens(token_ids, [row[1:] for row in rows], draws), token_ids

    def _logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> float32 [N, V], -inf for ids without a token: they are never drawn, and no
        probability is theirs.
        """
        logits: Tensor = self._model.logits(hidden)
        return logits.index_fill_(1, self._tokenless_ids, float("-inf"))
