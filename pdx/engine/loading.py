"""From a model folder and settings to a loaded rank: the first step of every node."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdx.config.engine import EngineConfig
from pdx.config.model import ModelConfig
from pdx.kv.geometry import kv_layout
from pdx.kv.layout import KvLayout
from pdx.kv.pages import PagePool
from pdx.messenger.fabric_hub import MappedMemory
from pdx.messenger.manifest import Manifest, model_id, text_id
from pdx.ranks.memory import RankMemory
from pdx.ranks.rank import RankProcess
from pdx.request.rank import RankConfig, RankLoading
from pdx.scheduler.scheduler import Scheduler, SchedulerLimits

__all__ = ["LoadedModel", "load_model", "mapped_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in a rank that is ready for batches."""

    folder: Path
    model: ModelConfig
    #: With every "auto" resolved.
    config: EngineConfig
    layout: KvLayout
    rank: RankProcess
    memory: RankMemory
    load_s: float

    @property
    def context_len(self) -> int:
        """Prompt and output tokens of one request, at most."""
        return min(
            self.model.max_position_embeddings, self.layout.num_pages * self.layout.page_size
        )

    def manifest(self) -> Manifest:
        """What peers compare. Reads the checkpoint's headers: milliseconds; call it once."""
        return Manifest(
            weights_id=model_id(self.folder),
            text_id=text_id(self.folder),
            num_layers=self.layout.num_layers,
            num_kv_heads=self.layout.num_kv_heads,
            head_dim=self.layout.head_dim,
            dtype=self.config.dtype,
            page_size=self.layout.page_size,
            tp_size=1,
            kv_layout="head-major",
            num_pages=self.layout.num_pages,
        )

    def scheduler(self) -> Scheduler:
        """A scheduler over a fresh pool of the rank's pages."""
        limits = SchedulerLimits(
            page_size=self.layout.page_size,
            chunk_len=self.config.chunk_len,
            max_num_seqs=self.config.max_num_seqs,
            reserve_output_len=self.config.reserve_output_len,
        )
        return Scheduler(limits, PagePool(self.layout.num_pages))

    async def close(self) -> None:
        """Stop the rank, then unmap its memory (no fabric may use it any more)."""
        await self.rank.stop()
        self.memory.close()


async def load_model(
    folder: Path, config: EngineConfig, on_loading: Callable[[RankLoading], None]
) -> LoadedModel:
    """Start the rank and load the model into it.

    Raises:
        PdxError: the checkpoint or the settings cannot be served, or the rank died.
    """
    model = ModelConfig.load(folder)
    if config.dtype == "auto":
        config = dataclasses.replace(config, dtype=model.dtype)
    rank = RankProcess()
    try:
        ready = await rank.start(
            RankConfig(
                model_folder=str(folder),
                device=config.device,
                dtype=config.dtype,
                page_size=config.page_size,
                num_pages=config.num_pages,
                kv_memory_bytes=config.kv_memory_bytes,
                num_threads=config.num_threads,
                chunk_len=config.chunk_len,
                poison=config.poison,
            ),
            on_loading,
        )
    except BaseException:
        await rank.stop()
        raise
    layout = kv_layout(model, config.page_size, ready.num_pages, config.dtype)
    assert rank.memory is not None and layout.total_bytes <= ready.kv_bytes
    return LoadedModel(
        folder=folder,
        model=model,
        config=config,
        layout=layout,
        rank=rank,
        memory=rank.memory,
        load_s=ready.load_s,
    )


def mapped_memory(loaded: LoadedModel) -> MappedMemory:
    """The rank's memory as the fabric hub wants it."""
    return MappedMemory(
        kv_address=loaded.memory.kv_address,
        kv_bytes=loaded.memory.kv_bytes,
        progress_address=loaded.memory.progress_address,
        progress_eventfd=loaded.memory.progress_eventfd,
    )
