"""Server-sent events of a generating endpoint, read with as little work per token as will do; sans-IO."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

MAX_LINE_BYTES: Final = 1 << 22
DONE: Final = b"[DONE]"


class Delta(Struct):
    """A chat chunk's new text."""

    content: str | None = None


class Choice(Struct):
    """A chunk's choice, of either endpoint."""

    text: str | None = None
    delta: Delta | None = None


class Details(Struct):
    """How much of the prompt came out of a prefix cache."""

    cached_tokens: int | None = None


class Usage(Struct):
    """The server's own count."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None


class Chunk(Struct):
    """One event; everything but text, usage and an error is passed over."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw | None = None

    @property
    def has_text(self) -> bool:
        """Whether this event brings the client new text."""
        return any(choice.text or (choice.delta is not None and choice.delta.content) for choice in self.choices)


class LineTooLongError(ValueError):
    """A line of the stream has no end in sight."""


class EventLines:
    """Splits a byte stream into the payloads of its ``data:`` lines, wherever the pieces are cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The payloads that end within this piece.

        Raises ``LineTooLongError`` when an unfinished line outgrows ``MAX_LINE_BYTES``.
        """
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_LINE_BYTES:
            message = f"a line of more than {MAX_LINE_BYTES} bytes in the event stream"
            raise LineTooLongError(message)
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


_decode = msgspec.json.Decoder(Chunk).decode


def chunk(payload: bytes) -> Chunk:
    """Decode one payload. Raises ``msgspec.DecodeError``."""
    return _decode(payload)
