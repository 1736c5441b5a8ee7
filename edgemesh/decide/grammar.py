"""A request's grammar as its group sees it: what the next token may be, which the host works out between two steps."""

from collections.abc import Iterable
from dataclasses import dataclass

from edgemesh.wire.arrays import TokenArray


@dataclass(slots=True, eq=False)
class Constraint:
    """What is known of the next token: ``mask``, a bit for each id, set where it is allowed, in bytes from the lowest bit on.

    None while it is being worked out, since ``asked_ns``. The rest is what ``masks`` answers have cost so far: ``mask_ns`` of work,
    and ``waited_ns`` from each question to its answer.
    """

    mask: bytes | None = None
    asked_ns: int = 0
    mask_ns: int = 0
    waited_ns: int = 0
    masks: int = 0


def narrowed(mask: bytes, allowed: Iterable[int], without: Iterable[int]) -> bytes:
    """The mask with none but the ``allowed`` ids (if any are named), and without some unless nothing else is left."""
    only, less = _bits(allowed), _bits(without)
    if not only and not less:
        return mask
    bits = int.from_bytes(mask, "little")
    bits &= only or bits
    return (bits & ~less or bits).to_bytes(len(mask), "little")


def _bits(ids: Iterable[int]) -> int:
    row = bytearray()
    for each in ids:
        if len(row) <= each // 8:
            row.extend(bytes(each // 8 + 1 - len(row)))
        row[each // 8] |= 1 << each % 8
    return int.from_bytes(row, "little")


def packed(masks: Iterable[bytes]) -> TokenArray:
    """Masks one after the other, as a plan carries them."""
    return TokenArray(b"".join(masks))
