"""`pdx inspect topology` on machines that were written down, and on this one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pdx.cli.topology_svg import draw
from pdx.host.topology import read_topology
from tests.host.topology.machines import NAMES, expand

_PDX = Path(sys.executable).with_name("pdx")
_SVG = "{http://www.w3.org/2000/svg}"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [_PDX, "inspect", "topology", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_text_shows_the_tree_the_pairs_and_the_reasons(tmp_path: Path) -> None:
    result = run("--sysfs", expand("gh200", tmp_path))
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:2] == ["socket 0", "  NUMA node 0: 72 cores, CPUs 0-71"]
    assert "    GPU 0 0009:01:00.0 NVIDIA GH200 480GB" in lines
    nic = "    NIC mlx5_0 0000:01:00.0 ConnectX-7 400 Gb/s InfiniBand (net ibp1s0) -> GPU 0"
    assert nic in lines
    assert "    worker: CPU 71, on the NIC's NUMA node (0)" in lines
    assert "  NUMA nodes of memory alone: 1" in lines


def test_json_names_groups_reasons_and_the_machine(tmp_path: Path) -> None:
    result = run("--json", "--sysfs", expand("p4d", tmp_path))
    found = json.loads(result.stdout)
    first = found["groups"][0]
    assert (first["gpu"], first["usable"], first["worker_cpu"]) == ("0000:10:1c.0", True, 23)
    assert first["nics"] == [
        {
            "name": "rdmap16s27",
            "provider": "efa",
            "distance": "same host bridge",
            "why": "on the same host bridge pci0000:10",
        }
    ]
    assert len(found["machine"]["gpus"]) == 8
    assert {entry["name"] for entry in found["left_out"]} == {"lo"}


def test_json_of_this_machine_is_one_object() -> None:
    result = run("--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["groups"]


@pytest.mark.parametrize("name", NAMES)
def test_drawing_has_every_gpu_and_a_line_for_each_pair(name: str, tmp_path: Path) -> None:
    topology = read_topology(expand(name, tmp_path))
    root = ElementTree.fromstring(draw(topology))
    texts = " ".join(text.text or "" for text in root.iter(f"{_SVG}text"))
    assert all(gpu.place.address in texts for gpu in topology.machine.gpus)
    lines = [path for path in root.iter(f"{_SVG}path") if path.find(f"{_SVG}title") is not None]
    pairs = sum(len(group.nics) for group in topology.groups if group.gpu is not None)
    assert len(lines) == pairs
    box = (float(root.attrib["width"]), float(root.attrib["height"]))
    for rect in root.iter(f"{_SVG}rect"):
        if rect.attrib["width"] != "100%":
            assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= box[0]
            assert float(rect.attrib["y"]) + float(rect.attrib["height"]) <= box[1]


def test_svg_goes_to_the_file(tmp_path: Path) -> None:
    target = tmp_path / "machine.svg"
    result = run("--svg", target, "--sysfs", expand("gh200", tmp_path / "root"))
    assert result.stderr == f"drawn to {target}\n"
    assert ElementTree.parse(target).getroot().tag == f"{_SVG}svg"


def test_unwritable_svg_and_missing_root_are_refused(tmp_path: Path) -> None:
    result = run("--svg", tmp_path / "no" / "x.svg")
    assert result.returncode == 1
    assert result.stderr.startswith("error: cannot write")
    result = run("--svg", tmp_path / "x.png")
    assert result.returncode == 2
    assert "the drawing is .svg" in result.stderr
    assert not (tmp_path / "x.png").exists()
    result = run("--sysfs", tmp_path / "no")
    assert result.returncode == 2
    assert "is no folder" in result.stderr
