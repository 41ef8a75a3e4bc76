"""`pdx bench transfer`: two real processes over real libfabric, small pools, short cells."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdx.fabric import available_providers
from pdx.lab.transfers.figures import Results, interval_of
from pdx.lab.transfers.pattern import Cell, count_wrong, fill, map_pool, order_of, shared_memory
from pdx.lab.transfers.plot import size_text, throughput_svg
from pdx.lab.transfers.run import Plan, run_rounds
from pdx.lab.transfers.systems import Sample

SMALL = ("--pool", "1M", "--sizes", "4K,64K", "--pages", "16", "--rounds", "2", "--seconds", "0.01")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdx", "bench", "transfer", *SMALL, *arguments],
        env=os.environ | {"NO_COLOR": "1", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def figures_of(run: subprocess.CompletedProcess[str]) -> dict[tuple[str, int], dict[str, Any]]:
    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout)["figures"]
    return {(each["system"], each["page_bytes"]): each for each in figures}


@pytest.mark.parametrize("provider", available_providers())
@pytest.mark.parametrize("shape", [(), ("--layers", "2"), ("--neighbours", "4"), ("--ahead", "3")])
def test_every_page_arrives_whole(provider: str, shape: tuple[str, ...]) -> None:
    figures = figures_of(bench("--fabric", provider, "--json", *shape))
    assert set(figures) == {("pdx", 4096), ("pdx", 65536)}
    for figure in figures.values():
        assert figure["wrong"] == 0
        assert figure["gb_per_s"]["median"] > 0


@pytest.mark.skipif(shutil.which("cc") is None, reason="raw is built with a C compiler")
@pytest.mark.parametrize("provider", available_providers())
def test_limits_are_measured_in_the_same_rounds(provider: str, tmp_path: Path) -> None:
    plot = tmp_path / "rates.svg"
    run = bench("--fabric", provider, "--json", "--compare", "memcpy,raw", "--plot", str(plot))
    figures = figures_of(run)
    assert {system for system, _ in figures} == {"pdx", "memcpy", "raw", "raw x4"}
    for figure in figures.values():
        assert figure["rounds"] == 2
        assert figure["wrong"] == 0
        assert figure["to_memcpy"] and figure["to_raw"]
    assert "raw x4" in plot.read_text("utf-8")
    table = bench("--fabric", provider, "--compare", "raw").stdout
    assert "pdx / better raw" in table
    assert "its least and its most (95 % confidence takes 6 rounds)" in table


def _binds(*last: int) -> list[str]:
    return [text for number in last for text in ("--bind", f"127.0.0.{number}")]


def test_another_process_listens_and_each_side_has_its_own_addresses() -> None:
    listen = ["--listen", "127.0.0.1:0", *_binds(2, 3)]
    receiver = subprocess.Popen(
        [sys.executable, "-m", "pdx", "bench", "transfer", *listen],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert receiver.stdout is not None
        address = receiver.stdout.readline().split()[-1]
        for binds in ([], _binds(1, 2, 3)):
            run = bench("--peer", address, "--json", *binds)
            assert figures_of(run)["pdx", 4096]["wrong"] == 0
        receiver.send_signal(signal.SIGINT)
        assert receiver.wait(20) == 0
    finally:
        receiver.kill()
        receiver.communicate()


@pytest.mark.parametrize(("everywhere", "here"), [("0.0.0.0", "127.0.0.1"), ("[::]", "[::1]")])
def test_a_receiver_that_listens_everywhere_takes_the_address_that_was_reached(
    everywhere: str, here: str
) -> None:
    receiver = subprocess.Popen(
        [sys.executable, "-m", "pdx", "bench", "transfer", "--listen", f"{everywhere}:0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert receiver.stdout is not None
        place, _, port = receiver.stdout.readline().split()[-1].rpartition(":")
        assert place == everywhere
        assert figures_of(bench("--peer", f"{here}:{port}", "--json"))["pdx", 4096]["wrong"] == 0
    finally:
        receiver.kill()
        receiver.communicate()


def test_ctrl_c_is_quiet_also_while_the_receiver_starts() -> None:
    """A terminal sends it to the whole group."""
    bench = subprocess.Popen(
        [sys.executable, "-m", "pdx", "bench", "transfer", "--rounds", "1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with bench:
        children = Path(f"/proc/{bench.pid}/task/{bench.pid}/children")
        while not children.read_text():
            assert bench.poll() is None
            time.sleep(0.01)  # nobody tells when a process is started
        os.killpg(bench.pid, signal.SIGINT)
        assert bench.communicate(timeout=20) == (b"", b"")
        assert bench.returncode == 130


@pytest.mark.skipif(shutil.which("cc") is None, reason="raw is built with a C compiler")
@pytest.mark.parametrize("provider", available_providers())
def test_a_killed_bench_leaves_no_process_and_no_memory(provider: str) -> None:
    before = set(Path("/dev/shm").iterdir())
    arguments = ("--fabric", provider, "--compare", "raw", "--rounds", "1000")
    killed = subprocess.Popen(
        [sys.executable, "-m", "pdx", "bench", "transfer", *SMALL, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    children = Path(f"/proc/{killed.pid}/task/{killed.pid}/children")
    while len(pids := [int(pid) for pid in children.read_text().split()]) < 3:
        assert killed.poll() is None
        time.sleep(0.01)  # nobody tells when a process is started
    watched = [os.pidfd_open(pid) for pid in pids]
    killed.kill()
    killed.communicate()
    for pidfd in watched:
        assert select.select([pidfd], [], [], 30)[0], "a child lives on"
        os.close(pidfd)
    of_children = [
        f for f in set(Path("/dev/shm").iterdir()) - before if str(killed.pid) not in f.name
    ]
    assert [f for f in of_children if any(str(pid) in f.name for pid in pids)] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--fabric", "rdma"), "--fabric rdma"),
        (("--sizes", "4K,x"), "--sizes x"),
        (("--sizes", "4K,4096"), "one is named twice"),
        (("--sizes", "4M"), "--pool 1M is too small"),
        (("--peer", "nowhere"), "--peer nowhere"),
        (("--peer", "127.0.0.1:1", "--compare", "raw"), "leave out --peer"),
        (("--compare", "ucx"), "--compare ucx"),
        (("--plot", "rates.pdf"), "plots are .svg or .png"),
        (("--compare", "nixl", "--peers-python", sys.executable), "nixl is not installed"),
        (("--compare", "nixl", "--peers-python", "/nowhere"), "--peers-python /nowhere does not"),
        (("--listen", "127.0.0.1:0", "--peer", "127.0.0.1:1"), "leave out --peer"),
        (("--fabric", "shm", "--bind", "127.0.0.2"), "leave out --bind"),
        (("--pool", "99999999M"), "of memory left for 2"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(
    arguments: tuple[str, ...], message: str
) -> None:
    run = bench(*arguments)
    assert run.returncode == 2
    assert message in run.stderr
    assert run.stdout == ""


def cell(**changes: int) -> Cell:
    base = Cell(
        pool_bytes=1 << 20,
        page_bytes=4096,
        batch_pages=8,
        layers=2,
        neighbours=1,
        seconds=0.1,
        number=3,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_a_wrong_byte_and_a_page_of_another_cell_are_noticed() -> None:
    here = cell()
    with shared_memory(here.pool_bytes) as memory:
        _source_memory, source = map_pool(memory.source_fd, here.pool_bytes)
        _target_memory, target = map_pool(memory.target_fd, here.pool_bytes)
    fill(source, here)
    src, dst = order_of(here)
    atoms = source.reshape(here.layers, -1, here.page_bytes)
    target.reshape(atoms.shape)[:, dst] = atoms[:, src]
    assert count_wrong(target, here, len(src)) == 0
    assert count_wrong(target, cell(number=4), len(src)) == len(src) * here.layers
    target[int(dst[5]) * here.page_bytes + 2000] ^= 1
    assert count_wrong(target, here, len(src)) == 1
    assert count_wrong(target, here, 5) == 0


class Recorder:
    """A system that only notes its cells."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.numbers: list[int] = []

    def measure(self, cell: Cell) -> Sample:
        self.numbers.append(cell.number)
        return Sample(atoms=1, num_bytes=1, seconds=1, wrong=0)

    def close(self) -> None:
        pass


def test_no_other_systems_bytes_in_the_shared_memory_can_pass_for_a_systems_own() -> None:
    plan = Plan(
        pool_bytes=1 << 20,
        page_sizes=(4096, 8192),
        batch_pages=8,
        batch_bytes=1 << 20,
        layers=1,
        neighbours=1,
        seconds=0.1,
        rounds=3,
    )
    systems = [Recorder("a"), Recorder("b")]
    run_rounds(plan, systems, lambda what: None, lambda name, error: None)
    numbers = systems[0].numbers + systems[1].numbers
    assert len(numbers) == len(set(numbers)) == 12


@pytest.mark.parametrize("neighbours", [1, 4])
def test_only_neighbours_can_be_merged(neighbours: int) -> None:
    here = cell(neighbours=neighbours)
    src, dst = order_of(here)
    for order in (src, dst):
        assert sorted(order) == list(range(here.layer_pages))
    merges = (np.diff(src.astype(int)) == 1) & (np.diff(dst.astype(int)) == 1)
    runs = here.layer_pages // neighbours
    assert here.layer_pages - runs <= merges.sum() <= here.layer_pages - runs + 2


def test_an_interval_leaves_out_what_chance_may_have_done() -> None:
    few = interval_of([3.0, 1.0, 2.0])
    assert (few.median, few.low, few.high) == (2.0, 1.0, 3.0)
    many = interval_of([float(i) for i in range(1, 16)])
    assert (many.median, many.low, many.high) == (8.0, 4.0, 12.0)


def test_ratios_are_of_the_same_round() -> None:
    results = Results()
    for i, (ours, raw, four) in enumerate([(1.0, 2.0, 0.5), (10.0, 5.0, 20.0), (3.0, 3.0, 1.0)]):
        for name, rate in (("pdx", ours), ("raw", raw), ("raw x4", four)):
            sample = Sample(atoms=1, num_bytes=int(rate * 1e9), seconds=1.0, wrong=0)
            results.add(name, 4096, i, sample)
    pdx, raw, _four = results.figures()
    assert pdx.to_raw is not None and raw.pdx_to_this is not None
    assert (pdx.to_raw.low, pdx.to_raw.median, pdx.to_raw.high) == (0.5, 0.5, 1.0)
    assert raw.pdx_to_this.median == 1.0
    svg = throughput_svg(results.figures(), "one size")
    assert "<polyline" in svg
    assert svg.count("<circle") == 3


def test_sizes_read_as_people_write_them() -> None:
    assert [size_text(n) for n in (512, 4096, 5000, 1 << 20)] == [
        "512 B",
        "4 KiB",
        "5000 B",
        "1 MiB",
    ]
