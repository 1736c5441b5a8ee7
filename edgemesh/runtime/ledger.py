"""What every gateway of a mesh must know of each API key: its rates, and the requests that each gateway has open for it.

One private file in the run's directory, mapped by all of them and locked for the few microseconds of a change, so that a
limit is the same however many processes share the port. A lone gateway keeps it in its own memory, without a lock. A
process that ends lets go of the lock, and clears the column of its open requests when it starts anew.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROWS: Final = 1 << 14
"""Keys that a run tells apart; all beyond them share the last row."""

WORDS: Final = 4
"""Of a row: half of the key's digest in two words, and when its requests and its tokens are given back."""


class Row:
    """One key's numbers, to be read and changed while the ledger is held."""

    def __init__(self, words: memoryview, column: int) -> None:
        self._words = words
        self._column = WORDS + column

    @property
    def requests_due_ns(self) -> int:
        """When all requests that were taken are given back."""
        return int(self._words[2])

    @requests_due_ns.setter
    def requests_due_ns(self, value: int) -> None:
        self._words[2] = value

    @property
    def tokens_due_ns(self) -> int:
        """When all tokens that were taken are given back."""
        return int(self._words[3])

    @tokens_due_ns.setter
    def tokens_due_ns(self, value: int) -> None:
        self._words[3] = value

    @property
    def open(self) -> int:
        """Requests that all gateways have open."""
        return sum(self._words[WORDS:])

    def opened(self, change: int) -> None:
        """This gateway has so many more requests open."""
        self._words[self._column] += change


class Ledger:
    """The rows of all keys. ``path`` None: this process's own; else shared by ``gateways`` processes, of which this is ``index``."""

    def __init__(self, path: Path | None = None, index: int = 0, gateways: int = 1) -> None:
        self._index = index if path is not None else 0
        self._width = WORDS + (gateways if path is not None else 1)
        size = 8 * (1 + ROWS * self._width)
        self._fd = -1
        if path is not None:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            os.ftruncate(self._fd, size)
        self._words = memoryview(mmap.mmap(self._fd, size)).cast("q")
        self._rows: dict[bytes, Row] = {}
        self._known = 0
        with self._held():
            for number in range(self._words[0]):
                self._words[1 + number * self._width + WORDS + self._index] = 0

    @contextmanager
    def row(self, digest: bytes) -> Iterator[Row]:
        """A key's row, held until the end of the block; do nothing long in it."""
        name = digest[:16].ljust(16, b"\0")
        with self._held():
            yield self._rows.get(name) or self._find(name)

    @contextmanager
    def _held(self) -> Iterator[None]:
        if self._fd < 0:
            yield
            return
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _find(self, name: bytes) -> Row:
        """Learn the rows that others made, and make this one if none did."""
        while self._known < self._words[0]:
            words = self._slice(self._known)
            self._rows[words[:2].tobytes()] = Row(words, self._index)
            self._known += 1
        if name not in self._rows:
            if self._known == ROWS:
                return Row(self._slice(ROWS - 1), self._index)
            words = self._slice(self._known)
            words[:2] = memoryview(name).cast("q")
            self._rows[name] = Row(words, self._index)
            self._known += 1
            self._words[0] = self._known
        return self._rows[name]

    def _slice(self, number: int) -> memoryview:
        return self._words[1 + number * self._width :][: self._width]
