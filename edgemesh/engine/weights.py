"""From a checkpoint to ranks' tensors: every target is filled run by run, in pieces of bounded size.

The model is never in memory twice: beside the targets themselves there is at most one piece (and, for the columns of a
GGUF tensor, that one tensor).
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import torch

from edgemesh.engine.checkpoint import Checkpoint, open_checkpoint
from edgemesh.engine.layout import Run, Split, Target, targets
from edgemesh.engine.shape import Dtype

PIECE_BYTES: Final = 32 << 20
"""Rows are read in pieces of about this size (as float32)."""

DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
}

Progress = Callable[[str, int], None]
"""Called with a target's name and its bytes, once it is filled."""


def fill(checkpoint: Checkpoint, places: Iterable[tuple[Target, torch.Tensor]], progress: Progress) -> None:
    """Copy weights into zeroed tensors. Raises ``ModelError`` that names file and tensor."""
    for target, tensor in places:
        for run in target.runs:
            for piece in _pieces(run, target.shape, checkpoint.shape.head_dim):
                tensor.narrow(piece.axis, piece.at, piece.count).copy_(checkpoint.read(piece))
        progress(target.name, tensor.nbytes)


def shard_all(path: Path | str, split: Split, dtype: Dtype = "float32") -> dict[str, torch.Tensor]:
    """Every weight of one rank in this process's own memory, without a vault."""
    checkpoint = open_checkpoint(Path(path), dtype)
    tensors: dict[str, torch.Tensor] = {}

    def places() -> Iterator[tuple[Target, torch.Tensor]]:
        for target in targets(checkpoint.shape, split):
            if target.same_as:
                tensors[target.name] = tensors[target.same_as]
            else:
                tensors[target.name] = torch.zeros(target.shape, dtype=DTYPES[dtype])
                yield target, tensors[target.name]

    try:
        fill(checkpoint, places(), lambda _name, _nbytes: None)
    finally:
        checkpoint.close()
    return tensors


def _pieces(run: Run, shape: tuple[int, ...], head_dim: int) -> Iterator[Run]:
    """A run of many rows as several of fewer, each of whole heads (a head's rows may be reordered); columns stay whole."""
    step = run.count
    if len(shape) > 1 and run.axis == 0:
        rows = PIECE_BYTES // (4 * shape[1])
        step = max(rows - rows % head_dim, head_dim)
    for start in range(0, run.count, step):
        count = min(step, run.count - start)
        yield msgspec.structs.replace(run, start=run.start + start, count=count, at=run.at + start)
