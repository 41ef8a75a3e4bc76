"""What `scripts/gate --newest` tells of another Triton."""

from __future__ import annotations

from typing import Any

from tests.kernels.gate.comparison import Comparison, differences, summary


def record(registers: int, loop: int, shared: int = 1000) -> dict[str, Any]:
    return {"registers": registers, "shared_bytes": shared, "loop": {"total": loop}}


def test_a_tenth_is_no_difference() -> None:
    assert differences(record(110, 0), record(100, 0)) == {}
    assert differences(record(111, 90), record(100, 100)) == {"registers": (100, 111)}
    assert differences(record(100, 3, 0), record(100, 0)) == {
        "shared_bytes": (1000, 0),
        "loop": (0, 3),
    }


def test_what_fails_comes_first_then_what_is_worse_and_nothing_else_is_listed() -> None:
    lines = summary(
        [
            Comparison(label="alike sm_90", changed={}),
            Comparison(label="better sm_90", changed={"registers": (200, 100)}),
            Comparison(label="worse", changed={"registers": (200, 100), "loop": (10, 20)}),
            Comparison(label="broken sm_80", faults=("spills 8 bytes",), changed={"loop": (9, 5)}),
        ],
        "3.9.0",
        "3.6.x",
    )
    assert lines == [
        "Triton 3.9.0 beside 3.6.x: 1 of 4 fail, 1 are worse, 1 better, 1 alike",
        "  broken sm_80  FAILS: spills 8 bytes; loop 9 -> 5",
        "  worse         registers 200 -> 100; loop 10 -> 20",
    ]
