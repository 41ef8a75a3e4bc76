"""The wheel that scripts/wheel builds: what is in it, and that it runs where neither a compiler nor
Triton is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.oracle.tiny_checkpoint import LLAMA, write_hub_layout

pytestmark = pytest.mark.xdist_group("wheel")  # built once

ROOT = Path(__file__).parents[2]
LIBRARIES = {
    "pdx/fabric/native/libpdx_fabric.so",
    "pdx/kernels/cpu/native/libpdx_cpu_ops.so",
    "pdx/kernels/cpu/native/libpdx_progress.so",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [ROOT / "scripts" / "wheel", "--out", folder]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files, as pip would lay them."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.timeout(300)
def test_wheel_is_for_every_python_and_a_manylinux_baseline(wheel: Path) -> None:
    assert f"-py3-none-manylinux_2_34_{os.uname().machine}" in wheel.name
    assert wheel.name.startswith("pdx_serve-")


def test_wheel_holds_the_native_libraries_and_no_sources_of_them(site: Path) -> None:
    names = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert names >= LIBRARIES
    assert not [name for name in names if name.endswith((".cpp", ".h", ".hpp", "CMakeLists.txt"))]
    roots = {name.partition("/")[0] for name in names}
    assert {root for root in roots if not root.startswith("pdx_serve-")} == {"pdx"}


def test_wheel_wants_neither_triton_nor_a_web_framework_that_nothing_uses(site: Path) -> None:
    [metadata] = site.glob("pdx_serve-*.dist-info/METADATA")
    wanted = Parser().parsestr(metadata.read_text("utf-8")).get_all("Requires-Dist", [])
    plain = {each.split(";")[0] for each in wanted if "extra ==" not in each}
    assert not [each for each in plain if each.startswith(("triton", "fastapi", "cuda", "pytest"))]


def test_wheel_generates_without_a_compiler_and_without_triton(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    [packages] = venv.glob("lib/python3*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # Dependencies come from this environment, whose own .pth files (they bring in the checkout's
    # pdx) are not read there.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    blocked = tmp_path / "blocked"
    (blocked / "triton").mkdir(parents=True)
    error = "ModuleNotFoundError('Triton is not installed', name='triton')"
    (blocked / "triton" / "__init__.py").write_text(f"raise {error}\n")
    write_hub_layout(LLAMA, tmp_path / "model")

    result = subprocess.run(
        [venv / "bin" / "python", "-m", "pdx", "generate", "model", "Hello", "--max-tokens", "4"],
        env={"PATH": str(blocked), "HOME": str(tmp_path), "PYTHONPATH": str(blocked)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout
    where = subprocess.run(
        [venv / "bin" / "python", "-c", "import pdx; print(pdx.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.startswith(str(packages))
