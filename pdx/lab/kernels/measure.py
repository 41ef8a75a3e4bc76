"""A case becomes a row: times, shares of a copy's bandwidth, others' times, and what went wrong.

Nothing that goes wrong with one case or one library ends a run: the row says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pdx.lab.kernels.case import Absent, Call, Case

__all__ = ["Row", "Times", "copy_gb_per_s", "gpu_times", "measure"]

_WARM_UP, _ROUNDS = 5, 30
#: More than a GPU's L2 cache, which is cleared before each call.
_FLUSH_BYTES = 256 << 20
_COPY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Microseconds of one call: the median of some, a fifth below and a fifth above."""

    median: float
    p20: float
    p80: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured case."""

    op: str
    shape: str
    #: None: it failed, and ``failure`` says how.
    times: Times | None
    #: The case's bytes over its time, as a share of what a copy in the same run reaches.
    of_copy: float | None
    tflops: float | None
    #: Microseconds, by library.
    others: dict[str, float]
    #: Why a library has no time, or no right to one: by its name.
    notes: dict[str, str]
    failure: str | None = None


def measure(case: Case, copy: float, times_of: Callable[[Call], Times]) -> Row:
    """Run ours and the others, compare what comes out, and time them.

    Args:
        case: on the device that ``times_of`` times.
        copy: gigabytes a second, read and written.
        times_of: :func:`gpu_times`.
    """
    others: dict[str, float] = {}
    notes: dict[str, str] = {}
    try:
        result = case.ours()
        ours = times_of(case.ours)
    except Exception as error:  # noqa: BLE001 -- of this case only
        return Row(
            op=case.op,
            shape=case.shape,
            times=None,
            of_copy=None,
            tflops=None,
            others=others,
            notes=notes,
            failure=_told(error),
        )
    failure = None
    for name, make in case.others.items():
        try:
            call = make()
            far = _distance(result, call()) if case.tolerance is not None else 0.0
            others[name] = times_of(call).median
        except Absent as absent:
            notes[name] = str(absent)
        except Exception as error:  # noqa: BLE001 -- another library's
            notes[name] = _told(error)
        else:
            # A NaN is far, too.
            if case.tolerance is not None and not far <= case.tolerance:
                failure = f"differs from {name} by {far:.1e} of the norm"
    return Row(
        op=case.op,
        shape=case.shape,
        times=ours,
        of_copy=case.num_bytes / ours.median / 1e3 / copy,
        tflops=case.flops / ours.median / 1e6,
        others=others,
        notes=notes,
        failure=failure,
    )


def _told(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    wide = ours.float()
    return float((wide - theirs.reshape(ours.shape).float()).norm() / wide.norm())


def gpu_times(call: Call) -> Times:
    """Time by the GPU's own clock; what the host does between launches is in it."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    found: list[float] = []
    for index in range(_WARM_UP + _ROUNDS):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        if index >= _WARM_UP:
            found.append(begin.elapsed_time(end) * 1e3)
    found.sort()
    return Times(
        median=found[len(found) // 2], p20=found[len(found) // 5], p80=found[-len(found) // 5]
    )


def copy_gb_per_s() -> float:
    """Read and written bytes of a copy of 1 GiB, by its median time."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / gpu_times(lambda: target.copy_(source)).median / 1e3
