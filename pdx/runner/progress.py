"""How a pass says which layers' KV is in memory. The rank's main thread.

What the word's values mean stands in ``pdx.kv.progress``. A CPU rank stores it itself; where the
ops are kernels, a kernel does, behind the append in the stream's order.
"""

from __future__ import annotations

import mmap
import os
from typing import Protocol

import torch
from torch import Tensor

from pdx.errors import WorkerError
from pdx.kernels.cpu.progress import ProgressWord
from pdx.kv.progress import PROGRESS_BYTES

__all__ = ["HostProgress", "KernelProgress", "Progress"]


class Progress(Protocol):
    """A rank's progress word."""

    def begin(self, base: int, base_on_device: Tensor) -> None:
        """A pass begins; the values of its steps are ``base`` + step.

        Args:
            base_on_device: int64 [1], the same number; it stays there until the pass has ended.
        """

    def publish(self, step: int) -> None:
        """All that was begun so far will be in memory when the word has this value."""


class HostProgress:
    """Stored at once, with a wake-up for the readers."""

    def __init__(self, word: ProgressWord) -> None:
        self._word = word
        self._base = 0

    def begin(self, base: int, base_on_device: Tensor) -> None:
        self._base = base

    def publish(self, step: int) -> None:
        self._word.publish(self._base + step)


class KernelProgress:
    """Stored by a kernel. Nothing wakes the readers, who look while they expect something; but
    where the kernel is interpreted, it has stored when it returns, and the readers sleep.
    """

    def __init__(self, memory: mmap.mmap, eventfd: int, device: torch.device) -> None:
        """
        Args:
            memory: shared with the readers; outlives this object.
            eventfd: what wakes readers of a rank on a CPU.

        Raises:
            WorkerError: the GPU cannot write to the memory.
        """
        from pdx.kernels.progress_word import publish  # only these ranks want Triton

        self._publish = publish
        self._word = torch.frombuffer(memory, dtype=torch.int64, count=1)
        self._eventfd = None if device.type == "cuda" else eventfd
        self._base = self._word
        if device.type == "cuda":
            _let_gpus_write(self._word.data_ptr())

    def begin(self, base: int, base_on_device: Tensor) -> None:
        self._base = base_on_device

    def publish(self, step: int) -> None:
        self._publish(self._word, self._base, step)
        if self._eventfd is not None:
            os.eventfd_write(self._eventfd, 1)


def _let_gpus_write(address: int) -> None:
    """Pin host memory and map it for all GPUs; with unified addressing at the same address."""
    portable_and_mapped = 3
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    result = runtime.cudaHostRegister(address, PROGRESS_BYTES, portable_and_mapped)
    if int(result):
        raise WorkerError(
            f"the progress word cannot be shared with the GPU: cudaHostRegister gave {result}",
            hint="check the limit on locked memory: ulimit -l",
        )
