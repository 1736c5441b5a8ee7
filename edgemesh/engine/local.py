"""Collectives among the threads of one process: layers and shards can be checked at any size without processes."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from edgemesh.engine.collectives import (
    Collectives,
    CollectiveTimeoutError,
    Deadline,
    Group,
    starts,
    sum_ranks,
)


@dataclass(slots=True)
class _Round:
    """One collective: what each rank brought, and how many have taken the whole."""

    brought: dict[int, Tensor] = field(default_factory=dict)
    taken: int = 0


class LocalHub:
    """Where the ranks of one group meet; every collective is one round, counted by each rank for itself."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._rounds: dict[int, _Round] = {}
        self._change = threading.Condition()

    def swap(self, rank: int, number: int, x: Tensor, deadline: Deadline) -> list[Tensor]:
        """Bring ``x`` to round ``number`` and take what all brought."""
        with self._change:
            meeting = self._rounds.setdefault(number, _Round())
            meeting.brought[rank] = x.clone()
            self._change.notify_all()
            if not self._change.wait_for(lambda: len(meeting.brought) == self.size, deadline.left_s):
                missing = [each for each in range(self.size) if each not in meeting.brought]
                raise CollectiveTimeoutError(self.name, missing)
            meeting.taken += 1
            if meeting.taken == self.size:
                del self._rounds[number]
            return [meeting.brought[each] for each in range(self.size)]


class LocalBackend:
    """One thread's end of a hub."""

    def __init__(self, hub: LocalHub, rank: int, deadline: Deadline, *, pads: bool = False) -> None:
        self.pads = pads
        self._hub = hub
        self._rank = rank
        self._deadline = deadline
        self._number = 0

    def _swap(self, x: Tensor) -> list[Tensor]:
        self._number += 1
        return self._hub.swap(self._rank, self._number, x, self._deadline)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all threads."""
        return sum_ranks(self._swap(x))

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """This thread's rows of the sum."""
        start, count = starts(counts)[self._rank], counts[self._rank]
        return sum_ranks([each[start : start + count] for each in self._swap(x)])

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Every thread's rows."""
        rows = self._swap(x)
        assert [len(each) for each in rows] == list(counts)
        return torch.cat(rows)

    def gather(self, x: Tensor) -> Tensor:
        """Every thread's tensor."""
        return torch.stack(self._swap(x))


def local_collectives(attn_tp: int, groups: int, *, pads: bool = False, scatters: bool = True) -> list[Collectives]:
    """The collectives of every rank of a coupled set of ``groups``, one for each thread."""
    size = attn_tp * groups
    world_hub = LocalHub("world", size)
    made = []
    for group in range(groups):
        attn_hub = LocalHub("attn", attn_tp)
        for rank in range(attn_tp):
            deadline = Deadline()
            attn = Group("attn", rank, attn_tp, _end(attn_hub, rank, deadline, pads=pads))
            world = attn
            if groups > 1:
                number = group * attn_tp + rank
                world = Group("world", number, size, _end(world_hub, number, deadline, pads=pads))
            made.append(Collectives(attn, world, deadline, scatters=scatters))
    return made


def _end(hub: LocalHub, rank: int, deadline: Deadline, *, pads: bool) -> LocalBackend | None:
    return LocalBackend(hub, rank, deadline, pads=pads) if hub.size > 1 else None
