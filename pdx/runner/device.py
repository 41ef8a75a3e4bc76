"""The device of a rank: which one it is, what a pass brings to it and takes from it, what fits.

The rank's main thread. All work of a rank goes through one stream, in order; the host waits for it
once a pass, for the pass's end. What goes to a GPU is written into one pinned host buffer and
copied at once; what comes back comes through another one. Ops of a CPU read and write the host's
memory, so that nothing is copied.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from pdx.errors import ConfigError, WorkerError
from pdx.kernels.staging import PinnedBuffer, Staging
from pdx.request.rank import RankConfig

__all__ = ["RankDevice", "check_room", "choose_gpu", "open_device"]

_GIB = 1 << 30


class RankDevice:
    """Owns the stream (a GPU's) and the buffers of what goes there and back."""

    def __init__(self, device: torch.device, staging: Staging | None = None) -> None:
        """
        Args:
            staging: by which arrays come to the device; a GPU has one of its own, and None on a CPU
                means that ops read the host's arrays.
        """
        self.torch_device = device
        self._is_gpu = device.type == "cuda"
        self.staging = Staging(device) if self._is_gpu and staging is None else staging
        self._received = PinnedBuffer(device)

    def upload(self, arrays: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Arrays of the host where ops read them; valid until the next pass."""
        return arrays if self.staging is None else self.staging.upload(arrays)

    def download(self, values: Tensor) -> Tensor:
        """A tensor of the device on the host, complete; valid until the next call."""
        if self.staging is None:
            return values
        received = self._received.take(values.nbytes).view(values.dtype).view(values.shape)
        received.copy_(values, non_blocking=True)
        self.finish()
        return received

    def finish(self) -> None:
        """Wait until everything that was begun is done.

        Raises:
            WorkerError: the GPU failed.
        """
        if self._is_gpu:
            try:
                torch.cuda.current_stream(self.torch_device).synchronize()
            except RuntimeError as error:
                raise WorkerError(
                    f"{self.torch_device} failed: {error}",
                    hint="the kernel's log may say why: dmesg | grep NVRM",
                ) from error

    def check_room(self, what: str, num_bytes: int) -> None:
        """Whether an allocation can succeed.

        Raises:
            ConfigError: the GPU has less free memory. (A host's swaps, and is not asked.)
        """
        if self._is_gpu:
            free, total = torch.cuda.mem_get_info(self.torch_device)
            check_room(str(self.torch_device), what, num_bytes, free, total)

    def free_bytes(self) -> int:
        """Free memory of the GPU once torch has given back what it keeps for later; 0 on a host,
        which is not asked.
        """
        if not self._is_gpu:
            return 0
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.torch_device)[0]


def open_device(config: RankConfig) -> RankDevice:
    """The rank's device, ready for work; on a GPU with a stream of the rank's own.

    Raises:
        ConfigError: there is no such device, and why.
    """
    if not config.device.startswith("cuda"):
        return RankDevice(torch.device("cpu"))
    if torch.version.cuda is None:
        raise ConfigError(
            f"--device {config.device}: this PyTorch ({torch.__version__}) is built without CUDA",
            hint="install PyTorch for CUDA (pytorch.org), or use --device cpu",
        )
    num_visible = torch.cuda.device_count()
    index = choose_gpu(config.device, config.tp_rank, config.tp_size, num_visible)
    device = torch.device("cuda", index)
    try:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ConfigError(
            f"GPU {index} cannot be used: {error}", hint="check nvidia-smi, or use --device cpu"
        ) from error
    return RankDevice(device)


def choose_gpu(name: str, tp_rank: int, tp_size: int, num_visible: int) -> int:
    """A rank's own GPU: from the first one of a node on (0, or N of ``cuda:N``), each rank has the
    next one of those that CUDA_VISIBLE_DEVICES leaves.

    Raises:
        ConfigError: there are too few, or none.
    """
    first = int(name.partition(":")[2] or 0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = f"{num_visible} GPUs are visible" + (
        f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
    )
    if num_visible == 0:
        raise ConfigError(
            f"--device {name}: no GPU is visible"
            + (f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""),
            hint="check the NVIDIA driver with nvidia-smi, and CUDA_VISIBLE_DEVICES",
        )
    if first + tp_size > num_visible:
        raise ConfigError(
            f"--device {name} with --tp {tp_size} needs GPUs {first} to {first + tp_size - 1}, "
            f"but {seen}",
            hint="use fewer ranks, another first GPU, or make more visible",
        )
    return first + tp_rank


def check_room(device: str, what: str, num_bytes: int, free: int, total: int) -> None:
    """Whether ``num_bytes`` fit.

    Raises:
        ConfigError: with the numbers.
    """
    if num_bytes > free:
        raise ConfigError(
            f"{what} of {num_bytes / _GIB:,.1f} GiB do not fit on {device}: {free / _GIB:,.1f} of "
            f"its {total / _GIB:,.1f} GiB are free",
            hint="use more ranks (--tp), less --kv-memory, or end what else uses the GPU",
        )
