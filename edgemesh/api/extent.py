"""How much a JSON text holds, found without decoding it.

A decoder makes an object of each value in one call, during which nothing else of the process runs, and a few megabytes may be
millions of values. So a large text is counted first, piece by piece, and refused where it holds more than any request needs.
"""

from __future__ import annotations

from typing import Final

SMALL_BYTES: Final = 1 << 15
"""A text of so many bytes may be decoded whatever it holds."""

MAX_VALUES: Final = (1 << 20) + (1 << 16)
"""A list of as many tokens as any endpoint takes, and all that may stand beside it."""

MAX_CONTAINERS: Final = 1 << 16
"""Objects and arrays."""

PART_VALUES: Final = 1 << 16
PART_CONTAINERS: Final = 1 << 14
"""The same of what templates write out again: all tools together, the arguments of one call, and a schema that is a text."""

_PIECE: Final = 1 << 17
_OTHERS: Final = bytes(each for each in range(256) if each not in b'",[{')


def within(text: bytes, values: int = MAX_VALUES, containers: int = MAX_CONTAINERS) -> bool:
    r"""Whether a JSON text holds at most so many ``values``, of which so many ``containers`` are objects and arrays.

    An empty container counts as if something stood in it. Of what is no JSON the answer means nothing.

    >>> text = b'{"a": [1, 2, {}], "b": "[,\\",["}'
    >>> within(text, values=7, containers=3), within(text, values=6), within(text, containers=2)
    (True, False, False)
    """
    if len(text) <= min(values, containers, SMALL_BYTES):
        return True
    found, held = 1, 0
    inside, kept = 0, b""
    for at in range(0, len(text), _PIECE):
        piece = kept + text[at : at + _PIECE]
        # An escape that the next piece completes waits for it.
        odd = (len(piece) - len(piece.rstrip(b"\\"))) % 2
        piece, kept = piece[: len(piece) - odd], b"\\" * odd
        marks = piece.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHERS)
        parts = marks.split(b'"')
        outside = b"".join(parts[inside::2])
        opened = outside.count(b"[") + outside.count(b"{")
        held += opened
        found += opened + outside.count(b",")
        inside = (inside + len(parts) - 1) % 2
        if held > containers or found > values:
            return False
    return True
