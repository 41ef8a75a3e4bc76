"""The life of a rank: configuration, loading, export of its memory, then batches to the end."""

from __future__ import annotations

import errno
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from pdx.checkpoint.folder import with_stored_head
from pdx.checkpoint.model import ModelConfig
from pdx.checkpoint.token_ids import ids_without_token
from pdx.checkpoint.weight_headers import read_weight_headers
from pdx.errors import ConfigError, WorkerError
from pdx.kernels.graphs import CudaGraphs, GraphSettings, batch_sizes
from pdx.kernels.kv_view import check_float8
from pdx.kernels.ops import Ops, ops_for
from pdx.kv.geometry import kv_layout, num_pages_of
from pdx.kv.layout import KvLayout
from pdx.models.registry import CausalLM, add_draft_layer, build_drafts, build_model
from pdx.models.sharding import TpGroup
from pdx.request.rank import RankConfig, RankLoading, RankReady
from pdx.runner.channel import Channel
from pdx.runner.collectives import join_group
from pdx.runner.device import RankDevice, open_device
from pdx.runner.drafting import Drafter
from pdx.runner.memory import export_kv, export_progress
from pdx.runner.model_runner import ModelRunner
from pdx.runner.progress import Progress
from pdx.weights.load import load_parameters

__all__ = ["check_weights", "graph_settings", "serve"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FLOAT8 = "float8"
#: Seconds between two reports of loading; the last one is always sent.
_REPORT_INTERVAL_S = 0.05


def serve(channel: Channel) -> None:
    """Be a rank. Ends by SystemExit (raised by the channel) when the primary closes the socket."""
    config = channel.receive_config()
    started = time.perf_counter()
    if config.num_threads > 0:
        torch.set_num_threads(config.num_threads)
    folder = Path(config.model_folder)
    model_config = with_stored_head(ModelConfig.load(folder), read_weight_headers(folder))
    tokenless_ids = ids_without_token(folder, model_config.vocab_size)
    layout = _layout(config, model_config)
    ops = ops_for(config.device)
    device = open_device(config)
    kv_dtype = _kv_dtype(config, model_config, ops)
    if config.device != "cpu":
        check_weights(model_config, torch.cuda.get_device_capability())
    tp = join_group(config, device.torch_device)
    with _told_of_memory(device):
        model, drafter = _load(config, model_config, ops, tp, device, _reporter(channel))
        device.check_room("KV memory", layout.total_bytes)
        exported, kv = export_kv(layout, kv_dtype, device.torch_device, poison=config.poison)
        progress_memory, eventfd = export_progress()
        progress = Progress(progress_memory.mapping, eventfd, device.torch_device, ops.publish)
        runner = ModelRunner(
            *(model, model_config, kv, layout, progress, tp, tokenless_ids, device, drafter),
            graph_settings=graph_settings(config, model_config, layout, device),
        )
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
            graph_bytes=runner.graph_bytes,
        )
    )
    channel.send_descriptors([exported.fd, progress_memory.fd, eventfd])
    while True:
        batch = channel.receive_batch()
        with _told_of_memory(device):
            output = runner.execute(batch)
        channel.send(output)


@contextmanager
def _told_of_memory(device: RankDevice) -> Iterator[None]:
    """Memory that is not given is no bug of ours.

    Raises:
        WorkerError: in place of torch's or the system's error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise WorkerError(
            f"{device.torch_device} is out of memory: {error}",
            hint="give the KV cache less memory (--kv-memory), prompts shorter chunks (--chunk), "
            "or decode steps no graphs (--no-cuda-graphs)",
        ) from error
    except (MemoryError, OSError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise WorkerError(
            f"the system gives a rank no more memory: {error}",
            hint="free memory, or give the KV cache less (--kv-memory), prompts shorter chunks "
            "(--chunk); limits are those of the host, of cgroups and of ulimit -v",
        ) from error


def _is_out_of_memory(error: Exception) -> bool:
    """torch raises a RuntimeError of its own words where the host has none."""
    is_refused = isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EFBIG)
    return isinstance(error, MemoryError) or is_refused or "can't allocate memory" in str(error)


def _layout(config: RankConfig, model_config: ModelConfig) -> KvLayout:
    num_pages = num_pages_of(
        model_config,
        config.page_size,
        config.num_pages,
        config.kv_memory_bytes,
        config.kv_type,
        config.tp_size,
        drafts=config.drafts,
    )
    return kv_layout(
        *(model_config, config.page_size, num_pages, config.kv_type, config.tp_size),
        drafts=config.drafts,
    )


def graph_settings(
    config: RankConfig, model_config: ModelConfig, layout: KvLayout, device: RankDevice
) -> GraphSettings | None:
    """What a rank captures; None: nothing. The same on all ranks of a group: they are on GPUs and
    sum with NCCL, or all on a CPU and sum with gloo, which no graph can hold.
    """
    if device.torch_device.type != "cuda" or not config.graph_batch:
        return None
    return GraphSettings(
        capture=CudaGraphs(),
        sizes=batch_sizes(config.graph_batch),
        max_seq_len=min(model_config.max_position_embeddings, layout.num_pages * layout.page_size),
    )


def _kv_dtype(config: RankConfig, model_config: ModelConfig, ops: Ops) -> torch.dtype:
    """The type of the KV tensor. A latent's record holds several types, so it is bytes.

    Raises:
        ConfigError: the ops, or the GPU, cannot compute with it.
    """
    if config.kv_type != _FLOAT8:
        return _DTYPES[config.kv_type]
    if not ops.keeps_float8:
        raise ConfigError(
            "a KV cache in float8 is not served on a CPU, whose ops compute in --dtype",
            hint="use --kv-dtype auto, or --device cuda",
        )
    if config.device != "cpu":
        check_float8(torch.cuda.get_device_capability())
    return torch.uint8 if model_config.mla is not None else torch.float8_e4m3fn


def check_weights(model_config: ModelConfig, capability: tuple[int, int]) -> None:
    """Before a GPU rank loads for minutes what its kernels do not compile for.

    Raises:
        ConfigError: weights are in float8, and the GPU is older than sm_90.
    """
    if model_config.quantization is None:
        return
    check_float8(
        capability,
        "a checkpoint with float8 weights",
        "take one in bfloat16, or use --device cpu, which dequantises the weights",
    )


def _load(
    config: RankConfig,
    model_config: ModelConfig,
    ops: Ops,
    tp: TpGroup,
    device: RankDevice,
    on_progress: Callable[[int, int], None],
) -> tuple[CausalLM, Drafter | None]:
    # Parameters are made without memory, so that the model is in memory once, not twice.
    drafter, left_on_disk = None, None
    with torch.device("meta"):
        model = build_model(model_config, ops, tp)
        if config.drafts:
            drafter = Drafter(model, add_draft_layer(model, model_config, ops, tp), tp)
        else:
            left_on_disk = build_drafts(model_config, ops, tp)
    load_parameters(
        model,
        Path(config.model_folder),
        _DTYPES[config.dtype],
        on_progress,
        model_config.quantization,
        left_on_disk=left_on_disk,
        device=device.torch_device,
        check_room=lambda num_bytes: device.check_room("weights", num_bytes),
        keeps_float8=ops.keeps_float8,
    )
    return model.eval(), drafter


def _reporter(channel: Channel) -> Callable[[int, int], None]:
    last_s = 0.0

    def report(done_bytes: int, total_bytes: int) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if done_bytes == total_bytes or now_s - last_s >= _REPORT_INTERVAL_S:
            last_s = now_s
            channel.send(RankLoading(done_bytes=done_bytes, total_bytes=total_bytes))

    return report
