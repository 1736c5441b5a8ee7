"""Collectives of processes of one host over memory that they already share.

Each rank writes only its own slots and its own counter. A collective is: copy into my slot, publish my counter, wait
until every counter is there, read. Slots alternate, so one wait per exchange is enough: who publishes exchange ``n + 1`` has
read ``n``, and a slot is written again in ``n + 2``. A counter starts at its epoch, so what a dead epoch left is always behind.

A counter must not become visible before the data that it announces. x86-64 keeps stores in order (total store order), and no
other machine is accepted; elsewhere the gloo backend serves.
"""

import os
import platform
import time
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from edgemesh.engine.collectives import CollectiveTimeoutError, Deadline, parts, starts

LINE_BYTES: Final = 64
"""A counter has a cache line of its own."""

HEADER_BYTES: Final = 4096
MAX_SLOT_BYTES: Final = 1 << 20
"""Larger tensors go in pieces of this size, which stay in the cache between writer and reader."""

ONE_SHOT_BYTES: Final = 1 << 16
"""Up to this size every rank sums everything itself: one wait instead of two."""

EPOCH_SHIFT: Final = 40

_YIELD_NS: Final = 2_000_000
"""How long a waiting rank yields its core between looks before it sleeps: a peer in a long kernel must not share its core with
a poller."""

_LONGEST_SLEEP_S: Final = 1e-3
_SLEEP_SHARE: Final = 16
"""A sleep is this part of what was waited so far, so it adds little to a long wait and takes little from who computes."""


def usable() -> bool:
    """Whether this machine keeps the order of stores."""
    return platform.machine() in {"x86_64", "AMD64"}


def region_bytes(size: int) -> int:
    """Bytes that a group of ``size`` uses at most."""
    return HEADER_BYTES + 2 * size * MAX_SLOT_BYTES


class SharedBackend:
    """One rank's end of a group over ``region``, a uint8 tensor that all its ranks map, zero before its first use."""

    pads = False

    def __init__(self, name: str, rank: int, size: int, region: Tensor, epoch: int, deadline: Deadline) -> None:
        slot = min(MAX_SLOT_BYTES, (region.numel() - HEADER_BYTES) // (2 * size)) // LINE_BYTES * LINE_BYTES
        if not usable() or slot <= 0 or size * LINE_BYTES > HEADER_BYTES:
            message = f"group {name!r}: {size} ranks on {platform.machine()} cannot share {region.numel()} bytes"
            raise ValueError(message)
        self._name, self._rank, self._size, self._deadline = name, rank, size, deadline
        self._counters = region[: size * LINE_BYTES].numpy().data.cast("B").cast("q")
        self._stride = LINE_BYTES // 8
        self._peers = [each * self._stride for each in range(size) if each != rank]
        self._slots = region[HEADER_BYTES : HEADER_BYTES + 2 * size * slot].view(2, size, slot)
        self._typed: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        self._number = epoch << EPOCH_SHIFT

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks; each sums everything itself if that is little."""
        flat = x.reshape(-1)
        if x.nbytes <= min(ONE_SHOT_BYTES, self._slots.shape[2]):
            return self._exchange(flat)[:, : len(flat)].sum(0, dtype=torch.float32).to(x.dtype).view_as(x)
        shares = parts(len(flat), self._size)
        return self.all_gather(self.reduce_scatter(flat, shares), shares).view_as(x)

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """This rank's rows of the sum, piece by piece."""
        width = x[0].numel()
        start = starts(counts)[self._rank]
        stop = start + counts[self._rank]
        out = x.new_empty((counts[self._rank], *x.shape[1:]))
        step = self._rows(x, width)
        for at in range(0, len(x), step):
            piece = x[at : at + step]
            slots = self._exchange(piece.reshape(-1))
            low, high = max(start, at), min(stop, at + len(piece))
            if low < high:
                summed = slots[:, (low - at) * width : (high - at) * width].sum(0, dtype=torch.float32)
                out[low - start : high - start] = summed.view(-1, *x.shape[1:])
        return out

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Every rank's rows, piece by piece."""
        width = x.shape[1:].numel()
        begins = starts(counts)
        out = x.new_empty((sum(counts), *x.shape[1:]))
        step = self._rows(x, width)
        if min(counts) == max(counts) <= step:
            out.view(self._size, -1).copy_(self._exchange(x.reshape(-1))[:, : counts[0] * width])
            return out
        for at in range(0, max(counts), step):
            slots = self._exchange(x[at : at + step].reshape(-1))
            for slot, begin, count in zip(slots, begins, counts, strict=True):
                rows = min(count - at, step)
                if rows > 0:
                    out[begin + at : begin + at + rows].view(-1).copy_(slot[: rows * width])
        return out

    def gather(self, x: Tensor) -> Tensor:
        """``[size, ...]``, piece by piece."""
        flat = x.reshape(-1)
        step = self._slots.shape[2] // x.element_size()
        out = x.new_empty((self._size, *x.shape))
        every = out.view(self._size, -1)
        for at in range(0, len(flat), step):
            piece = flat[at : at + step]
            every[:, at : at + step] = self._exchange(piece)[:, : len(piece)]
        return out

    def _rows(self, x: Tensor, width: int) -> int:
        """Rows of ``x`` that fit a slot."""
        rows = self._slots.shape[2] // (width * x.element_size())
        if not rows:
            message = (
                f"group {self._name!r}: a row of {width} elements does not fit a slot of {self._slots.shape[2]} bytes"
            )
            raise ValueError(message)
        return rows

    def _exchange(self, flat: Tensor) -> Tensor:
        """Publish ``flat``; once all have published theirs, ``[size, slot]`` to read until the next exchange."""
        typed = self._typed.get(flat.dtype)
        if typed is None:
            views = [each.view(flat.dtype) for each in self._slots]
            typed = self._typed[flat.dtype] = [(each, each[self._rank]) for each in views]
        self._number += 1
        slots, mine = typed[self._number & 1]
        if len(flat):
            mine[: len(flat)].copy_(flat)
        self._counters[self._rank * self._stride] = self._number
        for peer in self._peers:
            if self._counters[peer] < self._number:
                self._wait(peer)
        return slots

    def _wait(self, peer: int) -> None:
        """Yield the core, later sleep, until a peer's counter is there."""
        counters, number = self._counters, self._number
        began = time.monotonic_ns()
        while counters[peer] < number:
            waited = time.monotonic_ns() - began
            if waited < _YIELD_NS:
                os.sched_yield()
            elif self._deadline.passed:
                late = [each for each in range(self._size) if counters[each * self._stride] < number]
                raise CollectiveTimeoutError(self._name, late)
            else:
                time.sleep(min(_LONGEST_SLEEP_S, waited / _SLEEP_SHARE / 1e9))
