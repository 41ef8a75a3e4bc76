"""The ranks of a node together: sums and exchanges between their processes. The rank's main thread.

gloo over loopback for CPU ranks, NCCL where the ranks are GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from pdx.errors import ConfigError, SiblingLost
from pdx.models.sharding import LoneRank, TpGroup
from pdx.request.rank import RankConfig

__all__ = ["join_group"]

#: The primary's watchdog ends a node whose pass hangs; ranks alone would wait for ever after it.
_TIMEOUT = timedelta(hours=1)


def join_group(config: RankConfig, device: torch.device) -> TpGroup:
    """Meet the other ranks; returns when all are there.

    Args:
        device: of this rank, on which what is summed and exchanged lies.

    Raises:
        ConfigError: this PyTorch cannot connect GPUs.
        SiblingLost: they cannot be reached.
    """
    if config.tp_size == 1:
        return LoneRank()
    # All ranks of a node are on one host; its name may resolve to an address that is not there.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cuda" and not dist.is_nccl_available():
        raise ConfigError(
            f"this PyTorch ({torch.__version__}) has no NCCL, which several GPU ranks need",
            hint="install PyTorch for CUDA (pytorch.org), or use --tp 1",
        )
    with _errors_of_siblings():
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            init_method=f"file://{config.rendezvous}",
            rank=config.tp_rank,
            world_size=config.tp_size,
            timeout=_TIMEOUT,
            device_id=None if device.type == "cpu" else device,
        )
    return _ProcessGroup(config.tp_rank, config.tp_size)


class _ProcessGroup:
    """A :class:`TpGroup` on torch.distributed's default group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def sum(self, x: Tensor) -> Tensor:
        # In float32: rounding each partial sum to 16 bits would lose more than one rank does.
        wide = x.to(torch.float32).contiguous()
        with _errors_of_siblings():
            dist.all_reduce(wide)
        return wide.to(x.dtype)

    def concat(self, x: Tensor, sizes: list[int]) -> Tensor:
        # A collective takes equal shapes: narrower parts are filled up and cut again.
        widest = max(sizes)
        ours = torch.nn.functional.pad(x, (0, widest - x.shape[-1])).contiguous()
        parts = [torch.empty_like(ours) for _ in sizes]
        with _errors_of_siblings():
            dist.all_gather(parts, ours)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)

    def from_leader(self, values: Tensor) -> Tensor:
        with _errors_of_siblings():
            dist.broadcast(values, 0)
        return values


@contextmanager
def _errors_of_siblings() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        raise SiblingLost(f"another rank cannot be reached: {error}") from error
