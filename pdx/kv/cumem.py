"""GPU memory that several processes of a host map: the CUDA driver's virtual memory calls.

A rank makes the memory and passes its descriptor, its primary maps it as well; each calls this from
its main thread, while it starts and ends. Mappings are all that holds the memory: a handle is
released as soon as it is mapped, so whatever order the processes end in, the memory goes back to
the driver with the last mapping and descriptor. None of these calls needs a CUDA context, which
would cost a primary hundreds of MiB on each GPU.

No torch. cuda-bindings is imported when the first GPU is used: hosts without one do without it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from pdx.errors import ConfigError, PdxError, WorkerError

__all__ = ["GpuRange", "create_shared", "export_dmabuf", "granularity_bytes"]

logger = logging.getLogger(__name__)

_HINTS = {
    "CUDA_ERROR_OUT_OF_MEMORY": "give the KV cache less memory (--kv-memory), or free the GPU's",
    "CUDA_ERROR_NO_DEVICE": "check nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_INVALID_DEVICE": "check --device, --tp and CUDA_VISIBLE_DEVICES",
}
_OTHER_HINT = "the kernel's log may say why: dmesg | grep NVRM"


class GpuRange:
    """A range of addresses of this process, with GPUs' memory mapped into it.

    Owns the addresses and the mappings until :meth:`close`. The memory itself is shared.
    """

    def __init__(self, num_bytes: int) -> None:
        """
        Args:
            num_bytes: a multiple of the granularity of what will be mapped.

        Raises:
            PdxError: the driver refused.
        """
        self.address = int(_call("cuMemAddressReserve", None, num_bytes, 0, 0, 0))
        self._undo = ExitStack()
        self._undo.callback(_release, "cuMemAddressFree", None, self.address, num_bytes)

    def map_shared(self, offset: int, fd: int, num_bytes: int, *, device: int) -> None:
        """Map memory that another process has made; the descriptor stays the caller's.

        Args:
            num_bytes: all of that memory, a multiple of its granularity, as is ``offset``.
            device: the GPU that it lies on.

        Raises:
            PdxError: the driver refused.
        """
        kind = _posix_descriptor()
        with _handle("cuMemImportFromShareableHandle", device, fd, kind) as handle:
            self._map(offset, handle, num_bytes, device)

    def close(self) -> None:
        """Unmap everything and give the addresses back. A second close does nothing."""
        self._undo.close()

    def _map(self, offset: int, handle: Any, num_bytes: int, device: int) -> None:
        driver = _driver()
        address = self.address + offset
        _call("cuMemMap", device, address, num_bytes, 0, handle, 0)
        self._undo.callback(_release, "cuMemUnmap", device, address, num_bytes)
        access = driver.CUmemAccessDesc()
        access.location = _location(device)
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _call("cuMemSetAccess", device, address, num_bytes, [access], 1)


def granularity_bytes(device: int) -> int:
    """What sizes and places of shared memory on a GPU are multiples of.

    Raises:
        PdxError: there is no such GPU, or it cannot share memory.
    """
    advice = _driver().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    return int(_call("cuMemGetAllocationGranularity", device, _properties(device), advice))


def create_shared(num_bytes: int, *, device: int) -> tuple[int, GpuRange]:
    """Memory on a GPU for other processes, and network cards, to map.

    Args:
        num_bytes: a multiple of :func:`granularity_bytes`.

    Returns:
        The descriptor to pass on, which the caller closes, and our own mapping.

    Raises:
        PdxError: the driver refused.
    """
    with _handle("cuMemCreate", device, num_bytes, _properties(device), 0) as handle:
        mapped = GpuRange(num_bytes)
        try:
            mapped._map(0, handle, num_bytes, device)
            fd = int(_call("cuMemExportToShareableHandle", device, handle, _posix_descriptor(), 0))
        except BaseException:
            mapped.close()
            raise
    return fd, mapped


def export_dmabuf(address: int, num_bytes: int, *, device: int) -> int:
    """A descriptor with which network cards are given mapped memory of one GPU.

    Args:
        address: where it is mapped in this process; it and ``num_bytes`` are multiples of a page.

    Returns:
        The descriptor, which the caller closes. The memory begins at its offset 0.

    Raises:
        PdxError: the GPU's driver cannot, or refused.
    """
    if not _has(device, "DMA_BUF"):
        raise ConfigError(
            f"CUDA device {device} gives network cards no memory: no DMA_BUF",
            hint="this needs NVIDIA's open kernel modules and Linux 5.12: pdx inspect fabric",
        )
    kind = _driver().CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    return int(_call("cuMemGetHandleForAddressRange", device, address, num_bytes, kind, 0))


def _has(device: int, name: str) -> bool:
    """Whether a GPU supports something."""
    attributes = _driver().CUdevice_attribute
    attribute = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}_SUPPORTED")
    ordinal = _call("cuDeviceGet", device, device)
    return bool(_call("cuDeviceGetAttribute", device, attribute, ordinal))


def _properties(device: int) -> Any:
    """Properties of memory that is exported as a descriptor, and that network cards reach where the
    GPU allows it.
    """
    driver = _driver()
    for name in ("VIRTUAL_MEMORY_MANAGEMENT", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"):
        if not _has(device, name):
            raise ConfigError(
                f"CUDA device {device} cannot share memory between processes: no {name}",
                hint="choose another GPU with --device or CUDA_VISIBLE_DEVICES",
            )
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = _location(device)
    properties.requestedHandleTypes = _posix_descriptor()
    properties.allocFlags.gpuDirectRDMACapable = int(_has(device, "GPU_DIRECT_RDMA_WITH_CUDA_VMM"))
    return properties


def _location(device: int) -> Any:
    driver = _driver()
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device
    return location


def _posix_descriptor() -> Any:
    kinds = _driver().CUmemAllocationHandleType
    return kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


@contextmanager
def _handle(name: str, device: int, *arguments: Any) -> Iterator[Any]:
    """What a call makes, until it is mapped: the mapping keeps the memory."""
    handle = _call(name, device, *arguments)
    try:
        yield handle
    finally:
        _release("cuMemRelease", device, handle)


@functools.cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ConfigError(
            f"GPUs need cuda-bindings: {error}", hint="pip install 'pdx-serve[cuda]'"
        ) from error
    _check(driver, "cuInit", None, 0)
    return driver


def _call(name: str, device: int | None, *arguments: Any) -> Any:
    """Call the driver; returns what it answers. ``device`` is what the error names."""
    return _check(_driver(), name, device, *arguments)


def _check(driver: Any, name: str, device: int | None, *arguments: Any) -> Any:
    where = "" if device is None else f" on CUDA device {device}"
    try:
        result, *values = getattr(driver, name)(*arguments)
    except RuntimeError as error:  # of cuda-bindings: no driver, or one without this call
        raise ConfigError(
            f"{name}{where} cannot be called: {error}",
            hint="install or update the NVIDIA driver, or use --device cpu",
        ) from error
    if result != driver.CUresult.CUDA_SUCCESS:
        hint = _HINTS.get(result.name, _OTHER_HINT)
        raise WorkerError(f"{name}{where} failed: {result.name}", hint=hint)
    return values[0] if values else None


def _release(name: str, device: int | None, *arguments: Any) -> None:
    """Give something back. A refusal is logged: the caller can do no more, and has more to give
    back, or a better error on its way.
    """
    try:
        _call(name, device, *arguments)
    except PdxError as error:
        logger.warning("%s; it stays taken until this process ends", error)
