"""What a node can know of its fabric before it starts. `pdx inspect fabric`, `--check` and a start
ask the same functions, so that they agree.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdx.config.providers import Provider
from pdx.errors import FabricError
from pdx.fabric.bind_addresses import bindable_addresses
from pdx.fabric.native_fabric import library_info
from pdx.host.shared_memory import SHM_HINT, shm_lack

__all__ = ["check_fabric"]


def check_fabric(choice: str, bind_hosts: Sequence[str]) -> None:
    """
    Args:
        choice: the setting --fabric: auto, tcp or shm.
        bind_hosts: the setting --fabric-bind.

    Raises:
        FabricError: a node with these settings could carry no KV cache.
    """
    providers = library_info().providers
    if choice == Provider.SHM and (lack := shm_lack(providers)) is not None:
        raise FabricError(f"--fabric shm cannot be used here: {lack}", hint=SHM_HINT)
    if choice != Provider.SHM and Provider.TCP not in providers:
        raise FabricError(f"--fabric {choice} cannot be used here: this libfabric offers no tcp")
    bindable_addresses(bind_hosts)
