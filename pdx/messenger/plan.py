"""The sharding plan: which bytes of a request go where, and as how many atoms. Pure.

This is its first form: both sides have one rank, the same layout but for the number of pages. An
atom is one page of one layer. Pages carry token positions: page ``i`` of a request holds positions
``i * page_size`` onwards on both sides, so nothing is ever paired by its place in a list.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdx.errors import InvalidRequest

__all__ = ["PagePair", "SendCursor", "TransferPlan", "expected_atoms"]


def expected_atoms(num_tokens: int, first_position: int, page_size: int, num_layers: int) -> int:
    """Atoms of a transfer of positions ``first_position <= i < num_tokens``."""
    return (-(-num_tokens // page_size) - first_position // page_size) * num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePair:
    """A page of the request, on both sides."""

    src_page_idx: int
    dst_page_idx: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """One transfer as both sides agree on it."""

    num_tokens: int
    first_position: int
    dst_page_indices: tuple[int, ...]
    page_size: int

    def check(self, *, atoms: int, num_layers: int, num_dst_pages: int) -> None:
        """Compare with what the decoder declared.

        Raises:
            InvalidRequest: naming what does not fit.
        """
        if self.num_tokens < 1:
            raise InvalidRequest("a transfer of no tokens", param="token_ids")
        if self.first_position % self.page_size or not 0 <= self.first_position < self.num_tokens:
            raise InvalidRequest(
                f"first position {self.first_position} is not a page's start within "
                f"{self.num_tokens} tokens (page size {self.page_size})",
                param="first_position",
            )
        planned = expected_atoms(self.num_tokens, self.first_position, self.page_size, num_layers)
        if planned != atoms or len(self.dst_page_indices) * num_layers != planned:
            raise InvalidRequest(
                f"the plan has {planned} atoms, the decoder expects {atoms} "
                f"in {len(self.dst_page_indices)} pages of {num_layers} layers",
                param="atoms",
            )
        bad = [i for i in self.dst_page_indices if not 0 <= i < num_dst_pages]
        if bad or len(set(self.dst_page_indices)) != len(self.dst_page_indices):
            raise InvalidRequest(
                f"destination pages must be distinct and below {num_dst_pages}; bad: {bad[:4]}",
                param="page_indices",
            )


class SendCursor:
    """How far a transfer has been handed to the fabric: a page is sent once, when it is full or
    when the prompt ends.
    """

    def __init__(self, plan: TransferPlan) -> None:
        self._plan = plan
        self._next_page = plan.first_position // plan.page_size

    def advance(self, src_page_indices: tuple[int, ...], end: int, *, last: bool) -> list[PagePair]:
        """Pages that become complete when positions below ``end`` are computed."""
        plan = self._plan
        assert not last or end == plan.num_tokens
        stop = -(-end // plan.page_size) if last else end // plan.page_size
        first = plan.first_position // plan.page_size
        pairs = [
            PagePair(
                src_page_idx=src_page_indices[page],
                dst_page_idx=plan.dst_page_indices[page - first],
            )
            for page in range(self._next_page, stop)
        ]
        self._next_page = max(self._next_page, stop)
        return pairs
