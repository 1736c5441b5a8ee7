"""One row times a weight matrix: bound by reading the matrix once, which a matrix product's kernels do less well for one row.

``[1, inner]`` times ``[outer, inner]`` transposed; sums are in float32.
"""

from typing import Final

import triton.language as tl
from torch import Tensor

from edgemesh.engine.cuda.jit import block, kernel

_COLUMNS: Final = 4096
"""Columns that a program adds up at a time: one row to a program was the fastest of 1 to 16, for matrices of 4096 to 151936 rows."""


@kernel()
def _dot(x: tl.tensor, weight: tl.tensor, out: tl.tensor, inner: tl.constexpr, columns: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64) * inner
    total = tl.zeros([columns], tl.float32)
    for start in range(0, inner, columns):
        at = start + tl.arange(0, columns)
        here = at < inner
        part = tl.load(weight + row + at, mask=here, other=0.0, eviction_policy="evict_first").to(tl.float32)
        total += part * tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(total, axis=0).to(out.dtype.element_ty))


@kernel()
def _gated(
    x: tl.tensor, weight: tl.tensor, out: tl.tensor, outer: tl.tensor, inner: tl.constexpr, columns: tl.constexpr
) -> None:
    """A gate's rows come first, then as many of ``up``."""
    row = tl.program_id(0).to(tl.int64) * inner
    gate = tl.zeros([columns], tl.float32)
    up = tl.zeros([columns], tl.float32)
    for start in range(0, inner, columns):
        at = start + tl.arange(0, columns)
        here = at < inner
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        source = weight + row + at
        gate += tl.load(source, mask=here, other=0.0, eviction_policy="evict_first").to(tl.float32) * value
        source += outer.to(tl.int64) * inner
        up += tl.load(source, mask=here, other=0.0, eviction_policy="evict_first").to(tl.float32) * value
    # Rounded where a product of matrices would round.
    kind = out.dtype.element_ty
    opened = tl.sum(gate, axis=0).to(kind).to(tl.float32)
    raised = tl.sum(up, axis=0).to(kind).to(tl.float32)
    tl.store(out + tl.program_id(0), (opened / (1 + tl.exp(-opened)) * raised).to(kind))


def dot(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """``[1, outer]`` of ``x`` ``[1, inner]`` and ``weight`` ``[outer, inner]``."""
    outer, inner = weight.shape
    out = x.new_empty((1, outer)) if out is None else out
    _dot[(outer,)](x, weight, out, inner, min(block(inner), _COLUMNS), num_warps=4)
    return out


def gated(x: Tensor, gate_up: Tensor) -> Tensor:
    """``[1, width]``: ``silu(gate(x)) * up(x)`` for ``gate_up`` ``[2 * width, inner]``."""
    both, inner = gate_up.shape
    out = x.new_empty((1, both // 2))
    _gated[(both // 2,)](x, gate_up, out, both // 2, inner, min(block(inner), _COLUMNS // 2), num_warps=8)
    return out
