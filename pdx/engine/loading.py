"""From a model folder and settings to loaded ranks: the first step of every node."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pdx.checkpoint.folder import Checkpoint
from pdx.checkpoint.model import ModelConfig
from pdx.checkpoint.weight_headers import read_weight_headers
from pdx.config.engine import EngineConfig
from pdx.engine.start_check import plan_node
from pdx.engine.step_loop import Ranks
from pdx.errors import CheckpointError, ConfigError
from pdx.fabric import MemoryPart
from pdx.host.memory import read_memory_facts
from pdx.host.memory_room import check_memory
from pdx.kv.geometry import node_layout
from pdx.kv.layout import NodeLayout
from pdx.kv.pages import PagePool
from pdx.messenger.fabric_hub import MappedMemory
from pdx.messenger.manifest import Manifest, model_id, text_id
from pdx.ranks.group import RankGroup
from pdx.ranks.memory import NodeMemory
from pdx.request.rank import RankConfig, RankLoading
from pdx.scheduler.scheduler import Scheduler, SchedulerLimits

__all__ = ["KvMemory", "LoadedModel", "load_model", "mapped_memory"]

logger = logging.getLogger(__name__)
_KV_LAYOUT = "head-major"


class KvMemory(Protocol):
    """The ranks' memory as this process addresses it (NodeMemory, or a simulation's)."""

    @property
    def progress_addresses(self) -> tuple[int, ...]: ...
    @property
    def progress_eventfds(self) -> tuple[int, ...]: ...
    def kv_parts(self) -> tuple[MemoryPart, ...]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in ranks that are ready for batches."""

    folder: Path
    #: The checkpoint's identity, for :class:`Manifest`.
    weights_id: str
    text_id: str
    model: ModelConfig
    #: With every "auto" resolved.
    config: EngineConfig
    layout: NodeLayout
    ranks: Ranks
    memory: KvMemory
    load_s: float

    @property
    def context_len(self) -> int:
        """Prompt and output tokens of one request, at most."""
        return min(
            self.model.max_position_embeddings,
            self.layout.rank.num_pages * self.layout.rank.page_size,
        )

    def manifest(self) -> Manifest:
        """What peers compare."""
        return Manifest(
            weights_id=self.weights_id,
            text_id=self.text_id,
            layer_groups=self.model.layer_groups(drafts=self.config.drafts),
            num_kv_heads=self.layout.num_kv_heads,
            head_dim=self.layout.rank.head_dim,
            dtype=self.config.dtype,
            page_size=self.layout.rank.page_size,
            tp_size=self.layout.tp_size,
            kv_layout=_KV_LAYOUT,
            num_pages=self.layout.rank.num_pages,
            kv_alignment=self.layout.alignment,
            num_parts=self.layout.rank.num_parts,
            kv_dtype=None if self.config.kv_type == self.config.dtype else self.config.kv_type,
        )

    def scheduler(self) -> Scheduler:
        """A scheduler over a fresh pool of the ranks' pages, which are alike."""
        limits = SchedulerLimits(
            page_size=self.layout.rank.page_size,
            chunk_len=self.config.chunk_len,
            max_num_seqs=self.config.max_num_seqs,
            reserve_output_len=self.config.reserve_output_len,
            drafts=self.config.drafts,
        )
        pool = PagePool(self.layout.rank.num_pages, self.layout.rank.group)
        return Scheduler(limits, pool, self._cache_root() if self.config.prefix_cache else None)

    def _cache_root(self) -> str:
        """What the KV cache of given tokens depends on, as text; equal on all hosts."""
        page_size = self.layout.rank.page_size
        types = f"{self.config.dtype} {self.config.kv_type}"
        return f"{self.weights_id} {types} {page_size} {_KV_LAYOUT}"

    async def close(self) -> None:
        """Stop the ranks, then unmap their memory (no fabric may use it any more)."""
        await self.ranks.stop()
        self.memory.close()


def _check_draft_layers(folder: Path, model: ModelConfig, config: EngineConfig) -> None:
    if not config.drafts:
        if model.num_draft_layers:
            logger.warning(
                "%s: %d layers that draft are checked and left on disk (pdx generate --draft "
                "uses one; nodes do not draft yet)",
                folder.name,
                model.num_draft_layers,
            )
        return
    if model.num_draft_layers != 1:
        raise ConfigError(
            f"--draft: {folder.name} has {model.num_draft_layers} layers that draft "
            "(num_nextn_predict_layers), and one is used",
            hint="leave out --draft",
        )


def _check_draft_tensors(checkpoint: Checkpoint) -> None:
    folder, model = checkpoint.folder, checkpoint.model
    first = f"model.layers.{model.num_layers}."
    if not any(name.startswith(first) for name in checkpoint.tensors):
        raise CheckpointError(
            f"--draft: {folder} has no tensors {first}*, the layer that drafts; its config.json "
            f"promises it (num_nextn_predict_layers is {model.num_draft_layers})",
            hint="leave out --draft, or download the weights again: some copies leave it out",
        )


async def load_model(
    folder: Path, config: EngineConfig, on_loading: Callable[[RankLoading], None]
) -> LoadedModel:
    """Start the ranks and load the model into them.

    Raises:
        PdxError: the checkpoint or the settings cannot be served, or a rank died.
    """
    model = ModelConfig.load(folder)
    _check_draft_layers(folder, model, config)
    checkpoint = Checkpoint.of(folder, model, read_weight_headers(folder))
    model = checkpoint.model
    for warning in checkpoint.warnings:
        logger.warning("%s: %s", folder.name, warning)
    if config.drafts:
        _check_draft_tensors(checkpoint)
    plan = plan_node(model, config)
    config = plan.config
    if (need := plan.host_memory()) is not None:
        check_memory(need, read_memory_facts())
    ranks = RankGroup(config.tp_size)
    try:
        ready = await ranks.start(
            RankConfig(
                model_folder=str(folder),
                device=config.device,
                dtype=config.dtype,
                page_size=config.page_size,
                num_pages=plan.num_pages,
                kv_memory_bytes=config.kv_memory_bytes,
                num_threads=config.num_threads or _threads_of_one(config.tp_size),
                chunk_len=config.chunk_len,
                poison=config.poison,
                kv_dtype=config.kv_type,
                drafts=config.drafts,
                graph_batch=config.graph_batch,
            ),
            on_loading,
        )
        if ready.graph_bytes is not None:
            logger.info(
                "decode steps of up to %d requests are captured, in %d MiB of each rank's GPU",
                config.graph_batch,
                ready.graph_bytes >> 20,
            )
        layout = node_layout(
            *(model, config.page_size, ready.num_pages, config.kv_type, config.tp_size),
            alignment=ready.kv_alignment,
            drafts=config.drafts,
        )
        assert layout.rank.total_bytes == ready.kv_bytes
        weights_id, written_id = model_id(folder), text_id(folder)
        memory = NodeMemory(ranks.descriptors, layout)
    except BaseException:
        await ranks.stop()
        raise
    return LoadedModel(
        folder=folder,
        weights_id=weights_id,
        text_id=written_id,
        model=model,
        config=config,
        layout=layout,
        ranks=ranks,
        memory=memory,
        load_s=ready.load_s,
    )


def _threads_of_one(tp_size: int) -> int:
    """Threads of each of several ranks on one CPU; 0 leaves the choice to torch."""
    return 0 if tp_size == 1 else max(1, len(os.sched_getaffinity(0)) // tp_size)


def mapped_memory(loaded: LoadedModel) -> MappedMemory:
    """The ranks' memory as the fabric hub wants it.

    Raises:
        PdxError: no network card can have it.
    """
    return MappedMemory(
        kv_parts=loaded.memory.kv_parts(),
        progress_addresses=loaded.memory.progress_addresses,
        progress_eventfds=loaded.memory.progress_eventfds,
    )
