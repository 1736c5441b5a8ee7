"""Attention of packed prompts over pages, in Triton.

Blocks of keys lie within one page: its size is a power of two from 16 on, or a multiple of 64.
"""

from typing import Final

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from edgemesh.engine.cuda.attention import Prompts
from edgemesh.engine.cuda.jit import block, kernel
from edgemesh.engine.cuda.paged_softmax import nothing, scale_of, weighed

_QUERIES: Final = 64
_KEYS: Final = 64
_NARROW: Final = 128
"""Columns of a head up to which whole blocks of keys fit the shared memory of any card."""

_STAGES: Final = 2
"""Blocks of keys under way at once: with more, fewer programs fit a multiprocessor, and each hides another's softmax."""


@kernel()
def _places(
    page: tl.tensor,
    offset: tl.tensor,
    end: tl.tensor,
    kv_heads: tl.tensor,
    kv_head: tl.tensor,
    page_tokens: tl.constexpr,
    head_dim: tl.constexpr,
    columns: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Where the keys and values of positions of one page lie, and what of that is before the ``end`` of its context.

    What lies after it may be no number: a weight of nothing would not hide it.
    """
    at = tl.arange(0, columns)[None, :]
    place = (page.to(tl.int64) * page_tokens + offset % page_tokens)[:, None] * kv_heads + kv_head
    return place * head_dim + at, (offset < end)[:, None] & (at < head_dim)


@kernel()
def _part(starts: tl.tensor, number: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Where a part begins by running sums of counts, and its count."""
    first = tl.load(starts + number)
    return first, tl.load(starts + number + 1) - first


@kernel()
def _block(
    slab: tl.tensor,
    blocks: tl.tensor,
    place: tl.tensor,
    kv_heads: tl.tensor,
    kv_head: tl.tensor,
    head_dim: tl.constexpr,
    columns: tl.constexpr,
    width: tl.constexpr,
    described: tl.constexpr,
) -> tl.tensor:
    """``width`` tokens of one head's keys or values, from a ``place`` of the slab on.

    ``described``: they come by the descriptor ``blocks``, through the Tensor Memory Accelerator.
    """
    if described:
        return blocks.load([place, kv_head * head_dim])
    else:  # noqa: RET505 - Triton takes no return out of the middle
        at = tl.arange(0, columns)[None, :]
        source = ((place + tl.arange(0, width)).to(tl.int64)[:, None] * kv_heads + kv_head) * head_dim + at
        return tl.load(slab + source, mask=at < head_dim, other=0.0)


@kernel()
def _attend_prompts(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_blocks: tl.tensor,
    value_blocks: tl.tensor,
    table: tl.tensor,
    starts: tl.tensor,
    context_starts: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    table_stride: tl.tensor,
    kv_heads: tl.tensor,
    ratio: tl.constexpr,
    page_tokens: tl.constexpr,
    head_dim: tl.constexpr,
    columns: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    stages: tl.constexpr,
    described: tl.constexpr,
) -> None:
    """A block of one span's rows in one query head: first over the keys that all of them see, in whole blocks, then over the rest."""
    span = tl.program_id(2)
    head = tl.program_id(1)
    first, count = _part(starts, span)
    _, context = _part(context_starts, span)
    blocks = tl.cdiv(count, rows)
    if tl.program_id(0) >= blocks:
        return
    # The last rows see most: what takes longest begins first.
    top = (blocks - 1 - tl.program_id(0)) * rows
    row = top + tl.arange(0, rows)
    at = tl.arange(0, columns)[None, :]
    kv_head = head // ratio
    there = ((first.to(tl.int64) + row)[:, None] * (kv_heads * ratio) + head) * head_dim + at
    inside = (row < count)[:, None] & (at < head_dim)
    query = tl.load(q + there, mask=inside, other=0.0)
    position = context - count + row
    best, total, mixed = nothing(rows, columns)
    seen = context - count + top + 1
    shared = seen // width * width
    pages = table + span * table_stride
    for start in tl.range(0, shared, width, num_stages=stages):
        place = tl.load(pages + start // page_tokens) * page_tokens + start % page_tokens
        key = _block(keys, key_blocks, place, kv_heads, kv_head, head_dim, columns, width, described)
        weight, fade, best, total = weighed(tl.dot(query, tl.trans(key)), best, total, scale)
        value = _block(values, value_blocks, place, kv_heads, kv_head, head_dim, columns, width, described)
        mixed = tl.dot(weight.to(value.dtype), value, mixed * fade[:, None])
    end = tl.minimum(context, seen - 1 + rows)
    for start in tl.range(shared, end, width, num_stages=1):
        offset = start + tl.arange(0, width)
        page = tl.load(pages + start // page_tokens)
        source, here = _places(page, offset, end, kv_heads, kv_head, page_tokens, head_dim, columns)
        key = tl.load(keys + source, mask=here, other=0.0)
        score = tl.where(offset[None, :] <= position[:, None], tl.dot(query, tl.trans(key)), float("-inf"))
        weight, fade, best, total = weighed(score, best, total, scale)
        value = tl.load(values + source, mask=here, other=0.0)
        mixed = tl.dot(weight.to(value.dtype), value, mixed * fade[:, None])
    tl.store(out + there, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)


def attend_prompts(q: Tensor, pages: Tensor, batch: Prompts, *, describes: bool) -> Tensor:
    """``[rows, q_heads * head_dim]`` of q ``[rows, q_heads, head_dim]``: packed runs, each causal up to its context's end.

    ``describes``: the card fetches whole blocks by descriptors.
    """
    heads, head_dim = q.shape[1:]
    page_tokens, kv_heads = pages.shape[2:4]
    out = torch.empty_like(q)
    columns = block(head_dim, 16)
    width = min(_KEYS if columns <= _NARROW else _KEYS // 2, page_tokens)
    described = describes and columns == head_dim
    key_blocks, value_blocks = (_blocks(each, width) if described else each for each in pages)
    _attend_prompts[(-(-batch.longest // _QUERIES), heads, len(batch.table))](
        q,
        pages[0],
        pages[1],
        key_blocks,
        value_blocks,
        batch.table,
        batch.starts,
        batch.context_starts,
        out,
        scale_of(head_dim),
        batch.table.stride(0),
        kv_heads,
        heads // kv_heads,
        page_tokens,
        head_dim,
        columns,
        _QUERIES,
        width,
        _STAGES,
        described,
        num_warps=4,
    )
    return out.flatten(1)


def _blocks(pages: Tensor, width: int) -> TensorDescriptor:
    """Blocks of ``width`` tokens of one head in ``pages`` ``[pages, page_tokens, kv_heads, head_dim]``."""
    head_dim = pages.shape[-1]
    flat = pages.flatten(0, 1).flatten(1)
    return TensorDescriptor.from_tensor(flat, [width, head_dim])
