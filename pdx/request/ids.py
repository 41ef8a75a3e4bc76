"""Token ids and page indices of a request, as many as there are: packed numbers instead of objects.

Messages carry them as bytes, which a reader takes as they are. A list of 128k numbers would cost an
event loop several milliseconds, most of them for making the numbers.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

__all__ = ["IdArray", "from_wire", "to_wire"]

if TYPE_CHECKING:
    _Array = array[int]
else:
    _Array = array


class IdArray(_Array):
    """uint32 numbers in a row; otherwise like a list of them. Its slices are plain arrays.

    Raises:
        OverflowError: a number is below 0 or above 2**32 - 1.
    """

    __slots__ = ()

    def __new__(cls, ids: Iterable[int] = ()) -> Self:
        return super().__new__(cls, "I", ids)  # type: ignore[return-value]  # it makes its class


def to_wire(value: Any) -> bytes:
    """What msgspec writes for an IdArray: its numbers, little-endian."""
    if not isinstance(value, array) or value.typecode != "I":
        raise NotImplementedError(f"{type(value).__name__} has no place in a message")
    if sys.byteorder == "little":
        return value.tobytes()
    swapped = IdArray(value)
    swapped.byteswap()
    return swapped.tobytes()


def from_wire(kind: type[Any], data: Any) -> IdArray:
    """The reverse, for msgspec.

    Raises:
        ValueError: it is no whole number of ids.
    """
    if kind is not IdArray:
        raise NotImplementedError(f"{kind} has no place in a message")
    ids = IdArray()
    if not isinstance(data, bytes) or len(data) % ids.itemsize:
        what = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
        raise ValueError(f"ids are packed in {ids.itemsize} bytes each, not {what}")
    ids.frombytes(data)
    if sys.byteorder != "little":
        ids.byteswap()
    return ids
