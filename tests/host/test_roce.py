"""Which GID of an RDMA device is its address: trees written down from a ConnectX-7's sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdx.errors import FabricError
from pdx.host.roce import roce_address

V1, V2 = "IB/RoCE v1", "RoCE v2"
LINK_LOCAL = "fe80:0000:0000:0000:966d:aeff:fe01:0203"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a00:0105"
IPV6 = "fd00:0000:0000:0000:0000:0000:0000:0007"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"


def device(root: Path, gids: list[tuple[str, str]], link_layer: str = "Ethernet") -> Path:
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs/types").mkdir(parents=True)
    (port / "link_layer").write_text(f"{link_layer}\n")
    for index, (gid, kind) in enumerate(gids):
        (port / "gids" / str(index)).write_text(f"{gid}\n")
        if kind:
            (port / "gid_attrs/types" / str(index)).write_text(f"{kind}\n")
    return root


def test_ipv4_of_version_2_comes_first(tmp_path: Path) -> None:
    pairs = [(gid, kind) for gid in (LINK_LOCAL, IPV6, IPV4) for kind in (V1, V2)]
    root = device(tmp_path, [*pairs, (EMPTY, "")])
    assert roce_address("mlx5_0", root) == "10.0.1.5"


def test_ipv6_is_taken_where_it_is_all_there_is(tmp_path: Path) -> None:
    root = device(tmp_path, [(LINK_LOCAL, V1), (LINK_LOCAL, V2), (IPV6, V1), (IPV6, V2)])
    assert roce_address("mlx5_0", root) == "fd00::7"


@pytest.mark.parametrize(
    "gids", [[], [(LINK_LOCAL, V2)], [(IPV4, V1)], [("nonsense", V2)], [(EMPTY, V2)]]
)
def test_without_a_routed_gid_of_version_2_it_is_refused(
    tmp_path: Path, gids: list[tuple[str, str]]
) -> None:
    with pytest.raises(FabricError, match="no RoCE version 2 GID"):
        roce_address("mlx5_0", device(tmp_path, gids))


def test_infiniband_and_unknown_devices_are_refused(tmp_path: Path) -> None:
    root = device(tmp_path, [(IPV6, V2)], link_layer="InfiniBand")
    with pytest.raises(FabricError, match="no addresses"):
        roce_address("mlx5_0", root)
    with pytest.raises(FabricError, match="no RDMA device mlx5_9"):
        roce_address("mlx5_9", root)
