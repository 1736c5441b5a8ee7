"""The persistent decode batch on the device: last tokens, positions and block tables, changed by deltas only."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from edgemesh.engine.sampler import Row
from edgemesh.engine.slots import Slots
from edgemesh.engine.turns import Limits
from edgemesh.wire.messages import Decode, Join


class Batch:
    """Slots of one group in one plane; a free slot has position 0 and a block table of page 0."""

    def __init__(self, limits: Limits) -> None:
        self.slots = Slots(limits)
        self.rows: dict[int, Row] = {}
        self._last = torch.zeros(limits.slots, dtype=torch.int64)
        self._position = torch.zeros(limits.slots, dtype=torch.int64)
        self._table = torch.zeros((limits.slots, limits.row_pages), dtype=torch.int64)
        self._index = torch.empty(0, dtype=torch.int64)
        self._indexed: list[int] = []

    def apply(self, decode: Decode, rows: Iterable[Row]) -> list[int]:
        """Take the delta (``rows`` belong to its joins); the slots that run, ascending."""
        for slot in decode.leaves:
            del self.rows[slot]
            self._position[slot] = 0
            self._table[slot] = 0
        had = {slot: seat.pages for slot, seat in self.slots.seats.items()}
        had.update((join.slot, len(join.pages)) for join in decode.joins)
        for join, row in zip(decode.joins, rows, strict=True):
            self._join(join, row)
        for grow in decode.grows:
            start = had[grow.slot]
            had[grow.slot] = start + len(grow.pages)
            self._table[grow.slot, start : had[grow.slot]] = torch.tensor(grow.pages)
        ran = self.slots.apply(decode)
        if ran != self._indexed:
            self._indexed, self._index = ran, torch.tensor(ran, dtype=torch.int64)
        return ran

    def _join(self, join: Join, row: Row) -> None:
        self.rows[join.slot] = row
        self._last[join.slot] = join.token
        self._position[join.slot] = join.position
        self._table[join.slot] = 0
        self._table[join.slot, : len(join.pages)] = torch.tensor(join.pages)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Last tokens ``[rows]``, positions ``[rows]`` and block tables ``[rows, pages]`` of the slots that run."""
        last, position, table = (
            each.index_select(0, self._index) for each in (self._last, self._position, self._table)
        )
        return last, position, table

    def advance(self, tokens: Sequence[int]) -> None:
        """Each running row takes its drawn token; one that drew none stays where it is."""
        drawn = torch.tensor(tokens, dtype=torch.int64)
        took = drawn >= 0
        self._last[self._index] = torch.where(took, drawn, self._last[self._index])
        self._position[self._index] += took
        self.slots.advance(tokens)
        for slot, token in zip(self._indexed, tokens, strict=True):
            self.rows[slot].took(token)
