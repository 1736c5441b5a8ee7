"""Top-k, top-p and min-p over a sharded vocabulary: the best tokens of all shards, and what a cut keeps of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from edgemesh.wire.messages import Sampling

CANDIDATES: Final = 128
"""Candidates per shard; a cut that keeps fewer tokens than this is drawn from them exactly."""

_BLOCK: Final = 64


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best tokens of the whole vocabulary, best first: ``[rows, CANDIDATES]`` each; ``lse`` ``[rows]`` over all."""

    values: Tensor
    ids: Tensor
    raws: Tensor
    lse: Tensor


def kept_of(merged: Candidates, settings: Sequence[Sampling], vocab: int) -> tuple[Tensor, Tensor]:
    """Which candidates the cut keeps, and for which rows nothing outside the candidates can be kept."""
    values = merged.values
    masses = (values - merged.lse[:, None]).exp()
    above = torch.stack(
        (masses.cumsum(dim=-1) - masses, torch.arange(CANDIDATES, device=values.device).expand_as(masses)), dim=-1
    )
    kept = torch.stack(
        [keeps(each, value, ahead, value[0]) for each, value, ahead in zip(settings, values, above, strict=True)]
    )
    few = [vocab <= CANDIDATES or 0 < each.top_k <= CANDIDATES for each in settings]
    return kept, (kept.sum(dim=-1) < CANDIDATES) | torch.tensor(few, device=values.device)


def keeps(sampling: Sampling, logits: Tensor, above: Tensor, best: Tensor) -> Tensor:
    """Whether a cut keeps tokens of these logits, given ``above``: [mass, number] of the tokens that rank before each.

    All three cuts are taken of the same distribution (after temperature); the first token is always kept.
    """
    kept = logits > -math.inf
    if sampling.top_k:
        kept &= above[..., 1] < sampling.top_k
    if sampling.top_p < 1.0:
        kept &= above[..., 0] < sampling.top_p
    if sampling.min_p > 0.0:
        kept &= logits >= best + math.log(sampling.min_p)
    return kept | (above[..., 1] == 0)


def top(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` best of each row with their places, best first and equal ones by place; -inf fills up.

    The best lie in the blocks whose maxima are best (of equal ones the first): a scan for maxima is much cheaper than a
    selection over all.
    """
    rows, width = values.shape
    places = torch.arange(width, device=values.device).expand(rows, -1)
    blocks = -(-width // _BLOCK)
    if blocks > 2 * count:
        whole = functional.pad(values, (0, blocks * _BLOCK - width), value=-math.inf).view(rows, blocks, _BLOCK)
        first = whole.amax(dim=-1).sort(dim=-1, descending=True, stable=True).indices[:, :count]
        chosen = first.sort(dim=-1).values
        places = (
            (chosen[..., None] * _BLOCK + torch.arange(_BLOCK, device=values.device)).flatten(1).clamp(max=width - 1)
        )
        values = whole.gather(1, chosen[..., None].expand(-1, -1, _BLOCK)).flatten(1)
    best, order = values.sort(dim=-1, descending=True, stable=True)
    best, order = best[:, :count], order[:, :count]
    places = places.gather(1, order)
    short = count - best.shape[1]
    if short > 0:
        best = functional.pad(best, (0, short), value=-math.inf)
        places = functional.pad(places, (0, short))
    return best, places


def first_best(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Which rank holds the best value, the first of equals (its ids are lower), and the id there."""
    rank = values.argmax(dim=0)
    return rank, ids.gather(0, rank[None])[0]


def bits(values: Tensor) -> Tensor:
    """Floats as int32, to travel beside ids."""
    return values.contiguous().view(torch.int32)


def floats(packed: Tensor) -> Tensor:
    """What ``bits`` packed."""
    return packed.contiguous().view(torch.float32)
