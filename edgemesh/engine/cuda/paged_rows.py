"""Attention of decode rows over pages, in Triton.

Contexts are split over programs and merged by their log-sum-exp (flash-decoding). Blocks of keys lie within one page: its size is a power of two
from 16 on, or a multiple of 64.
"""

from typing import Final

import torch
import triton.language as tl
from torch import Tensor

from edgemesh.engine.cuda.attention import Rows
from edgemesh.engine.cuda.jit import block, kernel
from edgemesh.engine.cuda.paged_softmax import nothing, scale_of, weighed

_KEYS: Final = 64
_PROGRAMS: Final = 512
"""Programs that keep a large GPU busy in a decode step."""

_MOST_SPLITS: Final = 32


@kernel()
def _attend_rows(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    lengths: tl.tensor,
    partial: tl.tensor,
    masses: tl.tensor,
    scale: tl.tensor,
    table_stride: tl.tensor,
    kv_heads: tl.tensor,
    page_tokens: tl.constexpr,
    ratio: tl.constexpr,
    queries: tl.constexpr,
    head_dim: tl.constexpr,
    columns: tl.constexpr,
    width: tl.constexpr,
    splits: tl.constexpr,
) -> None:
    """One row's query heads of one KV head over one part of its context."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row)
    share = tl.cdiv(tl.cdiv(length, splits), width) * width
    begin = split * share
    end = tl.minimum(begin + share, length)
    group = tl.arange(0, queries)[:, None]
    at = tl.arange(0, columns)[None, :]
    heads = kv_heads * ratio
    query = tl.load(
        q + (row * heads + kv_head * ratio + group) * head_dim + at,
        mask=(group < ratio) & (at < head_dim),
        other=0.0,
    )
    best, total, mixed = nothing(queries, columns)
    for start in range(begin, end, width):
        offset = start + tl.arange(0, width)
        page = tl.load(table + row * table_stride + start // page_tokens).to(tl.int64)
        place = (page * page_tokens + offset % page_tokens)[:, None] * kv_heads + kv_head
        here = (offset < end)[:, None] & (at < head_dim)
        key = tl.load(keys + place * head_dim + at, mask=here, other=0.0)
        score = tl.where((offset < end)[None, :], tl.dot(query, tl.trans(key)), float("-inf"))
        weight, fade, best, total = weighed(score, best, total, scale)
        value = tl.load(values + place * head_dim + at, mask=here, other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(weight.to(value.dtype), value)
    # A part without keys has mass 0: its logarithm is -inf, and what it mixed is nothing.
    mixed = mixed / tl.maximum(total, 1e-30)[:, None]
    mass = tl.where(total > 0, best + tl.log2(total), float("-inf"))
    to = (row * heads + kv_head * ratio + group) * splits + split
    tl.store(partial + to * head_dim + at, mixed, mask=(group < ratio) & (at < head_dim))
    tl.store(masses + to, mass[:, None], mask=group < ratio)


@kernel()
def _merge(
    partial: tl.tensor,
    masses: tl.tensor,
    out: tl.tensor,
    head_dim: tl.constexpr,
    columns: tl.constexpr,
    splits: tl.constexpr,
) -> None:
    """The parts of one query head, each weighted by its share of the mass."""
    head = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, splits)
    at = tl.arange(0, columns)
    mass = tl.load(masses + head * splits + part)
    weight = tl.exp2(mass - tl.max(mass, axis=0))
    parts = tl.load(
        partial + (head * splits + part[:, None]) * head_dim + at[None, :], mask=at[None, :] < head_dim, other=0.0
    )
    mixed = tl.sum(parts * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    tl.store(out + head * head_dim + at, mixed.to(out.dtype.element_ty), mask=at < head_dim)


def attend_rows(q: Tensor, pages: Tensor, batch: Rows) -> Tensor:
    """``[rows, q_heads * head_dim]`` of q ``[rows, q_heads, head_dim]``, one token of each sequence."""
    rows, heads, head_dim = q.shape
    page_tokens, kv_heads = pages.shape[2:4]
    splits = min(block(-(-_PROGRAMS // (rows * kv_heads))), _MOST_SPLITS)
    partial = q.new_empty((rows, heads, splits, head_dim), dtype=torch.float32)
    masses = q.new_empty((rows, heads, splits), dtype=torch.float32)
    out = torch.empty_like(q)
    ratio, columns = heads // kv_heads, block(head_dim, 16)
    _attend_rows[(rows, kv_heads, splits)](
        q,
        pages[0],
        pages[1],
        batch.table,
        batch.lengths,
        partial,
        masses,
        scale_of(head_dim),
        batch.table.stride(0),
        kv_heads,
        page_tokens,
        ratio,
        block(ratio, 16),
        head_dim,
        columns,
        min(_KEYS, page_tokens),
        splits,
        num_warps=4,
    )
    _merge[(rows * heads,)](partial, masses, out, head_dim, columns, splits, num_warps=1)
    return out.flatten(1)
