"""The rows of the persistent decode batch as plain numbers: who sits where, and what a delta may do."""

from collections.abc import Sequence
from dataclasses import dataclass

from edgemesh.engine.turns import Limits
from edgemesh.wire.messages import Decode, Join


@dataclass(slots=True)
class Seat:
    """A row: ``position`` is that of its last token, whose KV its next step writes; ``pages`` is how many it has."""

    request: str
    position: int
    pages: int


class Slots:
    """Seats of one group in one plane."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.seats: dict[int, Seat] = {}
        self.ran: list[int] = []

    def count(self, decode: Decode) -> tuple[int, str]:
        """(rows that would run, why the delta cannot be applied or nothing); changes no state."""
        held = {slot: (seat.position, seat.pages) for slot, seat in self.seats.items()}
        for slot in decode.leaves:
            if held.pop(slot, None) is None:
                return 0, f"slot {slot} leaves, but has no row"
        for join in decode.joins:
            fault = self._join_fault(join, taken=join.slot in held)
            if fault:
                return 0, f"slot {join.slot} joins: {fault}"
            held[join.slot] = (join.position, len(join.pages))
        for grow in decode.grows:
            fault = self._limits.page_fault(grow.pages) if grow.slot in held else "it has no row"
            if fault:
                return 0, f"slot {grow.slot} grows: {fault}"
            position, pages = held[grow.slot]
            held[grow.slot] = (position, pages + len(grow.pages))
        return self._run_fault(decode, held)

    def _join_fault(self, join: Join, *, taken: bool) -> str:
        if taken or join.slot >= self._limits.slots:
            return "it has a row already" if taken else f"slots are 0 to {self._limits.slots - 1}"
        if join.token >= self._limits.vocab:
            return f"token {join.token} is not among 0 to {self._limits.vocab - 1}"
        if join.sampling.needs_history and len(join.history) != join.position + 1:
            return f"a history of {len(join.history)} tokens at position {join.position}"
        return self._limits.page_fault(join.pages)

    def _run_fault(self, decode: Decode, held: dict[int, tuple[int, int]]) -> tuple[int, str]:
        limits, sits = self._limits, set(decode.sits)
        for slot in (*decode.sits, *decode.masked):
            if slot not in held:
                return 0, f"slot {slot} sits out or is masked, but has no row"
        both = sits.intersection(decode.masked)
        if both:
            return 0, f"slot {min(both)} sits out and is masked"
        fault = limits.mask_fault(decode.masked, decode.masks)
        if fault:
            return 0, fault
        for slot, (position, pages) in held.items():
            if pages > limits.row_pages or position >= limits.positions:
                return 0, f"slot {slot} is at position {position} with {pages} pages; the most are {limits}"
            if slot not in sits and position >= pages * limits.page_tokens:
                return (
                    0,
                    f"slot {slot} has {pages} pages of {limits.page_tokens} tokens, too few for position {position}",
                )
        return len(held) - len(sits), ""

    def apply(self, decode: Decode) -> list[int]:
        """Take a delta that ``count`` found right; the slots that run, ascending."""
        for slot in decode.leaves:
            del self.seats[slot]
        for join in decode.joins:
            self.seats[join.slot] = Seat(join.request, join.position, len(join.pages))
        for grow in decode.grows:
            self.seats[grow.slot].pages += len(grow.pages)
        sits = set(decode.sits)
        self.ran = sorted(slot for slot in self.seats if slot not in sits)
        return self.ran

    def advance(self, tokens: Sequence[int]) -> None:
        """Rows that ran move on by a token; one that drew none (-1) stays where it is."""
        for slot, token in zip(self.ran, tokens, strict=True):
            if token >= 0:
                self.seats[slot].position += 1
