"""Attention over pages in Triton: for machines without flash-attn, and where it is faster.

Online softmax (Milakov and Gimelshein, 2018) over blocks of keys; contexts of decoding rows are split over programs and
merged by their log-sum-exp (flash-decoding). Any page size that is a multiple of 16, and any head size, serve.
"""

import math
from typing import Final

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from edgemesh.engine.cuda.attention import Prompts, Rows, on_hopper
from edgemesh.engine.cuda.jit import block, kernel

_QUERIES: Final = 64
_KEYS: Final = 64
_NARROW: Final = 128
"""Columns of a head up to which whole blocks of keys fit the shared memory of any card."""

_PROGRAMS: Final = 512
"""Programs that keep a large GPU busy in a decode step."""

_MOST_SPLITS: Final = 32

_STAGES: Final = 2
"""Blocks of keys under way at once: with more, fewer programs fit a multiprocessor, and each hides another's softmax."""


@kernel()
def _weighed(
    score: tl.tensor, best: tl.tensor, total: tl.tensor, scale: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """A block of scores taken into an online softmax by powers of two: (weights, what the past fades by, best, total)."""
    higher = tl.maximum(best, tl.max(score, axis=1) * scale)
    weight = tl.exp2(score * scale - higher[:, None])
    fade = tl.exp2(best - higher)
    return weight, fade, higher, total * fade + tl.sum(weight, axis=1)


@kernel()
def _nothing(rows: tl.constexpr, columns: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """An online softmax over nothing yet: (best, total, mixed)."""
    best = tl.full([rows], float("-inf"), tl.float32)
    return best, tl.zeros([rows], tl.float32), tl.zeros([rows, columns], tl.float32)


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
    best, total, mixed = _nothing(queries, columns)
    for start in range(begin, end, width):
        offset = start + tl.arange(0, width)
        page = tl.load(table + row * table_stride + start // page_tokens).to(tl.int64)
        place = (page * page_tokens + offset % page_tokens)[:, None] * kv_heads + kv_head
        here = (offset < end)[:, None] & (at < head_dim)
        key = tl.load(keys + place * head_dim + at, mask=here, other=0.0)
        score = tl.where((offset < end)[None, :], tl.dot(query, tl.trans(key)), float("-inf"))
        weight, fade, best, total = _weighed(score, best, total, scale)
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

    ``described``: they come by the descriptor ``blocks``, through the card's copy engine.
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
    best, total, mixed = _nothing(rows, columns)
    seen = context - count + top + 1
    shared = seen // width * width
    pages = table + span * table_stride
    for start in tl.range(0, shared, width, num_stages=stages):
        place = tl.load(pages + start // page_tokens) * page_tokens + start % page_tokens
        key = _block(keys, key_blocks, place, kv_heads, kv_head, head_dim, columns, width, described)
        weight, fade, best, total = _weighed(tl.dot(query, tl.trans(key)), best, total, scale)
        value = _block(values, value_blocks, place, kv_heads, kv_head, head_dim, columns, width, described)
        mixed = tl.dot(weight.to(value.dtype), value, mixed * fade[:, None])
    end = tl.minimum(context, seen - 1 + rows)
    for start in tl.range(shared, end, width, num_stages=1):
        offset = start + tl.arange(0, width)
        page = tl.load(pages + start // page_tokens)
        source, here = _places(page, offset, end, kv_heads, kv_head, page_tokens, head_dim, columns)
        key = tl.load(keys + source, mask=here, other=0.0)
        score = tl.where(offset[None, :] <= position[:, None], tl.dot(query, tl.trans(key)), float("-inf"))
        weight, fade, best, total = _weighed(score, best, total, scale)
        value = tl.load(values + source, mask=here, other=0.0)
        mixed = tl.dot(weight.to(value.dtype), value, mixed * fade[:, None])
    tl.store(out + there, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)


class TritonAttention:
    """Own kernels for any GPU that Triton serves."""

    name = "triton"

    def __init__(self) -> None:
        self._describes = on_hopper()

    def prompts(self, q: Tensor, pages: Tensor, batch: Prompts) -> Tensor:
        """Packed runs, each causal up to its context's end."""
        heads, head_dim = q.shape[1:]
        page_tokens, kv_heads = pages.shape[2:4]
        out = torch.empty_like(q)
        columns = block(head_dim, 16)
        width = min(_KEYS if columns <= _NARROW else _KEYS // 2, page_tokens)
        described = self._describes and columns == head_dim
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
            _scale(head_dim),
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

    def rows(self, q: Tensor, pages: Tensor, batch: Rows) -> Tensor:
        """One token a row."""
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
            _scale(head_dim),
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

    def width_matters(self, rows: int, kv_heads: int) -> bool:
        """Each context is split by its own length."""
        del rows, kv_heads
        return False


def _blocks(pages: Tensor, width: int) -> TensorDescriptor:
    """Blocks of ``width`` tokens of one head in ``pages`` ``[pages, page_tokens, kv_heads, head_dim]``."""
    head_dim = pages.shape[-1]
    flat = pages.flatten(0, 1).flatten(1)
    return TensorDescriptor.from_tensor(flat, [width, head_dim])


def _scale(head_dim: int) -> float:
    """The factor of attention scores, in powers of two."""
    return math.log2(math.e) / math.sqrt(head_dim)
