"""Named groups of ranks and what they exchange; there is no default group.

``attn`` is one group's ranks and ``world`` one coupled set's. Each backend offers the same few operations; every
wait in it ends at a deadline with an error that names the ranks that did not come. Sums of several ranks are made in rank order with
float32 accumulation, so that all ranks hold the same bits.
"""

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, Protocol

import torch
from torch import Tensor

from edgemesh.engine.faults import CollectiveError, CollectiveTimeoutError

__all__ = [
    "Backend",
    "CollectiveError",
    "CollectiveTimeoutError",
    "Collectives",
    "Deadline",
    "Group",
    "alone",
    "parts",
    "starts",
    "sum_ranks",
]

DEFAULT_WAIT_NS: Final = 60_000_000_000


class Deadline:
    """Until when a rank waits for its peers: one object for all groups of a rank, moved before each step."""

    def __init__(self, wait_ns: int = DEFAULT_WAIT_NS) -> None:
        self.at_ns = time.monotonic_ns() + wait_ns

    def allow(self, wait_ns: int) -> None:
        """Waits from now on end ``wait_ns`` from now."""
        self.at_ns = time.monotonic_ns() + wait_ns

    @property
    def passed(self) -> bool:
        """Whether waiting is over."""
        return time.monotonic_ns() >= self.at_ns

    @property
    def left_s(self) -> float:
        """Seconds that are left, at least one millisecond."""
        return max(0.001, (self.at_ns - time.monotonic_ns()) / 1e9)


class Backend(Protocol):
    """How the ranks of one group reach each other; rows are the first dimension, ``counts`` rows per rank."""

    @property
    def pads(self) -> bool:
        """Whether equal parts are cheaper here than exact ones."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in the type of ``x``."""

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """This rank's ``[counts[rank], ...]`` rows of the sum of ``[sum(counts), ...]``."""

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """``[sum(counts), ...]`` from every rank's ``[counts[rank], ...]``, in rank order."""

    def gather(self, x: Tensor) -> Tensor:
        """``[size, ...]``: a small tensor of the same shape from every rank."""


class Group:
    """One named group as its member ``rank`` sees it; a group of one exchanges nothing.

    ``spent_ns`` counts the time inside collectives, waiting included.
    """

    def __init__(self, name: str, rank: int, size: int, backend: Backend | None) -> None:
        if size > 1 and backend is None:
            message = f"group {name!r} has {size} ranks and no way between them"
            raise ValueError(message)
        self.name = name
        self.rank = rank
        self.size = size
        self.spent_ns = 0
        self._backend = backend

    @property
    def backend(self) -> Backend | None:
        """The way between the ranks, if there are several."""
        return self._backend

    @property
    def pads(self) -> bool:
        """Whether equal parts are cheaper than exact ones."""
        return self._backend is not None and self._backend.pads

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``."""
        if self._backend is None or not x.numel():
            return x
        began = time.perf_counter_ns()
        summed = self._backend.all_reduce(x)
        self.spent_ns += time.perf_counter_ns() - began
        return summed

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """This rank's rows of the sum of every rank's ``x`` ``[sum(counts), ...]``."""
        if self._backend is None or not x.numel():
            return x
        began = time.perf_counter_ns()
        part = self._backend.reduce_scatter(x, counts)
        self.spent_ns += time.perf_counter_ns() - began
        return part

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Every rank's rows, in rank order."""
        if self._backend is None or not any(counts):
            return x
        began = time.perf_counter_ns()
        rows = self._backend.all_gather(x, counts)
        self.spent_ns += time.perf_counter_ns() - began
        return rows

    def gather(self, x: Tensor) -> Tensor:
        """``[size, ...]`` from every rank's small ``x``."""
        if self._backend is None:
            return x[None]
        began = time.perf_counter_ns()
        stacked = self._backend.gather(x)
        self.spent_ns += time.perf_counter_ns() - began
        return stacked

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.gather(torch.zeros(1, dtype=torch.int32))


class Collectives:
    """The two groups of one rank; they are the same object where a coupled set is one group.

    ``scatters``: rows go from attention to MLP and back by reduce-scatter and all-gather, not by all-reduce alone.
    """

    def __init__(self, attn: Group, world: Group, deadline: Deadline, *, scatters: bool = True) -> None:
        self.attn = attn
        self.world = world
        self.deadline = deadline
        self.scatters = scatters

    @property
    def spent_ns(self) -> int:
        """Time spent in collectives since the start."""
        spent = self.attn.spent_ns
        return spent if self.world is self.attn else spent + self.world.spent_ns


def alone() -> Collectives:
    """The groups of a rank that is alone in both."""
    group = Group("attn", 0, 1, None)
    return Collectives(group, group, Deadline())


def parts(rows: int, ranks: int) -> tuple[int, ...]:
    """``rows`` dealt to ``ranks`` as evenly as can be, the first ones getting one more."""
    each, more = divmod(rows, ranks)
    return tuple(each + (rank < more) for rank in range(ranks))


def starts(counts: Sequence[int]) -> tuple[int, ...]:
    """Where each rank's rows begin."""
    return (0, *accumulate(counts[:-1]))


def sum_ranks(parts_of: Sequence[Tensor]) -> Tensor:
    """The sum in rank order, accumulated in float32, in the parts' own type."""
    total = parts_of[0].to(torch.float32, copy=True)
    for part in parts_of[1:]:
        total.add_(part)
    return total.to(parts_of[0].dtype)
