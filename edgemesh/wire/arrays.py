"""Token arrays: the one large thing in messages, carried as frames of their own without a copy."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Final

ITEM_BYTES: Final = 4
"""Token ids travel as little-endian signed 32-bit integers."""


class TokenArray:
    """An immutable run of token ids over a buffer that it does not copy.

    ``TokenArray.of(ids)`` packs any iterable; ``TokenArray(buffer)`` views bytes that came off a socket.
    Raises ``ValueError`` for a buffer that is not a whole number of ids, ``OverflowError`` for an id outside 32 bits.
    """

    __slots__ = ("_ids",)

    def __init__(self, buffer: bytes | bytearray | memoryview | array[int] = b"") -> None:
        view = memoryview(buffer).cast("B")
        if view.nbytes % ITEM_BYTES:
            message = f"a token array of {view.nbytes} bytes is not a whole number of ids"
            raise ValueError(message)
        self._ids = view.toreadonly().cast("i")

    @classmethod
    def of(cls, ids: Iterable[int]) -> TokenArray:
        """Pack token ids."""
        return cls(array("i", ids))

    @property
    def buffer(self) -> memoryview:
        """The ids as read-only bytes."""
        return self._ids.cast("B")

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> int:
        return self._ids[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def slice(self, start: int, stop: int) -> TokenArray:
        """A view of ``[start, stop)``."""
        return TokenArray(self._ids[start:stop])

    def tolist(self) -> list[int]:
        """The ids as a list."""
        return self._ids.tolist()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenArray) and self._ids == other._ids

    def __hash__(self) -> int:
        return hash(self._ids.tobytes())

    def __repr__(self) -> str:
        return f"TokenArray({self.tolist()!r})"
