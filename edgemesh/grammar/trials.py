"""What a gateway and the process that tries grammars out say to each other: msgpack behind its length, over a stream socket."""

from __future__ import annotations

import struct
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from edgemesh.grammar.notes import MAX_SOURCE

LENGTH: Final = struct.Struct("<I")
MAX_TRIAL_BYTES: Final = 4 * MAX_SOURCE + 64
"""No character takes more than four bytes."""


class Trial(msgspec.Struct, frozen=True, array_like=True):
    """Can outputs be made after this source?"""

    key: int
    source: Annotated[str, Meta(max_length=MAX_SOURCE)]


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """``fault`` says in words why none can; ``busy`` that there was not enough time on the processor to find out."""

    key: int
    fault: str = ""
    busy: bool = False


def framed(message: Trial | Verdict) -> bytes:
    """A message as it goes over the socket."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body
