"""The life of a rank: configuration, loading, export of its memory, then batches to the end."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pdx.config.model import ModelConfig
from pdx.config.token_ids import ids_without_token
from pdx.errors import ConfigError
from pdx.kernels.ops import ops_for
from pdx.kv.geometry import kv_layout, num_pages_in
from pdx.kv.layout import KvLayout
from pdx.models.registry import CausalLM, build_drafts, build_model
from pdx.models.sharding import TpGroup
from pdx.request.rank import RankConfig, RankLoading, RankReady
from pdx.runner.channel import Channel
from pdx.runner.collectives import join_group
from pdx.runner.memory import export_kv, export_progress
from pdx.runner.model_runner import ModelRunner
from pdx.weights.load import load_parameters

__all__ = ["serve"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Seconds between two reports of loading; the last one is always sent.
_REPORT_INTERVAL_S = 0.05


def serve(channel: Channel) -> None:
    """Be a rank. Ends by SystemExit (raised by the channel) when the primary closes the socket."""
    config = channel.receive_config()
    started = time.perf_counter()
    if config.num_threads > 0:
        torch.set_num_threads(config.num_threads)
    folder = Path(config.model_folder)
    model_config = ModelConfig.load(folder)
    tokenless_ids = ids_without_token(folder, model_config.vocab_size)
    layout = _layout(config, model_config)
    tp = join_group(config)
    model = _load(config, model_config, tp, _reporter(channel))
    exported, kv = export_kv(layout, _DTYPES[config.dtype], _device(config), poison=config.poison)
    progress_memory, eventfd, progress = export_progress()
    runner = ModelRunner(model, model_config, kv, layout, progress, tp, tokenless_ids)
    runner.warm_up()
    # What is loaded stays: the collector need not look at it again in the middle of a pass.
    gc.collect()
    gc.freeze()
    load_s = time.perf_counter() - started
    channel.send(
        RankReady(
            num_pages=layout.num_pages,
            kv_bytes=layout.total_bytes,
            load_s=load_s,
            cuda_device=exported.cuda_device,
            kv_alignment=exported.alignment,
        )
    )
    channel.send_descriptors([exported.fd, progress_memory.fd, eventfd])
    while True:
        channel.send(runner.execute(channel.receive_batch()))


def _device(config: RankConfig) -> torch.device:
    """This rank's own: from a node's first GPU on, each rank has the next one."""
    device = torch.device(config.device)
    if device.type == "cpu":
        return device
    return torch.device(device.type, (device.index or 0) + config.tp_rank)


def _layout(config: RankConfig, model_config: ModelConfig) -> KvLayout:
    num_pages = config.num_pages
    if num_pages is None:
        num_pages = num_pages_in(
            model_config, config.page_size, config.kv_memory_bytes, config.dtype, config.tp_size
        )
        if num_pages == 0:
            raise ConfigError(
                f"{config.kv_memory_bytes} bytes of KV memory hold no page of "
                f"{config.page_size} tokens",
                hint="give the KV cache more memory, or use smaller pages",
            )
    return kv_layout(model_config, config.page_size, num_pages, config.dtype, config.tp_size)


def _load(
    config: RankConfig,
    model_config: ModelConfig,
    tp: TpGroup,
    on_progress: Callable[[int, int], None],
) -> CausalLM:
    ops = ops_for(config.device)
    # Parameters are made without memory, so that the model is in memory once, not twice.
    with torch.device("meta"):
        model = build_model(model_config, ops, tp)
        drafts = build_drafts(model_config, ops, tp)
    load_parameters(
        model,
        Path(config.model_folder),
        _DTYPES[config.dtype],
        on_progress,
        model_config.quantization,
        left_on_disk=drafts,
    )
    return model.eval()


def _reporter(channel: Channel) -> Callable[[int, int], None]:
    last_s = 0.0

    def report(done_bytes: int, total_bytes: int) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if done_bytes == total_bytes or now_s - last_s >= _REPORT_INTERVAL_S:
            last_s = now_s
            channel.send(RankLoading(done_bytes=done_bytes, total_bytes=total_bytes))

    return report
