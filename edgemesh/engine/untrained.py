"""Weights of noise in the shape of a model's config: to measure speed with, and to compare ways of sharding.

Each tensor is drawn whole from a seed of its own, so that its rows are the same however it is sharded. Weights are uniform
within 1e-3 of zero, norms within 1e-3 of one: activations then keep their size from layer to layer.
"""

import zlib
from pathlib import Path
from typing import Final

import torch

from edgemesh.engine.layout import Run, source_shapes
from edgemesh.engine.shape import Dtype, ModelError, read_shape
from edgemesh.engine.weights import DTYPES

SPREAD: Final = 1e-3


class Untrained:
    """A checkpoint that is drawn rather than read; ``device`` draws, and need not be where the weights go."""

    def __init__(self, path: Path, dtype: Dtype, device: str = "cpu") -> None:
        self.path = path
        self.shape = read_shape(path / "config.json", dtype)
        self._dtype = DTYPES[dtype]
        self._device = device
        self._sizes = source_shapes(self.shape)
        self._drawn: tuple[str, torch.Tensor] | None = None

    def size(self, source: str) -> tuple[int, ...] | None:
        """The shape of a tensor."""
        return self._sizes.get(source)

    def read(self, run: Run) -> torch.Tensor:
        """The rows or columns of a run."""
        if self._drawn is None or self._drawn[0] != run.source:
            self._drawn = None  # before the next one is drawn, or two would be in memory
            self._drawn = run.source, self._draw(run.source)
        return self._drawn[1].narrow(run.axis, run.start, run.count)

    def where(self, source: str) -> str:
        """The config that a tensor's shape is from."""
        return f"{self.path / 'config.json'} ({source})"

    def close(self) -> None:
        """Let go of the last tensor."""
        self._drawn = None

    def _draw(self, source: str) -> torch.Tensor:
        if source not in self._sizes:
            message = f"{self.where(source)}: no tensor of that name"
            raise ModelError(message)
        noise = torch.Generator(self._device)
        noise.manual_seed(zlib.crc32(source.encode()))
        center = 1.0 if source.endswith("norm.weight") else 0.0
        drawn = torch.empty(self._sizes[source], dtype=self._dtype, device=self._device)
        return drawn.uniform_(center - SPREAD, center + SPREAD, generator=noise)
