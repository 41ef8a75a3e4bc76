"""What carries a KV cache: libfabric's providers, and what a user may choose."""

from __future__ import annotations

import enum

__all__ = ["FabricChoice", "Provider"]


class Provider(enum.StrEnum):
    """A libfabric provider, in the order of the native core's."""

    #: Any network card.
    TCP = "tcp"
    #: Between processes of one host.
    SHM = "shm"
    #: InfiniBand and RoCE cards.
    VERBS = "verbs"
    #: AWS's cards.
    EFA = "efa"


class FabricChoice(enum.StrEnum):
    """What ``--fabric`` may say."""

    #: Shared memory on one host, else the network.
    AUTO = "auto"
    TCP = Provider.TCP.value
    SHM = Provider.SHM.value
