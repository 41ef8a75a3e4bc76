"""Messages between the primary and a rank besides batches: configuration, loading, readiness,
failure.

One UNIX stream socketpair per rank. The primary sends :class:`RankConfig` first; the rank answers
any number of :class:`RankLoading`, then one :class:`RankReady` whose frame is followed by one byte
that carries three descriptors (SCM_RIGHTS): the KV memory, the progress memory, the progress
eventfd. From then on batches go down and outputs come up. The rank ends when the socket closes.
"""

from __future__ import annotations

import mmap

import msgspec

from pdx.request.batch import Batch, StepOutput

__all__ = [
    "FromRank",
    "RankConfig",
    "RankFailed",
    "RankLoading",
    "RankReady",
    "ToRank",
]


class RankConfig(msgspec.Struct, frozen=True, kw_only=True, tag="config"):
    """Everything a rank needs to load its share of the model."""

    #: A local Hugging Face folder.
    model_folder: str
    device: str
    #: "float32", "bfloat16" or "float16": weights and activations.
    dtype: str
    page_size: int
    #: KV pages; None: as many as ``kv_memory_bytes`` holds. Both of one rank.
    num_pages: int | None
    kv_memory_bytes: int
    #: torch's intra-op threads; 0 leaves torch's default.
    num_threads: int
    #: Largest number of tokens in one prefill chunk (for sizing buffers).
    chunk_len: int
    #: Fill fresh KV memory with NaN, so that a read of what nobody wrote shows.
    poison: bool
    #: This rank's place among the ranks that share the model's layers; 0 leads.
    tp_rank: int = 0
    tp_size: int = 1
    #: A file that does not exist yet, for the ranks to find each other.
    rendezvous: str = ""
    #: The type of the KV memory: as ``dtype``, or "float8"; None: ``dtype``.
    kv_dtype: str | None = None
    #: Load the model's layer that drafts as well, and feed its drafts where steps allow it.
    drafts: bool = False
    #: Requests of the largest decode step that a rank on a GPU captures as a CUDA graph; 0: none.
    graph_batch: int = 0

    @property
    def kv_type(self) -> str:
        """The type of the KV memory."""
        return self.kv_dtype or self.dtype


class RankLoading(msgspec.Struct, frozen=True, kw_only=True, tag="loading"):
    """Progress of loading, for a progress bar."""

    done_bytes: int
    total_bytes: int


class RankReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The rank can run batches. Descriptors follow (see the module's docstring)."""

    num_pages: int
    kv_bytes: int
    load_s: float
    #: The GPU that holds the KV memory; None: it is the host's.
    cuda_device: int | None = None
    #: What the KV memory's size was rounded up to a multiple of.
    kv_alignment: int = mmap.PAGESIZE
    #: Memory that captured decode steps take on the GPU; None: there are none.
    graph_bytes: int | None = None


class RankFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The rank cannot go on and exits. ``kind`` is the error class's name in pdx.errors."""

    kind: str
    message: str
    hint: str | None = None
    traceback: str


ToRank = RankConfig | Batch
FromRank = RankLoading | RankReady | RankFailed | StepOutput
