"""Attention over KV pages on CUDA behind one narrow interface, and the choice of its kernels.

Keys and values are in their pages already when attention is asked for; both kinds of rows read nothing but pages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final, Protocol

import torch
from torch import Tensor

MEASURED: Final = 128
"""The head size for which own kernels for prompts were measured beside flash-attn."""

_HOPPER: Final = 9
"""Major compute capability."""


class AttentionUnavailableError(RuntimeError):
    """The attention kernels that the topology names do not run here."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Runs of prompts, packed one after the other.

    ``starts`` and ``context_starts`` ``[spans + 1]`` are running sums of new tokens and of whole contexts; ``table`` ``[spans, pages]``
    (all int32). The last rows of a span see its whole context.
    """

    starts: Tensor
    context_starts: Tensor
    table: Tensor
    longest: int
    longest_context: int


@dataclass(frozen=True, slots=True)
class Rows:
    """One token of each decoding sequence; ``lengths`` ``[rows]`` counts it, ``table`` ``[rows, pages]`` (both int32)."""

    lengths: Tensor
    table: Tensor


class PagedAttention(Protocol):
    """``[rows, q_heads, head_dim]`` of queries over one layer's ``pages`` ``[2, pages, page_tokens, kv_heads, head_dim]``."""

    name: str

    def prompts(self, q: Tensor, pages: Tensor, batch: Prompts) -> Tensor:
        """``[rows, q_heads * head_dim]`` for packed prompt runs, each row after those before it."""

    def rows(self, q: Tensor, pages: Tensor, batch: Rows) -> Tensor:
        """``[rows, q_heads * head_dim]`` for one token of each sequence."""

    def width_matters(self, rows: int, kv_heads: int) -> bool:
        """Whether a decode step of so many rows is slower over a block table much wider than its contexts."""


class FastestAttention:
    """One backend's kernels for prompts, another's for decode rows."""

    def __init__(self, prompts: PagedAttention, rows: PagedAttention) -> None:
        self.name = f"{prompts.name}, {rows.name}"
        self.prompts = prompts.prompts
        self.rows = rows.rows
        self.width_matters = rows.width_matters


def choose(wanted: str, page_tokens: int, head_dim: int, say: Callable[[str], None]) -> PagedAttention:
    """The kernels for ``auto``, ``flash-attn`` or ``torch``; says which and why. Raises ``AttentionUnavailableError``."""
    obstacle = _flash_obstacle(page_tokens, head_dim)
    if wanted == "flash-attn" and obstacle:
        message = f"engine.attention: 'flash-attn' does not run here: {obstacle}; allowed: 'auto', 'torch'"
        raise AttentionUnavailableError(message)
    from edgemesh.engine.cuda.paged import TritonAttention  # noqa: PLC0415 - Triton is there where cards are

    if wanted == "torch" or obstacle:
        say(f"attention: own Triton kernels ({obstacle or 'as engine.attention says'})")
        return TritonAttention()
    from edgemesh.engine.cuda.flash import FlashAttention, version  # noqa: PLC0415 - it need not be installed

    if wanted == "flash-attn":
        say(f"attention: flash-attn {version()} (as engine.attention says)")
        return FlashAttention()
    if on_hopper() and head_dim == MEASURED:
        say(f"attention: own Triton kernels (on Hopper faster than flash-attn {version()} for prompts and decode rows)")
        return TritonAttention()
    say(f"attention: flash-attn {version()} for prompts, own Triton kernels for decode rows (the faster of each)")
    return FastestAttention(FlashAttention(), TritonAttention())


def on_hopper() -> bool:
    """Whether the current card is an H100, H200 or the like: its Tensor Memory Accelerator feeds the kernels."""
    return torch.cuda.get_device_capability()[0] == _HOPPER


def _flash_obstacle(page_tokens: int, head_dim: int) -> str:
    """Why flash-attn cannot be used, or nothing."""
    if page_tokens % 256:
        return f"its pages are a multiple of 256 tokens, engine.page_tokens is {page_tokens}"
    if head_dim % 8 or head_dim > 256:
        return f"its heads are a multiple of 8 up to 256 wide, the model's are {head_dim}"
    if find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    try:
        from edgemesh.engine.cuda import flash  # noqa: PLC0415 - whether it loads is the question
    except ImportError as error:
        return f"flash-attn does not load: {error}"
    return "" if flash.version() else "flash-attn has no version"
