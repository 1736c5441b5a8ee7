"""What one step asks of attention: whose tokens the rows are, and in which pages their context lies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """A run of one sequence's prompt: ``length`` rows from position ``start``; ``pages`` ``[pages]`` covers up to the last."""

    start: int
    length: int
    pages: Tensor

    @property
    def stop(self) -> int:
        """The context of its last row."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The rows of a step: those of ``spans`` one after the other, then one per decoding sequence; padding follows.

    ``places`` ``[spans' rows + decode rows]``: the token's place in the slab, ``page * page_tokens + offset``. ``block_table``
    ``[decode rows, pages]`` is wide enough for ``longest``, filled with page 0; ``lengths`` ``[decode rows]`` counts the row's own token.
    """

    spans: Sequence[Span]
    places: Tensor
    block_table: Tensor
    lengths: Tensor
    longest: int

    @property
    def real(self) -> int:
        """Rows that are not padding."""
        return len(self.places)


class Attention(Protocol):
    """Writes a step's keys and values into pages, and attends to all that the pages hold."""

    def begin(self, batch: AttentionBatch) -> None:
        """Prepare for all layers of one step."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``[real, q_local * head_dim]`` from ``q`` ``[real, q_local, head_dim]`` and ``k``, ``v`` ``[real, kv_local, head_dim]``."""
