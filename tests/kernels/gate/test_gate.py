"""The compile gate: every kernel as it is launched, compiled for sm_80, sm_90 and sm_100.

What came out is committed (`pdx/kernels/compiled.json`) under a key of everything that it depends
on. A run compiles what has changed, and a tenth of the rest, chosen by the commit; all of it with
`scripts/gate`. Changed results are written with `scripts/gate --write`, and read in the diff.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import triton

from tests.kernels.gate.comparison import Comparison, differences
from tests.kernels.gate.conftest import OTHER_TRITON
from tests.kernels.gate.entries import ENTRIES
from tests.kernels.gate.entry import ARCHS
from tests.kernels.gate.launches import Launch, launches_of
from tests.kernels.gate.machine_code import examine

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "pdx" / "kernels" / "compiled.json"
#: Dynamic shared memory that a block can have, bytes.
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
MAX_REGISTERS = 255
#: Another Triton allots other registers (scripts/constraints-cpu.txt pins this one).
RECORDED_WITH = "3.6."
#: One of so many unchanged launches is compiled again.
SAMPLE = 10


@cache
def _recorded() -> dict[str, dict[str, Any]]:
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}


@cache
def _commit() -> str:
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip()


def _label(launch: Launch) -> str:
    return f"{launch.name} sm_{launch.arch}"


def _all_launches() -> list[tuple[Launch, tuple[str, ...]]]:
    """Each distinct one once (several ops launch the same merge), and what it must contain."""
    distinct: dict[str, tuple[Launch, tuple[str, ...]]] = {}
    for entry in ENTRIES:
        for arch in entry.archs:
            needs = entry.needs.get(arch, ())
            for launch in launches_of(entry.name, entry.call, arch):
                distinct.setdefault(launch.key, (launch, needs))
                needs = ()
    return list(distinct.values())


LAUNCHES = _all_launches()


def _is_due(launch: Launch, everything: bool) -> bool:
    recorded = _recorded().get(_label(launch))
    if everything or recorded is None or recorded["key"] != launch.key:
        return True
    drawn = hashlib.sha256(f"{_commit()} {_label(launch)}".encode()).digest()
    return drawn[0] % SAMPLE == 0


def _faults(launch: Launch, needs: tuple[str, ...], found: dict[str, Any]) -> list[str]:
    """What no committed result may excuse."""
    faults = []
    if found["spill_bytes"] or found["instructions"].get("local"):
        faults.append(f"spills {found['spill_bytes']} bytes")
    if found["registers"] > MAX_REGISTERS:
        faults.append(f"takes {found['registers']} registers")
    if found["shared_bytes"] > SHARED_LIMIT[launch.arch]:
        faults.append(f"takes {found['shared_bytes']} bytes of shared memory")
    if not (found["instructions"].get("store") or found["instructions"].get("atomic")):
        faults.append("was compiled to nothing: it stores nothing")
    faults += [f"release without a barrier: {line}" for line in found["loose_releases"]]
    return faults + [f"has no {kind}" for kind in needs if not found["instructions"].get(kind)]


def _compared(launch: Launch, needs: tuple[str, ...]) -> Comparison:
    """With another Triton: whatever happens is told."""
    label, recorded = _label(launch), _recorded().get(_label(launch))
    try:
        found = examine(launch)
    except Exception as error:  # noqa: BLE001 - what a compiler may raise is not ours to know
        first = (str(error).strip().splitlines() or [""])[0]
        fault = f"does not compile: {type(error).__name__}: {first}"
        return Comparison(label=label, faults=(fault,), changed={})
    return Comparison(
        label=label,
        faults=tuple(_faults(launch, needs, found)),
        changed={} if recorded is None else differences(found, recorded),
    )


@pytest.mark.parametrize(
    ("launch", "needs"), LAUNCHES, ids=[_label(launch) for launch, _ in LAUNCHES]
)
def test_compiles_within_the_limits(
    launch: Launch,
    needs: tuple[str, ...],
    request: pytest.FixtureRequest,
    results: dict[str, Any],
) -> None:
    everything = request.config.getoption("--everything")
    is_comparable = triton.__version__.startswith(RECORDED_WITH)
    if not is_comparable and request.config.getoption("--write"):
        pytest.fail(f"records are of Triton {RECORDED_WITH}x, not {triton.__version__}")
    if not everything and not is_comparable:
        pytest.skip(f"the records are of Triton {RECORDED_WITH}; --everything tells differences")
    if not _is_due(launch, everything):
        pytest.skip("unchanged and not drawn")
    if not is_comparable:
        request.config.stash.setdefault(OTHER_TRITON, []).append(_compared(launch, needs))
        return
    found = examine(launch)
    assert not _faults(launch, needs, found)
    del found["loose_releases"]
    results[_label(launch)] = found
    if request.config.getoption("--write"):
        return
    recorded = _recorded().get(_label(launch))
    assert recorded is not None, "not recorded: run scripts/gate --write"
    changed = differences(found, recorded)
    assert not changed, "(recorded, found); see what changed, then scripts/gate --write"


def test_records_hold_what_is_launched_and_nothing_else(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--write"):
        pytest.skip("they are being written")
    labels = [_label(launch) for launch, _ in LAUNCHES]
    assert len(set(labels)) == len(labels), "two launches share a record"
    assert set(_recorded()) == set(labels)


@pytest.mark.parametrize("arch", ARCHS)
def test_float8_is_refused_where_it_is_emulated(arch: int) -> None:
    from pdx.errors import ConfigError
    from pdx.kernels.kv_view import check_float8

    if arch >= 90:
        check_float8((arch // 10, arch % 10))
    else:
        with pytest.raises(ConfigError, match=r"not 8\.0"):
            check_float8((arch // 10, arch % 10))
