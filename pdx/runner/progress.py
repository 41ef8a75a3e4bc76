"""How a pass says which layers' KV is in memory. The rank's main thread.

What the word's values mean stands in ``pdx.kv.progress``. The store is an op: on a GPU it is a
kernel behind the append in the stream's order.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from pdx.errors import WorkerError
from pdx.kernels.ops import PublishOp
from pdx.kv.progress import PROGRESS_BYTES

__all__ = ["Progress"]


class Progress:
    """A rank's progress word. Readers of a rank on a CPU sleep until they are woken; those of a GPU
    look while they expect something, because nothing could wake them.
    """

    def __init__(
        self, memory: mmap.mmap, eventfd: int, device: torch.device, publish: PublishOp
    ) -> None:
        """
        Args:
            memory: shared with the readers; outlives this object.
            eventfd: what wakes them, non-blocking; -1: nobody sleeps.
            device: of the rank.
            publish: the device's op.

        Raises:
            WorkerError: the GPU cannot write to the memory.
        """
        self._publish = publish
        self._word = torch.frombuffer(memory, dtype=torch.int64, count=1)
        self._eventfd = -1 if device.type == "cuda" else eventfd
        self._base = torch.zeros(1, dtype=torch.int64)
        if device.type == "cuda":
            _let_gpus_write(self._word.data_ptr())

    def begin(self, base: Tensor) -> None:
        """A pass begins, and ``base`` int64 [1], on the device, is its first value. It stays there
        until the pass has ended.
        """
        self._base = base

    def publish(self, step: int) -> None:
        """All that was begun so far will be in memory when the word is at this step of the pass."""
        self._publish(self._word, self._base, step)
        if self._eventfd >= 0:
            # A full counter means that a wake is pending. suppress() would take as long as this.
            try:  # noqa: SIM105
                os.eventfd_write(self._eventfd, 1)
            except BlockingIOError:
                pass


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
