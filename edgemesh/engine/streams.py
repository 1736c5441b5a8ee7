"""How the rows of a step lie on the ranks between the parts of a layer, and the collectives that move them.

The residual stream is whole on a rank that is alone; whole on every rank of a group that is its own coupled set (one
all-reduce per part); and dealt over the ranks of each group in attention DP, where an MLP spans groups: reduce-scatter in the group, norm on the shard,
all-gather over all, MLP, reduce-scatter over all, all-gather in the group. The counts follow from the verdict alone, so
every rank of the set takes the same collectives, with rows or without.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from edgemesh.engine.collectives import Collectives, Group, parts, starts
from edgemesh.wire.ids import Layout
from edgemesh.wire.messages import Verdict


class Stream(Protocol):
    """One step's way through the ranks; ``rows`` is what this rank's group computes attention for, padding included."""

    @property
    def rows(self) -> int:
        """Rows of this rank's group."""

    def enter(self, partial: Tensor) -> Tensor:
        """Embedding parts ``[rows, hidden]`` to the residual stream."""

    def to_attention(self, x: Tensor) -> Tensor:
        """Normed stream to all rows of the group."""

    def from_attention(self, partial: Tensor) -> Tensor:
        """Parts of the attention's output to what is added to the stream."""

    def to_mlp(self, x: Tensor) -> Tensor:
        """Normed stream to the rows that the MLP computes."""

    def from_mlp(self, partial: Tensor) -> Tensor:
        """Parts of the MLP's output to what is added to the stream."""

    def pick(self, x: Tensor, wanted: Sequence[int]) -> Tensor:
        """These rows (ascending) of the stream, on every rank of the group."""


class Whole:
    """Every rank of the group holds every row; with one rank nothing is exchanged and nothing copied."""

    def __init__(self, group: Group, rows: int) -> None:
        self.rows = rows
        self._sum = group.all_reduce

    def enter(self, partial: Tensor) -> Tensor:
        """The sum of the vocabulary's shards."""
        return self._sum(partial)

    def to_attention(self, x: Tensor) -> Tensor:
        """All rows are here."""
        return x

    def from_attention(self, partial: Tensor) -> Tensor:
        """The sum over heads."""
        return self._sum(partial)

    def to_mlp(self, x: Tensor) -> Tensor:
        """All rows are here."""
        return x

    def from_mlp(self, partial: Tensor) -> Tensor:
        """The sum over the MLP's width."""
        return self._sum(partial)

    def pick(self, x: Tensor, wanted: Sequence[int]) -> Tensor:
        """All rows are here."""
        return x if len(wanted) == len(x) else x[list(wanted)]


class Dealt:
    """Each rank of a group holds a run of the group's rows; ``groups`` lists the rows of every group of the set."""

    def __init__(self, collectives: Collectives, groups: Sequence[int]) -> None:
        self._attn, self._world = collectives.attn, collectives.world
        self.rows = groups[self._world.rank // self._attn.size]
        self._shares = parts(self.rows, self._attn.size)
        self._all = tuple(count for rows in groups for count in parts(rows, self._attn.size))

    def enter(self, partial: Tensor) -> Tensor:
        """This rank's rows of the sum of the vocabulary's shards."""
        return self._attn.reduce_scatter(partial, self._shares)

    def to_attention(self, x: Tensor) -> Tensor:
        """All-gather in the group."""
        return self._attn.all_gather(x, self._shares)

    def from_attention(self, partial: Tensor) -> Tensor:
        """Reduce-scatter in the group."""
        return self._attn.reduce_scatter(partial, self._shares)

    def to_mlp(self, x: Tensor) -> Tensor:
        """All-gather over all groups."""
        return self._world.all_gather(x, self._all)

    def from_mlp(self, partial: Tensor) -> Tensor:
        """Reduce-scatter over all groups."""
        return self._world.reduce_scatter(partial, self._all)

    def pick(self, x: Tensor, wanted: Sequence[int]) -> Tensor:
        """Each rank brings those that it holds."""
        begins = starts(self._shares)
        held = [
            [row - start for row in wanted if start <= row < start + share]
            for start, share in zip(begins, self._shares, strict=True)
        ]
        mine = torch.tensor(held[self._attn.rank], dtype=torch.int64, device=x.device)
        return self._attn.all_gather(x.index_select(0, mine), [len(each) for each in held])


class Reduced(Whole):
    """The same by all-reduces alone: each rank of a group holds all the group's rows, and the MLP's rows meet in a sum over all.

    It moves 4.25 units where ``Dealt`` moves 2.5 (two groups), and is there to be measured beside it.
    """

    def __init__(self, collectives: Collectives, groups: Sequence[int]) -> None:
        self._attn, self._world = collectives.attn, collectives.world
        member = self._world.rank // self._attn.size
        super().__init__(self._attn, groups[member])
        self._begin = sum(groups[:member])
        self._total = sum(groups)

    def to_mlp(self, x: Tensor) -> Tensor:
        """One rank of each group brings the group's rows, all others zeros."""
        everyone = x.new_zeros((self._total, *x.shape[1:]))
        if not self._attn.rank:
            everyone[self._begin : self._begin + self.rows] = x
        return self._world.all_reduce(everyone)

    def from_mlp(self, partial: Tensor) -> Tensor:
        """The group's rows of the sum over the MLP's width."""
        return self._world.all_reduce(partial)[self._begin : self._begin + self.rows]


def across(collectives: Collectives, groups: Sequence[int]) -> Stream:
    """The stream of a step whose groups (one, or all that share collectives) run so many rows each."""
    if collectives.world is collectives.attn:
        return Whole(collectives.attn, groups[0])
    return Dealt(collectives, groups) if collectives.scatters else Reduced(collectives, groups)


def stream(collectives: Collectives, verdict: Verdict) -> Stream:
    """The stream of this verdict.

    Where exact counts cost no more than equal ones (shared memory), an even layout is run without its padding.
    """
    group_rows: tuple[int, ...] = verdict.tokens
    if verdict.layout is Layout.EVEN and collectives.world.pads:
        group_rows = (verdict.bucket,) * len(verdict.tokens)
    return across(collectives, group_rows)
