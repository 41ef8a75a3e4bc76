"""What the gate reads of a compiled kernel: releases that publish too little, the hot loop."""

from __future__ import annotations

import pytest

from tests.kernels.gate.machine_code import _hot_loop, _loose_releases

STORE, BARRIER = "st.global.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};", "bar.sync 0;"
RELEASE = "@%p1 atom.global.sys.release.exch.b64 %rd2, [%rd3], %rd4;"


@pytest.mark.parametrize(
    ("lines", "num_loose"),
    [
        ([STORE, RELEASE], 1),
        ([STORE, BARRIER, RELEASE], 0),
        ([BARRIER, STORE, "red.global.gpu.acq_rel.add.u32 [%rd3], 1;"], 1),
        ([STORE, "atom.global.gpu.relaxed.add.u32 %r1, [%rd3], 1;"], 0),
        (["atom.global.gpu.release.exch.b64 %rd2, [%rd3], %rd4;"], 0),
        ([RELEASE], 1),
        ([BARRIER, RELEASE], 0),
        ([RELEASE, BARRIER], 1),
    ],
)
def test_release_needs_a_barrier_behind_the_stores_of_other_threads(
    lines: list[str], num_loose: int
) -> None:
    assert len(_loose_releases("\n".join(lines))) == num_loose


def test_hot_loop_is_the_innermost_with_the_most_matrix_instructions() -> None:
    opcodes = ["MOV", "LDG.E", "HMMA.16816", "BRA", "LDG.E", "HMMA", "HMMA", "BRA", "BRA", "EXIT"]
    jumps = {3: "0x10", 7: "0x40", 8: "0x00"}  # two loops within a third
    code = [(16 * i, op, f" {jumps.get(i, '')}") for i, op in enumerate(opcodes)]
    assert [op for _, op, _ in _hot_loop(code)] == ["LDG.E", "HMMA", "HMMA", "BRA"]
