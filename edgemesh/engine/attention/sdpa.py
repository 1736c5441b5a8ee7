"""Attention in plain torch operations: the CPU's backend, and the reference for all others."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from edgemesh.engine.attention.batch import AttentionBatch, Span


class SdpaAttention:
    """``scaled_dot_product_attention`` over pages that are gathered per layer.

    ``kv`` is the slab ``[layers, 2, pages, page_tokens, kv_heads, head_dim]``. The query heads of one KV head are
    taken as rows of one small matrix, so keys and values are read once per KV head.
    """

    def __init__(self, kv: Tensor) -> None:
        self._pages = kv.flatten(3)
        self._tokens = kv.flatten(2, 3).flatten(3)
        self._page_tokens, self._kv_heads, self._head_dim = kv.shape[3:]
        self._batch: AttentionBatch | None = None
        self._index = torch.empty(0, dtype=torch.int64)
        self._mask = torch.empty(0)
        self._room = (self._pages.new_empty(0), self._pages.new_empty(0))
        self._span_index: list[Tensor] = []
        self._span_mask: list[Tensor | None] = []

    def begin(self, batch: AttentionBatch) -> None:
        """Page indices and masks of the step, shared by its layers."""
        self._batch = batch
        dtype = self._pages.dtype
        self._index = self._index[:0]
        if len(batch.lengths):
            width = math.ceil(batch.longest / self._page_tokens)
            self._index = batch.block_table[:, :width].reshape(-1)
            reach = torch.arange(width * self._page_tokens) >= batch.lengths[:, None]
            self._mask = torch.zeros(reach.shape, dtype=dtype).masked_fill_(reach, -math.inf)[:, None, None, :]
        self._span_index = [span.pages for span in batch.spans]
        self._span_mask = [_lower_right(span, dtype) if span.start else None for span in batch.spans]
        self._make_room(max([len(self._index), *map(len, self._span_index)]))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write, then attend span by span and all decode rows at once."""
        batch = self._batch
        assert batch is not None, "attend before begin"
        keys, values = self._tokens[layer, 0], self._tokens[layer, 1]
        keys.index_copy_(0, batch.places, k.flatten(1))
        values.index_copy_(0, batch.places, v.flatten(1))
        if not batch.spans:
            return self._decode(layer, q)
        outputs = []
        at = 0
        for number, span in enumerate(batch.spans):
            rows = slice(at, at + span.length)
            outputs.append(self._chunk(layer, number, q[rows], k[rows], v[rows]))
            at += span.length
        if at < batch.real:
            outputs.append(self._decode(layer, q[at:]))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _chunk(self, layer: int, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One span: causal over itself, or over the pages before it as well."""
        mask = self._span_mask[number]
        if mask is not None:
            k, v = self._gather(layer, self._span_index[number], 1)
            k, v = k[0, : mask.shape[1]], v[0, : mask.shape[1]]
        q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
        attended = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return attended[0].transpose(0, 1).flatten(1)

    def _decode(self, layer: int, q: Tensor) -> Tensor:
        """Rows of one token each over their own pages."""
        rows = len(q)
        k, v = self._gather(layer, self._index, rows)
        attended = functional.scaled_dot_product_attention(
            q.view(rows, self._kv_heads, -1, self._head_dim), k.transpose(1, 2), v.transpose(1, 2), attn_mask=self._mask
        )
        return attended.reshape(rows, -1)

    def _make_room(self, pages: int) -> None:
        """Buffers for the pages of one layer, kept from step to step: memory fresh from the system costs more than the copy."""
        if pages > len(self._room[0]):
            size = (1 << (pages - 1).bit_length(), self._pages.shape[3])
            self._room = (self._pages.new_empty(size), self._pages.new_empty(size))

    def _gather(self, layer: int, pages: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """``[rows, tokens, kv_heads, head_dim]`` of keys and of values, until the next call."""
        k, v = (
            torch.index_select(self._pages[layer, part], 0, pages, out=self._room[part][: len(pages)])
            for part in (0, 1)
        )
        shape: Sequence[int] = (rows, -1, self._kv_heads, self._head_dim)
        return k.view(shape), v.view(shape)


def _lower_right(span: Span, dtype: torch.dtype) -> Tensor:
    """The causal mask of a span's rows over their whole context."""
    future = torch.arange(span.stop) > torch.arange(span.start, span.stop)[:, None]
    return torch.zeros(future.shape, dtype=dtype).masked_fill_(future, -math.inf)
