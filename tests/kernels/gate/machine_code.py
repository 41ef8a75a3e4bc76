"""Compiles a launch without a GPU and reads what came out: registers, spills, memory, instructions.

The figures come from ptxas and cuobjdump of the Triton package. A loop's instruction counts are for
one warp and one iteration; they are facts about the code, not times.
"""

from __future__ import annotations

import io
import re
import subprocess
import tempfile
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import triton
from triton import knobs

from tests.kernels.gate.launches import Launch

__all__ = ["examine"]

#: Kinds of SASS instructions by what an opcode starts with; the first match counts.
_KINDS = {
    "wgmma": ("HGMMA", "QGMMA", "IGMMA"),
    "tcgen05": ("UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCMMA", "UTCOMMA"),
    "mma": ("HMMA", "QMMA", "IMMA", "OMMA", "DMMA"),
    "cp_async": ("LDGSTS",),
    "tma": ("UTMALDG", "UBLKCP"),
    "load": ("LDG", "LD."),
    "store": ("STG", "ST."),
    "local": ("LDL", "STL"),
    "mufu": ("MUFU",),
    "atomic": ("ATOM", "RED.", "REDG"),
}
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\S+)(.*?);", re.MULTILINE)
#: In PTX: 16 bytes a thread, into registers or shared memory.
_WIDE_LOAD = re.compile(
    r"ld\.global\S*\.(?:v4\.b32|v2\.b64)|cp\.async\.cg\S* \[[^]]+\], \[[^]]+\], 0x10"
)
_SYSTEM_RELEASE = re.compile(r"\.release\.sys|\.sys\.release")
_STORE = re.compile(r"\bst\.global|\bcp\.async\.bulk\S*\.global\.shared")
_BARRIER = re.compile(r"\bbar(rier)?\.(cta\.)?sync")
_RELEASE = re.compile(r"\b(atom|red|st)\.\S*(release|acq_rel)")


def examine(launch: Launch) -> dict[str, Any]:
    """Compile, always anew, and tell."""
    log = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), redirect_stdout(log):
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(
            launch.source, target=launch.target, options=launch.options.__dict__
        )
    usage, sass = _disassembled(compiled.asm["cubin"])
    instructions = [(int(at, 16), op, rest) for at, op, rest in _INSTRUCTION.findall(sass)]
    loop = _hot_loop(instructions)
    report, ptx = log.getvalue(), compiled.asm["ptx"]
    seen = {
        "wide_load": len(_WIDE_LOAD.findall(ptx)),
        "system_release": len(_SYSTEM_RELEASE.findall(ptx)),
    }
    return {
        "key": launch.key,
        "warps": compiled.metadata.num_warps,
        "registers": _number(r"REG:(\d+)", usage),
        "spill_bytes": _number(r"(\d+) bytes spill stores", report)
        + _number(r"(\d+) bytes spill loads", report),
        "shared_bytes": compiled.metadata.shared,
        "instructions": _kinds(instructions) | {kind: n for kind, n in seen.items() if n},
        "loop": _kinds(loop),
        "loop_bytes": _copied_bytes(loop) * compiled.metadata.num_warps,
        "loose_releases": _loose_releases(ptx),
    }


def _disassembled(cubin: bytes) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        tool = knobs.nvidia.cuobjdump.path
        usage, sass = (
            subprocess.run(
                [tool, option, str(path)], capture_output=True, text=True, check=True
            ).stdout
            for option in ("-res-usage", "-sass")
        )
    return usage, sass


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0


def _kinds(instructions: list[tuple[int, str, str]]) -> dict[str, int]:
    counts: Counter[str] = Counter(total=len(instructions))
    for _, op, _ in instructions:
        kind = next((kind for kind, heads in _KINDS.items() if op.startswith(heads)), None)
        if kind is not None:
            counts[kind] += 1
    return dict(sorted(counts.items()))


def _copied_bytes(instructions: list[tuple[int, str, str]]) -> int:
    """What one warp's asynchronous copies ask of global memory, and its loads of 16 bytes a lane
    (smaller ones read tables, all lanes the same)."""
    total = 0
    for _, op, _ in instructions:
        name, *parts = op.split(".")
        lane_bytes = 16 if "128" in parts else 8 if "64" in parts else 4
        if name == "LDGSTS" or (name == "LDG" and lane_bytes == 16):
            total += 32 * lane_bytes
    return total


def _hot_loop(instructions: list[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    """Of the innermost loops, the one with the most matrix instructions, then loads."""
    spans = []
    for at, op, rest in instructions:
        target = re.search(r"(0x[0-9a-f]+)", rest) if op.startswith("BRA") else None
        if target and int(target[1], 16) < at:
            spans.append((int(target[1], 16), at))
    inner = [s for s in spans if not any(s != o and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    bodies = [[i for i in instructions if first <= i[0] <= last] for first, last in inner]

    def work(body: list[tuple[int, str, str]]) -> tuple[int, int, int]:
        kinds = _kinds(body)
        matrix = sum(kinds.get(kind, 0) for kind in ("wgmma", "tcgen05", "mma"))
        loads = sum(kinds.get(kind, 0) for kind in ("cp_async", "tma", "load"))
        return matrix, loads, len(body)

    return max(bodies, key=work, default=[])


def _loose_releases(ptx: str) -> list[str]:
    """Release atomics with stores before them and no barrier between: such a release publishes what
    its own thread stored, not what the block's other threads did. A release to the whole system has
    a barrier before it in any case."""
    pending, synced, loose = False, False, []
    for line in ptx.splitlines():
        if _STORE.search(line):
            pending = True
        elif _BARRIER.search(line):
            pending, synced = False, True
        elif _RELEASE.search(line) and (pending or (_SYSTEM_RELEASE.search(line) and not synced)):
            loose.append(line.strip())
    return loose
