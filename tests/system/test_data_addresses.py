"""Two hosts whose control addresses reach each other, and whose data addresses do not."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fabric.faults.network import inside, lacks
from tests.system.nodes import (
    Prefiller,
    end,
    moved,
    prefiller,
    read_announcement,
    run_to_end,
    start,
    wait_until,
)

KV = ["--kv-memory", "16M"]
SECRET = {"PDX_SECRET": "correct horse battery staple"}
#: Of the prefillers' host and the decoders', and one of each to which the other has no way.
PREFILL, DECODE = "10.77.0.1", "10.77.0.2"
LONELY_PREFILL, LONELY_DECODE = "10.88.0.1", "10.88.1.1"
#: The other host takes it for one of its own network, where nobody answers.
SILENT_PREFILL = "10.89.0.1"


class Hosts:
    """Two network namespaces with a cable between them."""

    def __init__(self, stack: ExitStack) -> None:
        ours = Path("/proc/self/ns/net").readlink()
        pids = []
        for _ in range(2):
            process = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
            stack.callback(process.wait)
            stack.callback(process.kill)
            pid = process.pid
            while Path(f"/proc/{pid}/ns/net").readlink() == ours:
                time.sleep(0.001)
            pids.append(pid)
        cable = f"ip link add pdx0 type veth peer name pdx0 netns {pids[1]}"
        inside(pids[0], cable)
        own = {0: (PREFILL, LONELY_PREFILL, SILENT_PREFILL), 1: (DECODE, LONELY_DECODE)}
        for idx, (network, *others) in own.items():
            inside(pids[idx], f"ip address add {network}/24 dev pdx0")
            for other in others:
                inside(pids[idx], f"ip address add {other}/32 dev pdx0")
            inside(pids[idx], "ip link set lo up; ip link set pdx0 up")
        inside(
            pids[1],
            f"ip route add {SILENT_PREFILL}/32 dev pdx0; ip neigh add "
            f"{SILENT_PREFILL} lladdr 02:00:00:00:00:99 dev pdx0",
        )
        self.prefill, self.decode = (["nsenter", "--net", "--target", str(pid)] for pid in pids)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if lack := lacks():
        pytest.skip(lack)
    with ExitStack() as stack:
        yield Hosts(stack)


@pytest.fixture(scope="module")
def good(
    hosts: Hosts, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prefiller]:
    """A prefiller that has no --fabric-bind."""
    log = tmp_path_factory.mktemp("good") / "prefill.log"
    listen = ["--listen", f"{PREFILL}:0", *KV]
    with prefiller(tiny_llama, log, *listen, within=hosts.prefill, **SECRET) as node:
        yield node


@pytest.fixture(scope="module")
def bad(
    hosts: Hosts, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prefiller]:
    """One of its two data addresses is out of reach."""
    log = tmp_path_factory.mktemp("bad") / "prefill.log"
    bind = ["--fabric-bind", PREFILL, "--fabric-bind", LONELY_PREFILL]
    listen = ["--listen", f"{PREFILL}:0", *bind, *KV]
    with prefiller(tiny_llama, log, *listen, within=hosts.prefill, **SECRET) as node:
        yield node


def refused(hosts: Hosts, node: Prefiller, log: Path, *options: str) -> tuple[float, str]:
    command = ["decode", "--peer", node.address, *KV, *options]
    code, seconds, said = run_to_end(command, log, timeout_s=30, env=SECRET, within=hosts.decode)
    assert code == 1, said
    assert said.count("no data path (tcp) to the prefiller") == 1, said
    assert "Traceback" not in said
    return seconds, said


def test_a_prefillers_address_that_cannot_be_reached_is_named_at_both(
    hosts: Hosts, bad: Prefiller, tmp_path: Path
) -> None:
    faults = bad.faults()
    seconds, said = refused(hosts, bad, tmp_path / "log")
    assert f"from {DECODE} to {LONELY_PREFILL}" in said
    assert f"the prefiller bound {PREFILL}, {LONELY_PREFILL} by its --fabric-bind" in said
    assert "hint: change --fabric-bind of the prefiller:" in said
    assert seconds < 15
    wait_until(
        lambda: f"no data path with the decoder at {DECODE}:" in bad.stderr(),
        timeout_s=3,
        what="the prefiller says it too",
    )
    assert LONELY_PREFILL in bad.stderr()
    assert moved(bad, faults) == {"no_data_path": 1}


def test_a_decoders_address_that_cannot_be_reached_is_named_at_both(
    hosts: Hosts, good: Prefiller, tmp_path: Path
) -> None:
    faults = good.faults()
    seconds, said = refused(hosts, good, tmp_path / "log", "--fabric-bind", LONELY_DECODE)
    assert f"from {PREFILL} to {LONELY_DECODE}" in said
    assert f"the decoder bound {LONELY_DECODE} by its --fabric-bind" in said
    assert "hint: change --fabric-bind of the decoder:" in said
    assert seconds < 15
    warned = [line for line in good.stderr().splitlines() if "no data path" in line]
    assert len(warned) == 1 and LONELY_DECODE in warned[0]
    assert moved(good, faults) == {"no_data_path": 1}


@pytest.mark.parametrize("bind", ["127.0.0.1", "::1"])
def test_an_address_that_leads_nowhere_from_here_is_named_at_once(
    hosts: Hosts, good: Prefiller, bind: str, tmp_path: Path
) -> None:
    command = ["decode", "--peer", good.address, *KV, "--fabric-bind", bind]
    code, _, said = run_to_end(
        command, tmp_path / "log", timeout_s=15, env=SECRET, within=hosts.decode
    )
    assert code == 1, said
    assert f"the decoder bound {bind} by its --fabric-bind" in said


@pytest.mark.slow
def test_an_address_that_nobody_answers_at_is_given_up_in_the_probes_time(
    hosts: Hosts, tiny_llama: Path, tmp_path: Path
) -> None:
    listen = ["--listen", f"{PREFILL}:0", "--fabric-bind", SILENT_PREFILL, *KV]
    log = tmp_path / "prefill.log"
    with prefiller(tiny_llama, log, *listen, within=hosts.prefill, **SECRET) as node:
        seconds, said = refused(hosts, node, tmp_path / "log")
        assert seconds < 20
        assert "did not get through within 5.0 s" in said
        assert f"the prefiller bound {SILENT_PREFILL} by its --fabric-bind" in said
        assert "no data path with the decoder" in node.stderr()


def test_a_decoder_goes_on_with_the_prefiller_that_it_reaches(
    hosts: Hosts, bad: Prefiller, good: Prefiller, tmp_path: Path
) -> None:
    peers = ["--peer", bad.address, "--peer", good.address]
    node = start(["decode", *peers, *KV], tmp_path / "log", SECRET, hosts.decode)
    try:
        read_announcement(node, r"http://\S+/v1")
        said = node.stderr()
        assert f"without {bad.address}: no data path" in said
        assert f"connected to {good.address} (tcp)" in said
    finally:
        end(node)
