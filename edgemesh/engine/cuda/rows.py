"""The persistent decode batch on the device: a delta is a few numbers written into it, a step reads it where it lies."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from edgemesh.engine.cuda.attention import Rows
from edgemesh.engine.cuda.drawing import ELSEWHERE, GREEDY, Draws
from edgemesh.engine.cuda.jit import block, kernel
from edgemesh.engine.cuda.staging import Outbox
from edgemesh.engine.noise import row_stem
from edgemesh.engine.sampler import Row
from edgemesh.engine.slots import Slots
from edgemesh.engine.turns import Limits
from edgemesh.wire.messages import Decode, Join


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step.

    ``tokens`` and ``positions`` (int32) and ``places`` (int64) are those of every computed token, ``lengths`` and ``table`` (int32)
    those of decode rows; ``draws`` is what the rows that draw do it by.
    """

    tokens: Tensor
    positions: Tensor
    places: Tensor
    lengths: Tensor
    table: Tensor
    draws: Draws

    @classmethod
    def empty(cls, computed: int, decoding: int, drawing: int, row_pages: int, device: torch.device) -> "StepRows":
        """Room for so many computed tokens, decode rows and draws."""

        def make(*shape: int, kind: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        draws = Draws(make(drawing, kind=torch.float32), make(drawing, kind=torch.int64), make(drawing), make(drawing))
        return cls(
            make(computed),
            make(computed),
            make(computed, kind=torch.int64),
            make(decoding),
            make(decoding, row_pages),
            draws,
        )

    def first(self, rows: int, pages: int) -> "StepRows":
        """A view of the first rows, their block tables narrowed to ``pages``."""
        draws = self.draws
        return StepRows(
            self.tokens[:rows],
            self.positions[:rows],
            self.places[:rows],
            self.lengths[:rows],
            self.table[:rows, :pages],
            Draws(draws.heats[:rows], draws.stems[:rows], draws.positions[:rows], draws.slots[:rows]),
        )

    @property
    def attention(self) -> Rows:
        """The decode rows as attention sees them."""
        return Rows(self.lengths, self.table)


@kernel("first", "first_draw")
def _gather(
    index: tl.tensor,
    last: tl.tensor,
    position: tl.tensor,
    heat: tl.tensor,
    stem: tl.tensor,
    pages: tl.tensor,
    tokens: tl.tensor,
    positions: tl.tensor,
    places: tl.tensor,
    lengths: tl.tensor,
    table: tl.tensor,
    heats: tl.tensor,
    stems: tl.tensor,
    drawn: tl.tensor,
    slots: tl.tensor,
    first: tl.tensor,
    first_draw: tl.tensor,
    row_pages: tl.tensor,
    page_tokens: tl.tensor,
    columns: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    slot = tl.load(index + row)
    at = tl.load(position + slot)
    mine = pages + slot.to(tl.int64) * row_pages
    page = tl.load(mine + at // page_tokens).to(tl.int64)
    tl.store(tokens + first + row, tl.load(last + slot))
    tl.store(positions + first + row, at)
    tl.store(places + first + row, page * page_tokens + at % page_tokens)
    tl.store(lengths + row, at + 1)
    tl.store(heats + first_draw + row, tl.load(heat + slot))
    tl.store(stems + first_draw + row, tl.load(stem + slot))
    tl.store(drawn + first_draw + row, at + 1)
    tl.store(slots + first_draw + row, slot)
    column = tl.arange(0, columns)
    here = column < row_pages
    tl.store(table + row * row_pages + column, tl.load(mine + column, mask=here, other=0), mask=here)


class DeviceBatch:
    """Slots of one group in one plane, with one more, the scratch slot: position 0 of page 0, for rows that pad a step.

    All of it is one tensor of int32, so that any delta is one list of (place, value). ``widest`` is the most rows of a step.
    """

    def __init__(self, limits: Limits, widest: int, device: torch.device, outbox: Outbox) -> None:
        self.slots = Slots(limits)
        self.rows: dict[int, Row] = {}
        self.scratch = limits.slots
        self._limits = limits
        self._outbox = outbox
        count = limits.slots + 1
        sizes = {"index": widest, "last": count, "position": count, "heat": count, "stem": 2 * count, "attempt": count}
        self._at: dict[str, int] = {}
        total = 0
        for name, size in (*sizes.items(), ("pages", count * limits.row_pages)):
            self._at[name] = total
            total += -(-size // 16) * 16
        self._state = torch.zeros(total, dtype=torch.int32, device=device)

        def view(name: str, size: int) -> Tensor:
            return self._state[self._at[name] : self._at[name] + size]

        self._index = view("index", widest)
        self.last, self.position, self.attempt = (view(name, count) for name in ("last", "position", "attempt"))
        self._heat = view("heat", count).view(torch.float32)
        self._stem = view("stem", 2 * count).view(torch.int64)
        self._pages = view("pages", count * limits.row_pages)
        self._index.fill_(self.scratch)
        self._indexed = np.full(widest, self.scratch, dtype=np.int32)
        self._heats = [GREEDY] * count
        self._edits: dict[int, int] = {}

    def apply(self, decode: Decode, rows: Iterable[Row], masks: Mapping[int, Tensor]) -> list[int]:
        """Take the delta (``rows`` belong to its joins, ``masks`` to slots); the slots that run, ascending."""
        for slot in decode.leaves:
            del self.rows[slot]
        had = {slot: seat.pages for slot, seat in self.slots.seats.items()}
        had.update((join.slot, len(join.pages)) for join in decode.joins)
        for join, row in zip(decode.joins, rows, strict=True):
            self._join(join, row)
        for grow in decode.grows:
            self._put_pages(grow.slot, had[grow.slot], grow.pages)
            had[grow.slot] += len(grow.pages)
        ran = self.slots.apply(decode)
        for slot, mask in masks.items():
            self.rows[slot].mask = mask
        for slot in ran:
            self._set_heat(slot, heat(self.rows[slot]))
        self._run(ran)
        return ran

    def idle(self) -> None:
        """The next step is padding alone."""
        self._run([])

    def flush(self) -> None:
        """Write what changed into the device's copy, before the step that needs it."""
        if not self._edits:
            return
        at = np.fromiter(self._edits.keys(), np.int64, len(self._edits))
        values = np.fromiter(self._edits.values(), np.int32, len(self._edits))
        self._edits.clear()
        places, numbers = self._outbox.send((at, values))
        self._state.scatter_(0, places, numbers)

    def gather(self, into: StepRows, rows: int, first: int = 0, first_draw: int = 0) -> None:
        """Fill in ``rows`` decode rows: tokens from place ``first``, draws from ``first_draw``."""
        if not rows:
            return
        draws = into.draws
        _gather[(rows,)](
            self._index,
            self.last,
            self.position,
            self._heat,
            self._stem,
            self._pages,
            into.tokens,
            into.positions,
            into.places,
            into.lengths,
            into.table,
            draws.heats,
            draws.stems,
            draws.positions,
            draws.slots,
            first,
            first_draw,
            self._limits.row_pages,
            self._limits.page_tokens,
            block(self._limits.row_pages),
            num_warps=1,
        )

    def put(self, slot: int, token: int, position: int) -> None:
        """A row's last token and where it stands, drawn elsewhere."""
        self._edits[self._at["last"] + slot] = token
        self._edits[self._at["position"] + slot] = position

    def _join(self, join: Join, row: Row) -> None:
        slot = join.slot
        self.rows[slot] = row
        self.put(slot, join.token, join.position)
        self._edits[self._at["attempt"] + slot] = row.attempt
        stem = row_stem(row.sampling.seed, row.sampling.choice)
        at = self._at["stem"] + 2 * slot
        self._edits[at], self._edits[at + 1] = _signed(stem & 0xFFFFFFFF), _signed(stem >> 32)
        self._put_pages(slot, 0, join.pages)

    def _put_pages(self, slot: int, start: int, pages: Iterable[int]) -> None:
        at = self._at["pages"] + slot * self._limits.row_pages + start
        self._edits.update(enumerate(pages, at))

    def _set_heat(self, slot: int, value: float) -> None:
        if self._heats[slot] != value:
            self._heats[slot] = value
            self._edits[self._at["heat"] + slot] = int(np.float32(value).view(np.int32))

    def _run(self, ran: list[int]) -> None:
        """The slots of the next step's rows; all other rows are padding."""
        wanted = np.full_like(self._indexed, self.scratch)
        wanted[: len(ran)] = ran
        for at in np.flatnonzero(wanted != self._indexed).tolist():
            self._edits[self._at["index"] + at] = int(wanted[at])
        self._indexed = wanted


def heat(row: Row) -> float:
    """How a step draws a row: by its temperature, greedily, or after the others."""
    if row.shaper is not None or row.mask is not None or row.sampling.logprobs >= 0:
        return ELSEWHERE
    if not row.hot or row.sampling.top_k == 1:
        return GREEDY
    return ELSEWHERE if row.cut else row.sampling.temperature


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
