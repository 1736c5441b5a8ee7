"""Draws greedy and plain-temperature rows on the device: one pass over the logits, one small exchange, no host.

The noise is that of ``edgemesh.engine.noise``, bit by bit up to its logarithms. A row whose heat is negative is drawn elsewhere:
its token here means nothing, and its place in the batch does not move.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton.language as tl
from torch import Tensor

from edgemesh.engine.collectives import Group
from edgemesh.engine.cuda.jit import block, kernel

GREEDY: Final = 0.0
"""The heat of a row that takes its best token."""

ELSEWHERE: Final = -1.0
"""The heat of a row that is drawn after the others, by other kernels or by the sampler."""

COLUMNS: Final = 2048


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows about to draw.

    ``heats`` are temperatures, ``GREEDY`` or ``ELSEWHERE``; ``stems`` (int64) come of seed and choice; ``positions`` are those of the
    drawn tokens, ``slots`` those that take them (the scratch slot for none).
    """

    heats: Tensor
    stems: Tensor
    positions: Tensor
    slots: Tensor

    def __len__(self) -> int:
        return len(self.heats)


@kernel()
def noise(stem: tl.tensor, position: tl.tensor, draw: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Standard Gumbel noise of these token ids, for the ``draw``-th draw of the token at ``position`` of the row of ``stem``."""
    key = stem.to(tl.uint64, bitcast=True)
    for step in tl.static_range(2):
        # SplitMix64's finaliser over the position, then over the number of the draw.
        key += 0x9E3779B97F4A7C15
        if step == 0:
            key += position.to(tl.uint64)
        else:
            key += draw.to(tl.uint64)
        key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9
        key = (key ^ (key >> 27)) * 0x94D049BB133111EB
        key = key ^ (key >> 31)
    x = ids.to(tl.uint32) * 2654435769 + (key & 0xFFFFFFFF).to(tl.uint32)
    x = (x ^ (x >> 16)) * 2246822507
    x = (x ^ (x >> 13)) + (key >> 32).to(tl.uint32)
    x = x * 3266489909
    x = (x ^ (x >> 16)) * 668265263
    x = x ^ (x >> 15)
    uniform = ((x & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10
    uniform = tl.minimum(uniform, 1 - 5.9604644775390625e-08)
    # -log(1 - u), by its series where the difference would lose u's digits.
    series = uniform * (1 + uniform * (1 / 2 + uniform * (1 / 3 + uniform * (1 / 4 + uniform / 5))))
    return -tl.log(tl.where(uniform < 0.02, series, -tl.log(1 - uniform)))


@kernel()
def _best(
    logits: tl.tensor,
    heats: tl.tensor,
    stems: tl.tensor,
    positions: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    first_id: tl.tensor,
    blocks: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """The best score, with noise on hot rows, of one block of one row's logits; of equal ones the first."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * columns + tl.arange(0, columns)
    score = tl.load(logits + row * stride + at, mask=at < width, other=float("-inf")).to(tl.float32)
    # What is no number is never drawn while there is one, and what is drawn is always an id.
    score = tl.where(score == score, score, float("-inf"))  # noqa: PLR0124 - true of all but what is no number
    heat = tl.load(heats + row)
    if heat > 0:
        score = score / heat + noise(tl.load(stems + row), tl.load(positions + row), part * 0, first_id + at)
    best, where = tl.max(score, axis=0, return_indices=True)
    tl.store(values + row * blocks + part, best)
    tl.store(ids + row * blocks + part, first_id + part * columns + where)


@kernel("rows")
def _pair(
    values: tl.tensor, ids: tl.tensor, pair: tl.tensor, rows: tl.tensor, blocks: tl.constexpr, columns: tl.constexpr
) -> None:
    """This rank's best of each row, as (bits of its score, id)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, columns)
    best, where = tl.max(
        tl.load(values + row * blocks + at, mask=at < blocks, other=float("-inf")), axis=0, return_indices=True
    )
    tl.store(pair + row, best.to(tl.int32, bitcast=True))
    tl.store(pair + rows + row, tl.load(ids + row * blocks + where))


@kernel("rows")
def _settle(
    every: tl.tensor,
    heats: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    last: tl.tensor,
    position: tl.tensor,
    rows: tl.tensor,
    scratch: tl.tensor,
    ranks: tl.constexpr,
) -> None:
    """The best of all ranks, the first of equals; the row's slot takes it and moves on."""
    row = tl.program_id(0).to(tl.int64)
    best = tl.load(every + row).to(tl.float32, bitcast=True)
    token = tl.load(every + rows + row)
    for rank in tl.static_range(1, ranks):
        value = tl.load(every + 2 * rank * rows + row).to(tl.float32, bitcast=True)
        higher = value > best
        token = tl.where(higher, tl.load(every + (2 * rank + 1) * rows + row), token)
        best = tl.where(higher, value, best)
    tl.store(tokens + row, token)
    slot = tl.load(slots + row)
    moves = (slot < scratch) & (tl.load(heats + row) >= 0)
    tl.store(last + slot, token, mask=moves)
    tl.store(position + slot, tl.load(position + slot) + 1, mask=moves)


class Drawer:
    """One rank's part of drawing; its logits are those of ids ``[start, start + width)``.

    ``last`` and ``position`` ``[slots + 1]`` are the batch's, the scratch slot last.
    """

    def __init__(self, start: int, width: int, group: Group, last: Tensor, position: Tensor) -> None:
        self._start, self._width = start, width
        self._group = group
        self._last, self._position = last, position

    def draw(self, logits: Tensor, draws: Draws, tokens: Tensor) -> None:
        """Fill ``tokens`` ``[rows]`` (int32) from ``logits`` ``[rows, width]``."""
        rows = len(draws)
        blocks = max(-(-self._width // COLUMNS), 1)
        values = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
        ids = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
        pair = torch.empty((2, rows), dtype=torch.int32, device=logits.device)
        _best[(rows, blocks)](
            logits,
            draws.heats,
            draws.stems,
            draws.positions,
            values,
            ids,
            logits.stride(0),
            self._width,
            self._start,
            blocks,
            COLUMNS,
            num_warps=4,
        )
        _pair[(rows,)](values, ids, pair, rows, blocks, block(blocks), num_warps=1)
        every = self._group.gather(pair)
        _settle[(rows,)](
            every,
            draws.heats,
            draws.slots,
            tokens,
            self._last,
            self._position,
            rows,
            len(self._last) - 1,
            self._group.size,
            num_warps=1,
        )
