"""Reads along while the actors write: new lines of all trace files, across rotations, in the order of their clocks."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from edgemesh.inspect.store import LINE_BYTES, TraceFile, trace_files

READ_BYTES: Final = 1 << 20
"""Read from one file in one look, at most; the rest comes with the next look."""

LATEST_NS: Final = 1 << 63
"""A time beyond it (in the year 2262) is none of a trace's."""

BACKLOG_BYTES: Final = 1 << 18
"""How far back the first look goes in each actor's newest file."""

Line = dict[str, Any]


class Follower:
    """New events of a trace directory, look by look; an unfinished last line waits for its end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[Path, _Reading] = {}
        self._began = False

    def look(self) -> list[Line]:
        """What was written since the last look, oldest first; the first look gives the end of what is there."""
        found: list[Line] = []
        for file in trace_files(self._directory):
            if file.age == 0:
                found += self._look_at(file)
        self._began = True
        return sorted(found, key=lambda line: line["ts"])

    def close(self) -> None:
        """Close every file."""
        for reading in self._open.values():
            reading.file.close()
        self._open.clear()

    def _look_at(self, newest: TraceFile) -> Iterator[Line]:
        path = newest.path
        reading = self._open.get(path)
        if reading is None:
            with contextlib.suppress(FileNotFoundError):
                reading = self._open[path] = _Reading(path)
                if not self._began:
                    reading.skip_to_last(BACKLOG_BYTES)
        if reading is None:
            return
        yield from reading.lines()
        if reading.is_rotated(path):
            yield from reading.rest()
            for newer in self._rotated_since(newest.actor, reading.inode):
                with contextlib.suppress(FileNotFoundError):
                    missed = _Reading(newer)
                    yield from missed.rest()
                    missed.file.close()
            reading.file.close()
            del self._open[path]
            with contextlib.suppress(FileNotFoundError):
                self._open[path] = _Reading(path)
                yield from self._open[path].lines()

    def _rotated_since(self, actor: str, inode: int) -> list[Path]:
        """Files of this actor that were begun and rotated away between two looks, oldest first."""
        rotated = [file.path for file in trace_files(self._directory) if file.actor == actor and file.age]
        inodes = []
        for path in rotated:
            with contextlib.suppress(FileNotFoundError):
                inodes.append(path.stat().st_ino)
        return rotated[inodes.index(inode) + 1 :] if inode in inodes else rotated


class _Reading:
    """One open file, how far it was read, and its unfinished last line."""

    def __init__(self, path: Path) -> None:
        self.file: BinaryIO = path.open("rb")
        status = path.stat()
        self.inode = status.st_ino
        self._partial = b""

    def skip_to_last(self, count: int) -> None:
        """Begin at the first whole line of the last ``count`` bytes."""
        size = self.file.seek(0, 2)
        self.file.seek(max(size - count, 0))
        if size > count:
            self.file.readline(LINE_BYTES)

    def is_rotated(self, path: Path) -> bool:
        try:
            status = path.stat()
        except FileNotFoundError:
            return True
        return status.st_ino != self.inode or status.st_size < self.file.tell()

    def lines(self) -> Iterator[Line]:
        """The events of the next bytes; a line that is no event is left out."""
        data = self._partial + self.file.read(READ_BYTES)
        *whole, self._partial = data.split(b"\n")
        if len(self._partial) > LINE_BYTES:
            self._partial = b""
        for line in whole:
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                event = msgspec.json.decode(line)
                if isinstance(event, dict) and isinstance(at := event.get("ts"), int) and 0 <= at < LATEST_NS:
                    yield event

    def rest(self) -> Iterator[Line]:
        """Everything up to the end of a file that grows no more."""
        while True:
            before = self.file.tell()
            yield from self.lines()
            if self.file.tell() == before:
                return


def matches(actor: str | None, event: str | None, request: str | None) -> Callable[[Line], bool]:
    """Whether a line is of this actor or role, of this event or area, about this request; a prefix is enough."""

    def begins(value: object, prefix: str | None) -> bool:
        return prefix is None or (isinstance(value, str) and value.startswith(prefix))

    def test(line: Line) -> bool:
        about = line.get("request")
        named = line.get("requests")
        shared = isinstance(named, list) and any(begins(each, request) for each in named)
        asked = request is None or begins(about, request) or shared
        return begins(line.get("actor"), actor) and begins(line.get("event"), event) and asked

    return test
