"""What a worker and the process that started it say to each other: msgpack behind its length, over a stream socket."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta

MAX_SOURCE: Final = 1 << 20
"""Characters of a grammar."""

MAX_NOTE_BYTES: Final = 64 << 20

CPU_S: Final = 3.0
"""Time on the processor for one question: a usual one takes a thousandth of it, however busy the machine is."""

_LENGTH: Final = struct.Struct("<I")

Token = Annotated[int, Meta(ge=0, lt=1 << 31)]


class Note(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=str.lower):
    """One of them; ``key`` is the stream that it is about."""


class Open(Note, frozen=True):
    """A new stream whose output is a sentence of ``source`` that begins with ``tokens``: what may follow?"""

    key: int
    source: Annotated[str, Meta(max_length=MAX_SOURCE)]
    tokens: tuple[Token, ...] = ()


class Advance(Note, frozen=True):
    """The stream came further: what may follow ``tokens``?"""

    key: int
    tokens: tuple[Token, ...]


class Close(Note, frozen=True):
    """The stream is over; there is no answer."""

    key: int


class Started(Note, frozen=True):
    """The worker's first word. An ``error`` says why it can take no grammar at all."""

    error: str = ""


class Found(Note, frozen=True):
    """The answer: a bit for every token id, set where it may follow, in bytes from the lowest bit on; none where only the end may.

    An ``error`` says in a sentence why there is no answer; ``drawn`` that it is a token's fault, which the mask before it forbade.
    """

    key: int
    mask: bytes = b""
    ended: bool = False
    error: str = ""
    drawn: bool = False
    compile_ns: int = 0
    mask_ns: int = 0


Question = Open | Advance | Close
Word = Started | Found


def packed(note: Note) -> bytes:
    """A note as it goes over the socket."""
    body = msgspec.msgpack.encode(note)
    return _LENGTH.pack(len(body)) + body


class Questions:
    """Questions out of the bytes of a socket, as they come."""

    def __init__(self) -> None:
        self._bodies = Bodies()
        self._decode = msgspec.msgpack.Decoder(Question).decode

    def feed(self, data: bytes) -> Iterator[Question]:
        """The questions that these bytes complete."""
        return map(self._decode, self._bodies.feed(data))


class Words:
    """A worker's words out of the bytes of a socket, as they come."""

    def __init__(self) -> None:
        self._bodies = Bodies()
        self._decode = msgspec.msgpack.Decoder(Word).decode

    def feed(self, data: bytes) -> Iterator[Word]:
        """The words that these bytes complete. Raises ``ValueError`` for what is none."""
        return map(self._decode, self._bodies.feed(data))


class Bodies:
    """Cuts a stream of bytes where the lengths in it say."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that these bytes complete. Raises ``ValueError`` for one that is longer than any can be."""
        rest = self._rest
        rest += data
        at = 0
        while len(rest) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(rest, at)
            if length > MAX_NOTE_BYTES:
                message = f"a note of {length} bytes; the most is {MAX_NOTE_BYTES}"
                raise ValueError(message)
            if len(rest) - at - _LENGTH.size < length:
                break
            at += _LENGTH.size + length
            yield bytes(rest[at - length : at])
        del rest[:at]
