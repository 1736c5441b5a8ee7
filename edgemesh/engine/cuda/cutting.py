"""Draws rows that are cut by top-k, top-p or min-p on the device, without a word to the host.

A token is drawn from the whole vocabulary by Gumbel-max and accepted if the cut keeps it, which its rank and the mass above it
tell. What a cut keeps ranks before all that it leaves out, so after a refusal only tokens that rank before the refused one
are drawn from: the draw stays exact, and the next one is likelier to be kept. After a fixed number of rounds the row yields no token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log
from typing import Final

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from edgemesh.engine.collectives import Group
from edgemesh.engine.cuda.drawing import COLUMNS, noise
from edgemesh.engine.cuda.jit import block, kernel
from edgemesh.engine.cuda.staging import Outbox
from edgemesh.engine.noise import row_stem
from edgemesh.engine.sampler import NO_TOKEN, Row

ROUNDS: Final = 12
"""Draws per step and row, before the row yields no token."""

_FACTS: Final = 4
"""What a rank says of a row and round: its best score, that token's id and scaled logit, and the largest scaled logit."""

_SUMS: Final = 3
"""What it says of the winner: the mass that ranks before it, how many tokens do, and the mass of all."""


@dataclass(frozen=True, slots=True)
class CutRow:
    """A row about to draw: its place among the step's rows that draw, and its slot (-1: a prompt's end, which has none)."""

    number: int
    slot: int
    row: Row


def cut_alone(row: Row) -> bool:
    """Whether a cut is all that sets this row apart from those that are drawn by temperature alone."""
    return row.cut and row.shaper is None and row.mask is None and row.sampling.logprobs < 0


@dataclass(frozen=True, slots=True)
class _Rows:
    """Cut rows on the device, one entry each."""

    numbers: Tensor
    slots: Tensor
    positions: Tensor
    attempts: Tensor
    heats: Tensor
    stems: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@kernel("draw")
def _offer(
    logits: tl.tensor,
    numbers: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    attempts: tl.tensor,
    heats: tl.tensor,
    stems: tl.tensor,
    position: tl.tensor,
    attempt: tl.tensor,
    done: tl.tensor,
    floor: tl.tensor,
    floor_id: tl.tensor,
    facts: tl.tensor,
    draw: tl.tensor,
    rounds: tl.tensor,
    scratch: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    first_id: tl.tensor,
    blocks: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """One block's best of what ranks before the floor, and its largest logit."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(done + row) > 0:
        return
    part = tl.program_id(1)
    at = part * columns + tl.arange(0, columns)
    slot = tl.load(slots + row)
    here = slot < scratch
    where = tl.where(here, tl.load(position + slot) + 1, tl.load(positions + row))
    tried = tl.where(here, tl.load(attempt + slot), tl.load(attempts + row))
    source = logits + tl.load(numbers + row).to(tl.int64) * stride + at
    scaled = tl.load(source, mask=at < width, other=float("-inf")).to(tl.float32) / tl.load(heats + row)
    scaled = tl.where(scaled == scaled, scaled, float("-inf"))  # noqa: PLR0124 - true of all but what is no number
    low, low_id = tl.load(floor + row), tl.load(floor_id + row)
    ids = first_id + at
    before = (scaled > low) | ((scaled == low) & (ids < low_id))
    score = scaled + noise(tl.load(stems + row), where, tried * rounds + draw, ids)
    score = tl.where(before & (at < width), score, float("-inf"))
    best, index = tl.max(score, axis=0, return_indices=True)
    chosen = tl.sum(tl.where(tl.arange(0, columns) == index, scaled, 0.0), axis=0)
    to = facts + (row * blocks + part) * 4
    tl.store(to, best)
    tl.store(to + 1, (first_id + part * columns + index).to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(to + 2, chosen)
    tl.store(to + 3, tl.max(scaled, axis=0))


@kernel("rows")
def _choose(
    facts: tl.tensor, done: tl.tensor, mine: tl.tensor, rows: tl.tensor, blocks: tl.constexpr, columns: tl.constexpr
) -> None:
    """This rank's best block."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(done + row) > 0:
        return
    at = tl.arange(0, columns)
    source = facts + (row * blocks + at) * 4
    here = at < blocks
    best, index = tl.max(tl.load(source, mask=here, other=float("-inf")), axis=0, return_indices=True)
    chosen = facts + (row * blocks + index) * 4
    tl.store(mine + row, best)
    tl.store(mine + rows + row, tl.load(chosen + 1))
    tl.store(mine + 2 * rows + row, tl.load(chosen + 2))
    tl.store(mine + 3 * rows + row, tl.max(tl.load(source + 3, mask=here, other=float("-inf")), axis=0))


@kernel("rows")
def _winner(every: tl.tensor, row: tl.tensor, rows: tl.tensor, ranks: tl.constexpr) -> tl.tensor:
    """(id, scaled logit, largest scaled logit) over all ranks, the first of equals."""
    best = tl.load(every + row)
    token = tl.load(every + rows + row)
    scaled = tl.load(every + 2 * rows + row)
    top = tl.load(every + 3 * rows + row)
    for rank in tl.static_range(1, ranks):
        other = every + rank * 4 * rows + row
        value = tl.load(other)
        higher = value > best
        best = tl.where(higher, value, best)
        token = tl.where(higher, tl.load(other + rows), token)
        scaled = tl.where(higher, tl.load(other + 2 * rows), scaled)
        top = tl.maximum(top, tl.load(other + 3 * rows))
    return token.to(tl.int32, bitcast=True), scaled, top


@kernel("rows")
def _weigh(
    logits: tl.tensor,
    numbers: tl.tensor,
    heats: tl.tensor,
    done: tl.tensor,
    every: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    first_id: tl.tensor,
    ranks: tl.constexpr,
    blocks: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """What ranks before the winner in one block."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(done + row) > 0:
        return
    part = tl.program_id(1)
    at = part * columns + tl.arange(0, columns)
    token, value, top = _winner(every, row, rows, ranks)
    source = logits + tl.load(numbers + row).to(tl.int64) * stride + at
    scaled = tl.load(source, mask=at < width, other=float("-inf")).to(tl.float32) / tl.load(heats + row)
    scaled = tl.where(scaled == scaled, scaled, float("-inf"))  # noqa: PLR0124 - as above
    mass = tl.exp(scaled - top)
    before = (scaled > value) | ((scaled == value) & (first_id + at < token))
    before = before & (at < width)
    to = sums + (row * blocks + part) * 3
    tl.store(to, tl.sum(tl.where(before, mass, 0.0), axis=0))
    tl.store(to + 1, tl.sum(before.to(tl.float32), axis=0))
    tl.store(to + 2, tl.sum(mass, axis=0))


@kernel("rows")
def _sum(
    sums: tl.tensor, done: tl.tensor, mine: tl.tensor, rows: tl.tensor, blocks: tl.constexpr, columns: tl.constexpr
) -> None:
    """This rank's blocks together."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(done + row) > 0:
        return
    at = tl.arange(0, columns)
    for each in tl.static_range(3):
        found = tl.load(sums + (row * blocks + at) * 3 + each, mask=at < blocks, other=0.0)
        tl.store(mine + each * rows + row, tl.sum(found, axis=0))


@kernel("rows")
def _judge(
    every: tl.tensor,
    totals: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    done: tl.tensor,
    floor: tl.tensor,
    floor_id: tl.tensor,
    chosen: tl.tensor,
    rows: tl.tensor,
    ranks: tl.constexpr,
) -> None:
    """Whether the cut keeps the winner; else it is the next round's floor."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(done + row) > 0:
        return
    token, value, top = _winner(every, row, rows, ranks)
    above, count, total = 0.0, 0.0, 0.0
    for rank in tl.static_range(ranks):
        source = totals + rank * 3 * rows + row
        above += tl.load(source)
        count += tl.load(source + rows)
        total += tl.load(source + 2 * rows)
    most = tl.load(top_k + row)
    share = tl.load(top_p + row)
    keeps = (most == 0) | (count < most)
    keeps = keeps & ((share >= 1) | (above < share * total)) & (value >= top + tl.load(min_p + row))
    keeps = keeps | (count == 0)
    tl.store(chosen + row, tl.where(keeps, token, -1))
    tl.store(done + row, keeps.to(tl.int32))
    tl.store(floor + row, value)
    tl.store(floor_id + row, token)


@kernel()
def _land(
    numbers: tl.tensor,
    slots: tl.tensor,
    chosen: tl.tensor,
    tokens: tl.tensor,
    last: tl.tensor,
    position: tl.tensor,
    attempt: tl.tensor,
    scratch: tl.tensor,
) -> None:
    """The row's slot takes its token, or will try again with other noise."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(chosen + row)
    slot = tl.load(slots + row)
    tl.store(tokens + tl.load(numbers + row), token)
    tl.store(last + slot, token, mask=(slot < scratch) & (token >= 0))
    tl.store(position + slot, tl.load(position + slot) + 1, mask=(slot < scratch) & (token >= 0))
    tl.store(attempt + slot, tl.where(token >= 0, 0, tl.load(attempt + slot) + 1), mask=slot < scratch)


class Cutter:
    """One rank's part of drawing cut rows; ``last``, ``position`` and ``attempt`` ``[slots + 1]`` are the batch's."""

    def __init__(
        self, start: int, width: int, group: Group, last: Tensor, position: Tensor, attempt: Tensor, outbox: Outbox
    ) -> None:
        self._start, self._width = start, width
        self._group = group
        self._last, self._position, self._attempt = last, position, attempt
        self._scratch = len(last) - 1
        self._outbox = outbox

    def draw(self, logits: Tensor, cuts: Sequence[CutRow], tokens: Tensor) -> None:
        """Fill in ``tokens`` (int32) of these rows, ``NO_TOKEN`` for none; ``logits`` and ``tokens`` are all rows' of the step."""
        rows, device, count = self._sent(cuts), logits.device, len(cuts)
        blocks = max(-(-self._width // COLUMNS), 1)
        facts = torch.empty((count, blocks, _FACTS), device=device)
        sums = torch.empty((count, blocks, _SUMS), device=device)
        best = torch.empty((_FACTS, count), device=device)
        mine = torch.empty((_SUMS, count), device=device)
        done = torch.zeros(count, dtype=torch.int32, device=device)
        floor = torch.full((count,), -inf, device=device)
        floor_id = torch.full((count,), (1 << 31) - 1, dtype=torch.int32, device=device)
        chosen = torch.full((count,), NO_TOKEN, dtype=torch.int32, device=device)
        width = (logits.stride(0), self._width, self._start)
        for number in range(ROUNDS):
            _offer[(count, blocks)](
                *(logits, rows.numbers, rows.slots, rows.positions, rows.attempts, rows.heats, rows.stems),
                *(self._position, self._attempt, done, floor, floor_id, facts, number, ROUNDS, self._scratch),
                *width,
                blocks,
                COLUMNS,
            )
            _choose[(count,)](facts, done, best, count, blocks, block(blocks), num_warps=1)
            every = self._group.gather(best)
            ranks = self._group.size
            _weigh[(count, blocks)](
                *(logits, rows.numbers, rows.heats, done, every, sums, count), *width, ranks, blocks, COLUMNS
            )
            _sum[(count,)](sums, done, mine, count, blocks, block(blocks), num_warps=1)
            totals = self._group.gather(mine)
            _judge[(count,)](
                *(every, totals, rows.top_k, rows.top_p, rows.min_p, done, floor, floor_id, chosen, count),
                ranks,
                num_warps=1,
            )
        _land[(count,)](
            *(rows.numbers, rows.slots, chosen, tokens, self._last, self._position, self._attempt, self._scratch),
            num_warps=1,
        )

    def _sent(self, cuts: Sequence[CutRow]) -> _Rows:
        """The rows' settings; where a row stands is the device's own knowledge, but for prompts' ends."""
        settings = [each.row.sampling for each in cuts]
        stems = [row_stem(each.seed, each.choice) for each in settings]
        sent = self._outbox.send(
            (
                np.array([each.number for each in cuts], np.int32),
                np.array([each.slot if each.slot >= 0 else self._scratch for each in cuts], np.int32),
                np.array([each.row.position for each in cuts], np.int32),
                np.array([each.row.attempt for each in cuts], np.int32),
                np.array([each.temperature for each in settings], np.float32),
                np.array(stems, np.uint64).view(np.int64),
                np.array([each.top_k for each in settings], np.int32),
                np.array([each.top_p for each in settings], np.float32),
                np.array([log(each.min_p) if each.min_p > 0 else -inf for each in settings], np.float32),
            )
        )
        return _Rows(*sent)
