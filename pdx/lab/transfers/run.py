"""The rounds of `pdx bench transfer`: each system once in every cell of every round, in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdx.errors import PdxError
from pdx.lab.transfers.figures import Results
from pdx.lab.transfers.pattern import Cell
from pdx.lab.transfers.systems import System

__all__ = ["Plan", "run_rounds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    pool_bytes: int
    page_sizes: tuple[int, ...]
    #: Pages of a batch at most.
    batch_pages: int
    #: A batch holds no more than this, however few pages that are.
    batch_bytes: int
    layers: int
    neighbours: int
    seconds: float
    rounds: int

    def cell(self, page_bytes: int, number: int) -> Cell:
        """One measurement at this page size."""
        most = self.batch_bytes // (page_bytes * self.layers)
        return Cell(
            pool_bytes=self.pool_bytes,
            page_bytes=page_bytes,
            batch_pages=max(1, min(self.batch_pages // self.layers, most)),
            layers=self.layers,
            neighbours=self.neighbours,
            seconds=self.seconds,
            number=number,
        )


def run_rounds(
    plan: Plan,
    systems: Sequence[System],
    on_cell: Callable[[str], None],
    on_failure: Callable[[str, PdxError], None],
) -> Results:
    """Measure all systems next to each other at each size, and begin with another one each time.

    They write to the same memory, so each gets bytes of its own: nobody else's pages count as its.
    A system that fails is left out from then on; a failure of pdx's own is raised.
    """
    results = Results()
    left = list(systems)
    number = cells = 0
    for round_number in range(plan.rounds):
        for page_bytes in plan.page_sizes:
            cells += 1
            turn = cells % len(left)
            for system in [*left[turn:], *left[:turn]]:
                number += 1
                cell = plan.cell(page_bytes, number)
                on_cell(f"{system.name}, round {round_number + 1}")
                try:
                    sample = system.measure(cell)
                except PdxError as error:
                    if system.name == "pdx":
                        raise
                    on_failure(system.name, error)
                    left.remove(system)
                    continue
                results.add(system.name, page_bytes, round_number, sample)
    return results
