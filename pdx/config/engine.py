"""What a node's ranks and scheduler need, resolved once and never changed."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from pdx.config.setting import parse_bytes, setting
from pdx.errors import ConfigError

__all__ = ["EngineConfig", "interprets_kernels", "parse_bytes", "runs_kernels"]

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_KV_DTYPES = ("auto", "bfloat16", "float8")
#: The largest batch of a captured decode step: in larger ones launches cost little.
_MAX_GRAPH_BATCH = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of the panels Model, KV cache and Scheduler."""

    device: str = setting(
        "cpu",
        "Device of the ranks: cpu, cuda, or cuda:N; a GPU each, from the first (or Nth) on.",
        key="device",
        section="model",
        metavar="NAME",
    )
    dtype: str = setting(
        "auto",
        "Type of weights and activations; auto is the checkpoint's.",
        key="dtype",
        section="model",
        choices=_DTYPES,
    )
    num_threads: int = setting(
        0,
        "CPU threads of a rank; 0 leaves the choice to torch.",
        key="threads",
        section="model",
        metavar="THREADS",
        minimum=0,
    )
    tp_size: int = setting(
        1,
        "Ranks that share the model's layers (tensor parallel), a process each.",
        key="tp",
        section="model",
        metavar="RANKS",
        minimum=1,
    )
    page_size: int = setting(
        16, "Tokens in a KV page.", key="page_size", section="kv", metavar="TOKENS", minimum=1
    )
    num_pages: int | None = setting(
        None,
        "Number of KV pages.",
        key="pages",
        section="kv",
        metavar="PAGES",
        minimum=1,
        unset="as many as --kv-memory holds",
    )
    kv_memory_bytes: int = setting(
        1 << 30,
        "Memory of each rank for KV pages, such as 512M or 4G.",
        key="kv_memory",
        section="kv",
        metavar="SIZE",
        minimum=1,
    )
    kv_dtype: str = setting(
        "auto",
        "Type of the KV cache; auto is --dtype, float8 is for GPUs of compute capability 9.0 on.",
        key="kv_dtype",
        section="kv",
        choices=_KV_DTYPES,
    )
    prefix_cache: bool = setting(
        True,
        "Keep pages of earlier requests, for requests that begin with the same tokens.",
        key="prefix_cache",
        section="kv",
    )
    poison: bool = setting(
        False, "Fill fresh KV memory with NaN (for tests).", key="poison", section="kv"
    )
    chunk_len: int = setting(
        512,
        "Prompt tokens in one forward pass.",
        key="chunk",
        section="scheduler",
        metavar="TOKENS",
        minimum=1,
    )
    max_num_seqs: int = setting(
        64,
        "Requests that hold pages at once.",
        key="max_seqs",
        section="scheduler",
        metavar="REQUESTS",
        minimum=1,
    )
    reserve_output_len: int = setting(
        256,
        "Output for which a request leases pages when it is admitted; more comes as it grows.",
        key="reserve_output",
        section="scheduler",
        metavar="TOKENS",
        minimum=1,
    )
    cuda_graphs: bool = setting(
        True,
        "GPU ranks capture decode steps as CUDA graphs at start, and replay them.",
        key="cuda_graphs",
        section="scheduler",
    )
    watchdog_s: float = setting(
        300.0,
        "A forward pass that takes longer is a hang: the node stops.",
        key="watchdog",
        section="scheduler",
        metavar="SECONDS",
        minimum=1,
    )

    #: Whether ranks load the model's layer that drafts, and use it. A command's own flag.
    drafts: bool = False

    def __post_init__(self) -> None:
        for name in ("page_size", "chunk_len", "max_num_seqs", "reserve_output_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_pages is not None and self.num_pages < 1:
            raise ConfigError(f"num_pages must be at least 1, not {self.num_pages}")
        if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", self.device):
            raise ConfigError(
                f"device {self.device!r} is not known", hint="use cpu, cuda or cuda:N"
            )
        if self.kv_dtype not in _KV_DTYPES:
            raise ConfigError(
                f"kv_dtype {self.kv_dtype!r} is not known", hint=f"use {' or '.join(_KV_DTYPES)}"
            )
        if self.dtype not in _DTYPES:
            raise ConfigError(
                f"dtype {self.dtype!r} is not known", hint=f"use {' or '.join(_DTYPES)}"
            )

    @property
    def graph_batch(self) -> int:
        """Requests of the largest decode step that GPU ranks capture; 0: they capture none."""
        return min(self.max_num_seqs, _MAX_GRAPH_BATCH) if self.cuda_graphs else 0

    @property
    def kv_type(self) -> str:
        """The type of the KV cache, once ``dtype`` is resolved."""
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

    def check_kv_type(self, *, interprets_kernels: bool) -> None:
        """Whether ranks can have such a KV cache; ``dtype`` is resolved. (Whether a GPU is new
        enough, its rank says.)

        Args:
            interprets_kernels: whether ranks on a CPU run the kernels of GPUs.

        Raises:
            ConfigError: they cannot.
        """
        if self.kv_dtype == "bfloat16" and self.dtype != "bfloat16":
            raise ConfigError(
                f"a KV cache in bfloat16 beside --dtype {self.dtype} is not served",
                hint="use --dtype bfloat16, or --kv-dtype auto",
            )
        if self.kv_dtype == "float8" and self.device == "cpu" and not interprets_kernels:
            raise ConfigError(
                "a KV cache in float8 is not served on a CPU, whose ops compute in --dtype",
                hint="use --kv-dtype auto, or --device cuda",
            )


def runs_kernels(device: str) -> bool:
    """Whether ranks on a device run the kernels of GPUs, and not a CPU's own ops."""
    return device != "cpu" or interprets_kernels()


def interprets_kernels() -> bool:
    """Whether ranks on a CPU run the kernels of GPUs: they have this process's environment."""
    return os.environ.get("PDX_KERNELS") == "interpret"
