"""The way of a pass's arrays from the host to a device: one copy a pass, to the same addresses."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

__all__ = ["PinnedBuffer", "Staging"]

#: What arrays begin at a multiple of: Triton's widest loads.
_ALIGNMENT = 16


class PinnedBuffer:
    """A buffer of the host that a GPU reads and writes by itself. It grows by doubling."""

    def __init__(self, device: torch.device) -> None:
        """
        Args:
            device: what reads and writes it; for the host's own the memory is an ordinary one.
        """
        self._is_pinned = device.type == "cuda"
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self._buffer)

    def take(self, num_bytes: int) -> Tensor:
        """Its first bytes."""
        if len(self._buffer) < num_bytes:
            size = 1 << max(12, (num_bytes - 1).bit_length())
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned)
        return self._buffer[:num_bytes]


class Staging:
    """A buffer of the host and one of the device, which is a copy of it."""

    def __init__(self, device: torch.device, num_bytes: int = 0) -> None:
        """
        Args:
            num_bytes: room from the start; while what is brought fits, addresses stay.
        """
        self._device = device
        self._sent = PinnedBuffer(device)
        self._sent.take(num_bytes)
        self._arrived = torch.empty(len(self._sent), dtype=torch.uint8, device=device)

    def upload(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Arrays of the host on the device, in one copy that is not waited for; valid until the
        next call. Each begins where it began before, if those before it have the same sizes.

        The pass before must have been waited for: its copy may read the buffer until then.
        """
        places, end = {}, 0
        for name, array in arrays.items():
            places[name] = end
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        sent = self._sent.take(end)
        target = sent.numpy()
        for name, array in arrays.items():
            begin = places[name]
            # numpy copies: torch would wake other threads for half a megabyte.
            target[begin : begin + array.nbytes] = array.numpy().reshape(-1).view(np.uint8)
        if len(self._arrived) < end:
            self._arrived = torch.empty(len(self._sent), dtype=torch.uint8, device=self._device)
        self._arrived[:end].copy_(sent, non_blocking=True)
        return {
            name: self._arrived[places[name] : places[name] + array.nbytes]
            .view(array.dtype)
            .view(array.shape)
            for name, array in arrays.items()
        }
