"""A rank's runner with kernels for ops, in this process: PDX_KERNELS=interpret, or a GPU."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import torch

from pdx.checkpoint.model import ModelConfig
from pdx.kernels.graphs import GraphSettings
from pdx.kernels.ops import ops_for
from pdx.kernels.staging import Staging
from pdx.kv.geometry import kv_layout
from pdx.kv.layout import KvLayout
from pdx.models.registry import add_draft_layer, build_drafts, build_model
from pdx.models.sharding import LoneRank
from pdx.request.batch import RequestStep
from pdx.runner.device import RankDevice
from pdx.runner.drafting import Drafter
from pdx.runner.memory import ExportedKv, export_kv, export_progress
from pdx.runner.model_runner import ModelRunner
from pdx.runner.progress import Progress
from pdx.weights.load import load_parameters


def staged_cpu() -> RankDevice:
    """A CPU to which arrays are copied as they are to a GPU."""
    cpu = torch.device("cpu")
    return RankDevice(cpu, Staging(cpu))


@dataclass(frozen=True, kw_only=True)
class KernelRunner:
    """What a rank has, but for its channel."""

    runner: ModelRunner
    layout: KvLayout
    exported: ExportedKv
    kv: torch.Tensor
    progress: mmap.mmap


def kernel_runner(
    folder: Path,
    device: RankDevice,
    *,
    dtype: str = "float32",
    kv_device: torch.device | None = None,
    num_pages: int = 32,
    kv_dtype: str | None = None,
    drafts: bool = False,
    graph_settings: GraphSettings | None = None,
) -> KernelRunner:
    """A loaded model over poisoned pages of 16 tokens.

    Args:
        kv_device: where the KV memory is asked for, where that is not ``device``.
        kv_dtype: where it is not ``dtype``: "float8".
        drafts: whether the layer that drafts is used.
        graph_settings: for a runner that captures in its warm-up.
    """
    config = ModelConfig.load(folder)
    own = device.torch_device
    ops = ops_for(str(own))
    assert ops.keeps_float8
    drafter, left_on_disk = None, None
    with torch.device("meta"):
        model = build_model(config, ops)
        if drafts:
            layer = add_draft_layer(model, config, ops, LoneRank())
            drafter = Drafter(model, layer, LoneRank())
        else:
            left_on_disk = build_drafts(config, ops)
    torch_dtype = getattr(torch, dtype)
    load_parameters(
        *(model, folder, torch_dtype, lambda done, total: None, config.quantization),
        left_on_disk=left_on_disk,
        device=own,
        keeps_float8=ops.keeps_float8,
    )
    layout = kv_layout(config, 16, num_pages, kv_dtype or dtype, drafts=drafts)
    of_kv = torch_dtype
    if kv_dtype is not None:
        of_kv = torch.float8_e4m3fn if config.mla is None else torch.uint8
    exported, kv = export_kv(layout, of_kv, kv_device or own, poison=True)
    memory, eventfd = export_progress()
    progress = Progress(memory.mapping, eventfd, own, ops.publish)
    runner = ModelRunner(
        *(model.eval(), config, kv, layout, progress, LoneRank(), [3], device, drafter),
        graph_settings=graph_settings,
    )
    return KernelRunner(
        runner=runner, layout=layout, exported=exported, kv=kv, progress=memory.mapping
    )


def steps(num_tokens: int, new_pages: list[list[int]], *, sample: bool) -> list[RequestStep]:
    return [
        RequestStep(request_id=idx, num_tokens=num_tokens, new_page_indices=pages, sample=sample)
        for idx, pages in enumerate(new_pages)
    ]
