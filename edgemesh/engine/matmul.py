"""Products with weights ``[out, in]`` as they lie in shared memory, by the fastest kernel for the type and the number of rows.

Few rows are bound by reading the weights, and the usual product re-arranges them at every call. In bfloat16 the product with the weights on the
left does not (up to 1.7 times as fast; a single row is doubled, since a matrix-vector product re-arranges again). In float32
oneDNN's linear is up to twice as fast as MKL's for 4 to 32 rows. Measured on one core with AMX.
"""

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

FEW_ROWS: Final = 64
"""Up to here turning the result around costs less than what it saves."""

_FLOAT_ROWS: Final = range(4, 33)
_HAS_ONEDNN: Final = hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` for ``[rows, in]``, contiguous."""
    rows = len(x)
    if not weight.is_cuda:
        if weight.dtype is torch.bfloat16 and rows <= FEW_ROWS:
            product = columns(x, weight).t().contiguous()
            return product if bias is None else product.add_(bias)
        if weight.dtype is torch.float32 and rows in _FLOAT_ROWS and _HAS_ONEDNN:
            product = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # noqa: SLF001 - its only name
            assert isinstance(product, Tensor)
            return product
    return functional.linear(x, weight, bias)


def columns(x: Tensor, weight: Tensor) -> Tensor:
    """``weight @ x.T``: ``[out, rows]``."""
    if len(x) == 1:
        return torch.mm(weight, x.expand(2, -1).t())[:, :1]
    return torch.mm(weight, x.t())


def gated_mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """``down(silu(gate(x)) * up(x))`` for ``[rows, in]``; a shard's result is a part of a sum."""
    if gate_up.dtype is torch.bfloat16 and not gate_up.is_cuda and len(x):
        doubled = x if len(x) > 1 else x.expand(2, -1)
        gate, up = torch.mm(gate_up, doubled.t()).chunk(2)
        return torch.mm(down, functional.silu(gate).mul_(up)).t()[: len(x)]
    gate, up = linear(x, gate_up).chunk(2, dim=-1)
    return linear(functional.silu(gate).mul_(up), down)


def logits(x: Tensor, lm_head: Tensor) -> Tensor:
    """``x @ lm_head.T``, not always contiguous."""
    if lm_head.dtype is torch.bfloat16 and not lm_head.is_cuda and len(lm_head):
        return columns(x, lm_head).t()
    return linear(x, lm_head)
