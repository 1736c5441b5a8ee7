"""Attention by the flash-attn package (Dao, 2023): ``flash_attn_varlen_func`` and ``flash_attn_with_kvcache`` over pages of 256."""

import flash_attn
import torch
from flash_attn.flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from edgemesh.engine.cuda.attention import Prompts, Rows


def version() -> str:
    """The package's version."""
    return str(flash_attn.__version__)


class FlashAttention:
    """The kernels for Ampere and later."""

    name = "flash-attn"

    def __init__(self) -> None:
        self._processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count

    def prompts(self, q: Tensor, pages: Tensor, batch: Prompts) -> Tensor:
        """Packed runs, each causal up to its context's end."""
        attended = flash_attn_varlen_func(
            q,
            pages[0],
            pages[1],
            batch.starts,
            batch.context_starts,
            batch.longest,
            batch.longest_context,
            causal=True,
            block_table=batch.table,
        )
        return _flat(attended)

    def rows(self, q: Tensor, pages: Tensor, batch: Rows) -> Tensor:
        """One token a row."""
        attended = flash_attn_with_kvcache(
            q[:, None], pages[0], pages[1], cache_seqlens=batch.lengths, block_table=batch.table, causal=True
        )
        return _flat(attended)

    def width_matters(self, rows: int, kv_heads: int) -> bool:
        """The context is split over processors by the table's width, unless rows and heads fill most of them twice."""
        return rows * kv_heads < 1.6 * self._processors


def _flat(attended: Tensor) -> Tensor:
    return attended.reshape(len(attended), -1)
