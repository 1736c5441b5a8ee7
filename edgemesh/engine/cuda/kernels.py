"""The small kernels between the matrix products: each reads its inputs once and writes its outputs once.

Sums and norms are made in float32; rows are the first dimension everywhere, and no rows launch nothing.
"""

from typing import Final

import torch
import triton.language as tl
from torch import Tensor

from edgemesh.engine.cuda.jit import block, kernel

_HEADS: Final = 16
"""Heads of one token that one program turns."""

_WIDTH: Final = 1024
"""Columns of one row that one program multiplies."""


@kernel()
def _norm(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    adds: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, columns)
    here = at < width
    value = tl.load(x + row + at, mask=here, other=0.0).to(tl.float32)
    if adds:
        value += tl.load(delta + row + at, mask=here, other=0.0).to(tl.float32)
        tl.store(x + row + at, value.to(x.dtype.element_ty), mask=here)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    weighted = value * scale * tl.load(weight + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row + at, weighted.to(out.dtype.element_ty), mask=here)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of ``[rows, width]``."""
    return _normed(x, None, weight, eps)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x += delta`` in place, and the RMSNorm of the sum."""
    return _normed(x, delta, weight, eps)


def _normed(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    rows, width = x.shape
    if rows:
        adds = delta is not None
        columns = block(width)
        _norm[(rows,)](x, delta if adds else x, weight, out, width, eps, adds, columns, num_warps=_warps(columns))
    return out


def _warps(columns: int) -> int:
    return min(max(columns // 512, 1), 16)


@kernel()
def _turn(
    qkv: tl.tensor,
    positions: tl.tensor,
    places: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    q_out: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    q_heads: tl.tensor,
    kv_heads: tl.tensor,
    eps: tl.tensor,
    head_dim: tl.constexpr,
    heads: tl.constexpr,
    columns: tl.constexpr,
    norms: tl.constexpr,
) -> None:
    """Heads lie as q, k, v; each pair (column, column + half) of q and k turns by its position's angle."""
    half: tl.constexpr = head_dim // 2
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)[:, None]
    at = tl.arange(0, columns)[None, :]
    here = (at < half) & (head < q_heads + 2 * kv_heads)
    source = qkv + row * (q_heads + 2 * kv_heads) * head_dim + head * head_dim + at
    low = tl.load(source, mask=here, other=0.0).to(tl.float32)
    high = tl.load(source + half, mask=here, other=0.0).to(tl.float32)
    is_q = head < q_heads
    is_v = head >= q_heads + kv_heads
    if norms:
        scale = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / head_dim + eps)[:, None]
        weights = tl.where(is_q, q_norm + at, k_norm + at)
        low_weight = tl.load(weights, mask=here, other=0.0).to(tl.float32)
        high_weight = tl.load(weights + half, mask=here, other=0.0).to(tl.float32)
        low = tl.where(is_v, low, low * scale * low_weight)
        high = tl.where(is_v, high, high * scale * high_weight)
    angle = tl.load(positions + row).to(tl.int64) * half + at
    c = tl.load(cos + angle, mask=at < half, other=0.0)
    s = tl.load(sin + angle, mask=at < half, other=0.0)
    first = tl.where(is_v, low, low * c - high * s)
    second = tl.where(is_v, high, high * c + low * s)
    kind = q_out.dtype.element_ty
    place = tl.load(places + row) * kv_heads * head_dim
    to_q = q_out + row * q_heads * head_dim + head * head_dim + at
    to_k = keys + place + (head - q_heads) * head_dim + at
    to_v = values + place + (head - q_heads - kv_heads) * head_dim + at
    is_k = (head >= q_heads) & (head < q_heads + kv_heads)
    tl.store(to_q, first.to(kind), mask=here & is_q)
    tl.store(to_q + half, second.to(kind), mask=here & is_q)
    tl.store(to_k, first.to(kind), mask=here & is_k)
    tl.store(to_k + half, second.to(kind), mask=here & is_k)
    tl.store(to_v, first.to(kind), mask=here & is_v)
    tl.store(to_v + half, second.to(kind), mask=here & is_v)


class Turner:
    """q and k normed (where the model does so) and turned, k and v put into their pages: one pass over ``qkv``.

    ``cos`` and ``sin`` are ``[positions, head_dim / 2]`` in float32.
    """

    def __init__(self, cos: Tensor, sin: Tensor, q_heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        self._cos, self._sin = cos, sin
        self._q_heads, self._kv_heads, self._head_dim = q_heads, kv_heads, head_dim
        self._eps = eps

    def turn(
        self, qkv: Tensor, positions: Tensor, places: Tensor, norms: tuple[Tensor, Tensor] | None, pages: Tensor
    ) -> Tensor:
        """``[rows, q_heads, head_dim]`` of q; ``pages`` ``[2, pages, page_tokens, kv_heads, head_dim]`` takes k and v.

        ``places`` ``[rows]`` (int64) are ``page * page_tokens + offset``.
        """
        rows = len(qkv)
        q_out = qkv.new_empty((rows, self._q_heads, self._head_dim))
        heads = self._q_heads + 2 * self._kv_heads
        q_norm, k_norm = norms or (qkv, qkv)
        _turn[(rows, -(-heads // _HEADS))](
            qkv,
            positions,
            places,
            self._cos,
            self._sin,
            q_norm,
            k_norm,
            q_out,
            pages[0],
            pages[1],
            self._q_heads,
            self._kv_heads,
            self._eps,
            self._head_dim,
            _HEADS,
            block(self._head_dim // 2),
            norms is not None,
            num_warps=4,
        )
        return q_out


@kernel()
def _silu_mul(gate_up: tl.tensor, out: tl.tensor, width: tl.tensor, columns: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * columns + tl.arange(0, columns)
    here = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=here, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=here)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` ``[rows, width]`` of ``[rows, 2 * width]``."""
    rows, both = gate_up.shape
    out = gate_up.new_empty((rows, both // 2))
    if rows:
        _silu_mul[(rows, -(-both // 2 // _WIDTH))](gate_up, out, both // 2, _WIDTH, num_warps=4)
    return out
