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

    only: int = 0
    """Bits of the ids that the request allows; 0: all."""

    less: int = 0
    """Bits of the ids that may come only where no other may."""

    mask: bytes | None = None
    asked_ns: int = 0
    mask_ns: int = 0
    waited_ns: int = 0
    masks: int = 0


def narrowed(mask: bytes, only: int, less: int) -> bytes:
    """The mask with none but the ids whose bits are in ``only`` (if any are), and without ``less`` unless nothing else is left."""
    if not only and not less:
        return mask
    left = int.from_bytes(mask, "little")
    left &= only or left
    return (left & ~less or left).to_bytes(len(mask), "little")


def bits(ids: Iterable[int]) -> int:
    """A number with a bit for each id."""
    row = bytearray()
    for each in ids:
        if len(row) <= each // 8:
            row.extend(bytes(each // 8 + 1 - len(row)))
        row[each // 8] |= 1 << each % 8
    return int.from_bytes(row, "little")


def packed(masks: Iterable[bytes]) -> TokenArray:
    """Masks one after the other, as a plan carries them."""
    return TokenArray(b"".join(masks))
