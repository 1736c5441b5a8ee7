"""Log-probabilities of prompts from logits whose vocabulary is sharded over the attention group.

Rows are taken a slice at a time, so that memory has a bound whatever the prompt. Of each slice the ranks exchange the target's logit, then
each shard's log-sum-exp, its best few, and how many of its logits are larger than the target's: never the logits themselves. How many
slices there are, and how large each exchange is, follows from the plan alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgemesh.engine.collectives import Group
from edgemesh.engine.cuts import bits, floats, top
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.messages import Prefill, PromptLogprobs, Scoring

SLICE_BYTES: Final = 16 << 20
"""Logits of one slice on one rank, as float32; the search for the best ones takes some five times as much beside them."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The rows of a step's prompts whose hidden states are asked for, ascending; which of them draw, and which are scored."""

    rows: list[int]
    draws: list[int]
    scored: list[int]


def asked(prefill: Prefill) -> Asked:
    """What the chunks of a step ask for: the last row of a final one, and those that it scores, in the order of the chunks."""
    rows: list[int] = []
    draws: list[int] = []
    scored: list[int] = []
    lengths = [chunk.length for chunk in prefill.chunks]
    for begin, chunk in zip(accumulate(lengths[:-1], initial=0), prefill.chunks, strict=True):
        last = begin + chunk.length - 1
        if chunk.scoring is not None:
            first = begin + chunk.scoring.first - chunk.start
            scored.extend(range(len(rows), len(rows) + len(chunk.scoring.targets)))
            rows.extend(range(first, first + len(chunk.scoring.targets)))
        if chunk.final:
            # Where the last row is scored too (its next token is known already), one hidden state serves both.
            if not rows or rows[-1] != last:
                rows.append(last)
            draws.append(len(rows) - 1)
    return Asked(rows, draws, scored)


def targets_of(wanted: Sequence[Scoring]) -> NDArray[np.int64]:
    """The tokens that are looked for, row by row."""
    return np.concatenate([np.frombuffer(each.targets.buffer, np.int32) for each in wanted]).astype(np.int64)


def most_of(wanted: Sequence[Scoring]) -> int:
    """Alternatives of the chunk that is asked for most."""
    return max(each.top for each in wanted)


def scorings(prefill: Prefill | None) -> list[Scoring]:
    """What the chunks are asked for, in order."""
    return [chunk.scoring for chunk in prefill.chunks if chunk.scoring is not None] if prefill else []


class Scorer:
    """One rank's part; its logits are those of ids ``[start, start + width)`` of ``vocab``."""

    def __init__(self, start: int, width: int, vocab: int, group: Group, device: torch.device | None = None) -> None:
        self._start, self._width, self._vocab = start, width, vocab
        self._group, self._device = group, device
        # Every rank must cut alike, so by the widest shard.
        self._slice = max(1, SLICE_BYTES // (4 * -(-vocab // group.size)))

    def score(self, hidden: Tensor, targets: Tensor, logits: Callable[[Tensor], Tensor], most: int) -> Tensor:
        """``[rows, 2 + 2 * most]`` (int32), laid out as ``PromptLogprobs``, for ``hidden`` ``[rows, hidden]`` and ``targets`` ``[rows]`` (int64).

        ``logits`` makes ``[rows, width]`` of hidden states; ``most`` alternatives are found, or as many as there are tokens.
        """
        count = min(most, self._vocab)
        parts = zip(torch.split(hidden, self._slice), torch.split(targets, self._slice), strict=True)
        return torch.cat([self._part(logits(rows), target, count) for rows, target in parts])

    def _part(self, logits: Tensor, targets: Tensor, count: int) -> Tensor:
        """One slice: targets first, since their logits are compared with those of all shards."""
        logits = logits.float() if self._width else torch.full((len(targets), 1), -math.inf, device=self._device)
        at = targets - self._start
        here = (at >= 0) & (at < self._width)
        own = logits.gather(1, (at * here)[:, None])[:, 0].masked_fill(~here, -math.inf)
        target = floats(self._group.gather(bits(own))).amax(dim=0)
        larger = (logits > target[:, None]).sum(dim=-1, dtype=torch.int32)
        best, places = top(logits, count)
        facts = (bits(logits.logsumexp(dim=-1))[:, None], larger[:, None], bits(best), places.int() + self._start)
        every = self._group.gather(torch.cat(facts, dim=-1))
        total = floats(every[..., 0]).logsumexp(dim=0)[:, None]
        rank = 1 + every[..., 1].sum(dim=0, dtype=torch.int32)
        best, order = floats(_merged(every[..., 2 : 2 + count])).sort(dim=-1, descending=True, stable=True)
        best, order = best[:, :count], order[:, :count]
        ids = _merged(every[..., 2 + count :]).gather(1, order)
        pairs = torch.stack((ids, bits(best - total)), dim=-1).flatten(1)
        return torch.cat((bits(target[:, None] - total), rank[:, None], pairs), dim=-1)


def _merged(every: Tensor) -> Tensor:
    """``[rows, ranks * count]`` of every rank's ``[rows, count]``, in rank order."""
    return every.transpose(0, 1).flatten(1)


def packed(found: Tensor, wanted: Sequence[Scoring]) -> tuple[PromptLogprobs, ...]:
    """What ``Scorer.score`` found, on the host, as the answer of each chunk, with as many alternatives as it asked for."""
    made = []
    for each, rows in zip(wanted, torch.split(found, [len(each.targets) for each in wanted]), strict=True):
        width = min(2 + 2 * each.top, rows.shape[1])
        numbers = rows[:, :width].contiguous().numpy().tobytes()
        made.append(PromptLogprobs(each.first, (width - 2) // 2, TokenArray(numbers)))
    return tuple(made)
