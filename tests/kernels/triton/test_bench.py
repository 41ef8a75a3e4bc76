"""What the benches compare computes the same: every toy case, ours in the interpreter."""

from __future__ import annotations

import pytest
import torch

from pdx.lab.kernels.__main__ import selected
from pdx.lab.kernels.case import Absent, Case
from pdx.lab.kernels.measure import Times, measure
from tests.kernels.triton.cases import DEVICE

COPY = 4000.0


def some_times(call: object) -> Times:
    return Times(median=10.0, p20=9.0, p80=12.0)


def test_every_case_gives_what_torch_gives() -> None:
    torch.manual_seed(0)
    seen = set()
    for case in selected(DEVICE, toy=True):
        row = measure(case, COPY, some_times)
        assert row.failure is None, (row.op, row.shape, row.failure)
        if row.op != "rope, append":
            assert "torch" in row.others or "one length" in row.notes["torch"]
        seen.add(row.op)
    assert {"decode", "prefill", "decode float8", "mla decode", "mla prefill", "linear"} <= seen


@pytest.mark.skipif(DEVICE.type != "cpu", reason="about the rows, which need no device")
class TestRows:
    def case(self, **others: object) -> Case:
        made = {name: (lambda call=call: call) for name, call in others.items()}
        ones = torch.ones(4)
        return Case(
            op="op",
            shape="4",
            num_bytes=20_000_000,
            flops=50_000_000,
            ours=lambda: ones,
            others=made,  # type: ignore[arg-type]
            tolerance=0.01,
        )

    def test_shares_and_rates_are_of_the_median(self) -> None:
        row = measure(self.case(torch=lambda: torch.ones(2, 2)), COPY, some_times)
        assert row.of_copy == pytest.approx(0.5)
        assert row.tflops == pytest.approx(5.0)
        assert (row.others, row.notes, row.failure) == ({"torch": 10.0}, {}, None)

    @pytest.mark.parametrize("wrong", [1.1, float("nan")])
    def test_another_result_is_a_failure(self, wrong: float) -> None:
        row = measure(self.case(torch=lambda: torch.full((4,), wrong)), COPY, some_times)
        assert row.failure is not None
        assert "differs from torch" in row.failure

    def test_what_is_absent_or_refuses_is_noted_and_the_others_are_measured(self) -> None:
        def absent() -> torch.Tensor:
            raise Absent("not installed")

        def refuses() -> torch.Tensor:
            raise ValueError("page size 64\nis not supported")

        case = self.case(first=absent, second=refuses, third=lambda: torch.ones(4))
        row = measure(case, COPY, some_times)
        assert row.notes == {
            "first": "not installed",
            "second": "ValueError: page size 64",
        }
        assert row.others == {"third": 10.0}
        assert row.failure is None

    def test_a_case_that_fails_tells_why(self) -> None:
        def breaks(call: object) -> Times:
            raise RuntimeError("out of memory")

        row = measure(self.case(), COPY, breaks)
        assert (row.times, row.failure) == (None, "RuntimeError: out of memory")
