"""An actor's events as JSON lines in a file of its own: no hop, no shared lock, and a crash loses only the last moment.

Each trace has a structlog logger of its own (nothing global is configured). Lines are buffered and written by
``flush``: when the buffer is large, and a few times a second by the thread that reports progress.
"""

import os
import threading
from collections import deque
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import structlog

from edgemesh.runtime.clock import Clock, SystemClock

BUFFERED_LINES: Final = 512
MAX_TEXT: Final = 8192
"""A longer text field is cut: a trace says what happened, it does not archive payloads."""

SECRETS: Final = frozenset({"api_key", "authorization", "password", "secret"})
"""Fields whose value is never written."""


class Trace(Protocol):
    """Where an actor says what happened."""

    def event(self, name: str, /, **fields: object) -> None:
        """Record one event, at the default level."""
        ...

    def detail(self, name: str, /, **fields: object) -> None:
        """Record one event, at level ``debug`` only."""
        ...

    def flush(self) -> None:
        """Write what is buffered."""
        ...


class _Events(structlog.BoundLoggerBase):
    """A bound logger with one verb."""

    def write(self, name: str, fields: dict[str, object]) -> None:
        self._proxy_to_logger("append", name, **fields)


class FileTrace:
    """``DIR/<actor>.jsonl``, rotated at ``max_bytes`` to ``<actor>.1.jsonl`` and so on, at most ``files`` of them.

    A full disk never stops an actor: lines that cannot be written are counted, and the count is traced once it can be.
    """

    def __init__(
        self,
        directory: Path,
        actor: str,
        epoch: int,
        *,
        level: str = "info",
        max_bytes: int = 64 << 20,
        files: int = 3,
        clock: Clock | None = None,
    ) -> None:
        self._level = level
        self._clock = clock or SystemClock()
        self._file = _Rotating(directory, actor, max_bytes, files)
        self._lines: deque[bytes] = deque()
        self._flushing = threading.Lock()
        self._lost = 0
        self._encode = msgspec.json.Encoder(enc_hook=repr).encode
        self._on = level != "off"
        logger = _Events(self._lines, [self._render], {"actor": actor, "epoch": epoch})
        self._write = logger.write

    def event(self, name: str, /, **fields: object) -> None:
        """Record one event; costs a few microseconds."""
        if self._on:
            self._write(name, fields)
            if len(self._lines) >= BUFFERED_LINES:
                self.flush()

    def detail(self, name: str, /, **fields: object) -> None:
        """Record one event, at level ``debug`` only."""
        if self._level == "debug":
            self.event(name, **fields)

    def flush(self) -> None:
        """Write the buffered lines; safe from any thread."""
        if not self._lines:
            return
        with self._flushing:
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            if self._lost:
                lines.insert(0, self._render(None, "", {"event": "trace.lost", "lines": self._lost}))
            try:
                self._file.write(b"".join(lines))
            except OSError:
                self._lost += len(lines) - bool(self._lost)
            else:
                self._lost = 0

    def close(self) -> None:
        """Flush and close the file."""
        self.flush()
        self._file.close()

    def _render(self, _logger: object, _method: str, fields: MutableMapping[str, Any]) -> bytes:
        for field, value in fields.items():
            if type(value) is str and len(value) > MAX_TEXT:
                fields[field] = value[:MAX_TEXT] + "..."
        if not SECRETS.isdisjoint(fields):
            fields.update(dict.fromkeys(SECRETS.intersection(fields), "[secret]"))
        line = {"ts": self._clock.wall(), "mono": self._clock.now()}
        line.update(fields)
        return self._encode(line) + b"\n"


class _Rotating:
    """A private append-only file, made anew when it grows past ``max_bytes``."""

    def __init__(self, directory: Path, name: str, max_bytes: int, files: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._name, self._max_bytes, self._files = directory, name, max_bytes, files
        self._fd = self._open()

    def write(self, data: bytes) -> None:
        if self._size and self._size + len(data) > self._max_bytes:
            self._rotate()
        view = memoryview(data)
        while view:
            written = os.write(self._fd, view)
            self._size += written
            view = view[written:]

    def close(self) -> None:
        os.close(self._fd)

    def _path(self, number: int) -> Path:
        return self._directory / (f"{self._name}.{number}.jsonl" if number else f"{self._name}.jsonl")

    def _open(self) -> int:
        # Where others may write too, a link of theirs must not lead our lines into another file.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path(0), flags, 0o600)
        self._size = os.fstat(descriptor).st_size
        return descriptor

    def _rotate(self) -> None:
        # A rotation that failed half-way has moved the files already: only opening is left to be tried again.
        if self._path(0).exists():
            for number in range(self._files - 1, -1, -1):
                if self._path(number).exists():
                    self._path(number).replace(self._path(number + 1))
        # The old descriptor is let go last: its number may belong to a socket as soon as it is closed.
        old, self._fd = self._fd, self._open()
        os.close(old)


class ListTrace:
    """Events kept in a list, for simulations and tests."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []

    def event(self, name: str, /, **fields: object) -> None:
        """Record one event."""
        self.events.append((name, fields))

    detail = event

    def flush(self) -> None:
        """Nothing is buffered."""

    def named(self, name: str) -> list[dict[str, object]]:
        """The fields of every event of this name."""
        return [fields for event, fields in self.events if event == name]
