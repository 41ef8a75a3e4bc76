"""A rank's decode step as captured graphs: passes whose steps are all one token. Main thread.

A graph freezes addresses: of weights, of KV memory, of the progress word. So it is captured when
all of these exist, in the rank's warm-up, and over the real ones. The invariant: **until a pass
with requests replays it, a graph changes nothing that a reader may see.** A capture runs the step,
but on padding alone, which has no page to append to; and with a base of 0, which makes the values
that it stores those of pass 0. Passes count from 1, so nobody waits for these (``kv/progress``);
the word is 0 again before the rank tells anyone where it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdx.kernels.device_batch import DeviceBatch
from pdx.kernels.step_graphs import (
    Captured,
    CaptureRefused,
    GraphCapture,
    StepBuffers,
    StepGraphs,
)
from pdx.models.decoder import CausalLM
from pdx.models.sharding import TpGroup
from pdx.runner.device import RankDevice
from pdx.runner.progress import Progress
from pdx.runner.requests import PassInputs

__all__ = [
    "CaptureOfAll",
    "DecodeGraphs",
    "GraphSettings",
    "batch_sizes",
    "capture_decode_graphs",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSettings:
    """What a rank captures, and how."""

    capture: GraphCapture
    #: Batch sizes; a batch between two of them is padded.
    sizes: Sequence[int]
    #: Tokens of one request at most; attention is launched for it.
    max_context_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGraphs:
    """The graphs of all sizes."""

    graphs: StepGraphs
    buffers: StepBuffers
    #: Memory of the device that they take.
    num_bytes: int

    def hold(self, inputs: PassInputs) -> bool:
        """Whether they run a pass: all steps are one token, and nothing is scored."""
        steps = inputs.steps
        return bool(steps) and not inputs.score_spans and self.buffers.hold(inputs.paged)

    def run(self, inputs: PassInputs, pass_base: int) -> Tensor:
        """A pass that they :meth:`hold` -> hidden states [T, H], which the next one overwrites."""
        return self.graphs.run(inputs.token_ids, inputs.positions, inputs.paged, pass_base)


def batch_sizes(max_batch: int) -> list[int]:
    """Powers of two below the largest, and the largest."""
    return [*(1 << i for i in range((max_batch - 1).bit_length())), max_batch]


def capture_decode_graphs(
    model: CausalLM,
    kv: Tensor,
    progress: Progress,
    tp: TpGroup,
    device: RankDevice,
    settings: GraphSettings,
) -> DecodeGraphs | None:
    """Graphs of the model's decode step over this KV memory; None, and a line in the log, where
    no graph can hold it. All ranks of a group call this together, and all get graphs or none does.

    Args:
        kv: [L, P, Hkv, parts, S, D]; stays as it is.
        progress: its word is 0 before and after.
    """
    num_pages, page_size, max_batch = kv.shape[1], kv.shape[4], max(settings.sizes)
    buffers = StepBuffers(
        max_batch=max_batch,
        # Requests may share pages, so that together they can have more than there are.
        max_pages=max_batch * min(num_pages, -(-settings.max_context_len // page_size)),
        max_context_len=settings.max_context_len,
        device=device.torch_device,
    )
    free_bytes = device.free_bytes()

    def step(token_ids: Tensor, positions: Tensor, batch: DeviceBatch) -> Tensor:
        hidden: Tensor = model(
            token_ids, positions, kv, batch, lambda layer_idx: progress.publish(layer_idx + 1)
        )
        return hidden

    progress.begin(0, buffers.pass_base)
    capture = CaptureOfAll(settings.capture, tp, device.torch_device)
    graphs = None
    try:
        graphs = StepGraphs(step, buffers, settings.sizes, capture)
    except CaptureRefused as refusal:
        if tp.rank == 0:
            logger.warning("decode steps run without CUDA graphs: %s", refusal)
    progress.publish(0)
    device.finish()
    if graphs is None:
        return None
    return DecodeGraphs(
        graphs=graphs, buffers=buffers, num_bytes=max(0, free_bytes - device.free_bytes())
    )


class CaptureOfAll:
    """Captures on all ranks of a group or on none: the sums within a graph wait for every rank."""

    def __init__(self, capture: GraphCapture, tp: TpGroup, device: torch.device) -> None:
        self._capture = capture
        self._tp = tp
        self._device = device

    def capture(self, run: Callable[[], Tensor]) -> Captured:
        """See :class:`GraphCapture`."""
        captured, refusal = None, CaptureRefused("another rank could not capture them")
        try:
            captured = self._capture.capture(run)
        except CaptureRefused as error:
            refusal = error
        num_captured = self._tp.sum(
            torch.tensor([float(captured is not None)], device=self._device)
        )
        if captured is None or int(num_captured) < self._tp.size:
            raise refusal
        return captured
