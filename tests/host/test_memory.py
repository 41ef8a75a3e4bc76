"""What limits memory here, of files as kernels write them."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from pdx.host.memory import cgroup_limits, host_limits, read_memory_facts

GIB = 1 << 30
V2_MOUNT = "30 24 0:26 {root} {mount} rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
V1_MOUNT = "31 24 0:27 {root} {mount} rw - cgroup cgroup rw,{controllers}\n"


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def v2(most: str, used: int, files: int = 0) -> dict[str, str]:
    stat = f"anon 1\nfile {files}\ninactive_file {files}\nactive_file 0\n"
    return {"memory.max": f"{most}\n", "memory.current": f"{used}\n", "memory.stat": stat}


def proc(folder: Path, mounts: str, group: str) -> Path:
    write(folder / "proc/self", {"mountinfo": mounts, "cgroup": group})
    return folder / "proc"


def test_every_group_up_to_the_root_counts(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    write(mount / "a", v2(str(4 * GIB), GIB, files=GIB // 2))
    write(mount / "a/b", v2("max", GIB // 2))
    write(mount / "a/b/c", v2(str(2 * GIB), GIB // 4))
    root = proc(tmp_path, V2_MOUNT.format(root="/", mount=mount), "0::/a/b/c\n")
    found = {limit.name.rsplit(" ", 1)[1]: limit.free_bytes for limit in cgroup_limits(root)}
    assert found == {str(mount / "a/b/c"): 7 * GIB // 4, str(mount / "a"): 7 * GIB // 2}


def test_a_container_sees_its_part_of_the_tree(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    write(mount, v2(str(GIB), GIB // 2))
    group = "0::/docker/123\n"
    root = proc(tmp_path, V2_MOUNT.format(root="/docker/123", mount=mount), group)
    assert [limit.free_bytes for limit in cgroup_limits(root)] == [GIB // 2]
    # Of another namespace the place may lie outside of what is mounted.
    root = proc(tmp_path, V2_MOUNT.format(root="/", mount=mount), "0::/../..\n")
    assert [limit.free_bytes for limit in cgroup_limits(root)] == [GIB // 2]


def test_version_1_beside_version_2(tmp_path: Path) -> None:
    mount, other = tmp_path / "memory", tmp_path / "unified"
    write(
        mount / "pod",
        {
            "memory.limit_in_bytes": f"{3 * GIB}\n",
            "memory.usage_in_bytes": f"{2 * GIB}\n",
            "memory.stat": f"cache 7\ntotal_inactive_file {GIB}\ntotal_active_file 0\n",
        },
    )
    # The root's: no limit.
    write(mount, {"memory.limit_in_bytes": f"{(1 << 63) - 4096}\n", "memory.usage_in_bytes": "1\n"})
    other.mkdir()
    mounts = (
        V1_MOUNT.format(root="/", mount=tmp_path / "cpu", controllers="cpu,cpuacct")
        + V1_MOUNT.format(root="/", mount=mount, controllers="memory")
        + V2_MOUNT.format(root="/", mount=other)
    )
    group = "5:cpu,cpuacct:/pod\n4:memory:/pod\n0::/x\n"
    [limit] = cgroup_limits(proc(tmp_path, mounts, group))
    assert limit.free_bytes == 2 * GIB
    assert str(mount / "pod") in limit.name


def test_what_cannot_be_read_is_no_limit(tmp_path: Path) -> None:
    assert not list(cgroup_limits(tmp_path))
    assert not list(host_limits(tmp_path))
    broken = {"self/mountinfo": "x\n - \n", "self/cgroup": "::\nabc\n", "meminfo": "MemTotal:\nx"}
    write(tmp_path / "proc", broken)
    assert not list(cgroup_limits(tmp_path / "proc"))
    assert not list(host_limits(tmp_path / "proc"))


def test_strict_overcommit_is_a_limit_of_its_own(tmp_path: Path) -> None:
    meminfo = (
        "MemTotal: 8388608 kB\nMemAvailable: 6291456 kB\n"
        "CommitLimit: 4194304 kB\nCommitted_AS: 3145728 kB\n"
    )
    for mode, free in (("0", [6 * GIB]), ("2", [6 * GIB, GIB])):
        write(tmp_path, {"meminfo": meminfo, "sys/vm/overcommit_memory": f"{mode}\n"})
        assert [limit.free_bytes for limit in host_limits(tmp_path)] == free


def test_limits_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_AS: 5 * GIB, resource.RLIMIT_FSIZE: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], -1))
    facts = read_memory_facts()
    assert (facts.process_bytes, facts.file_bytes) == (5 * GIB, None)
    assert facts.shared
    assert all(limit.free_bytes > 0 for limit in facts.shared)
