"""Attention over pages by Triton kernels of our own: for machines without flash-attn, and where they are faster."""

from torch import Tensor

from edgemesh.engine.cuda.attention import Prompts, Rows, on_hopper
from edgemesh.engine.cuda.paged_prompts import attend_prompts
from edgemesh.engine.cuda.paged_rows import attend_rows


class TritonAttention:
    """Own kernels for any GPU that Triton serves, and any head size."""

    name = "triton"

    def __init__(self) -> None:
        self._describes = on_hopper()

    def prompts(self, q: Tensor, pages: Tensor, batch: Prompts) -> Tensor:
        """Packed runs, each causal up to its context's end."""
        return attend_prompts(q, pages, batch, describes=self._describes)

    def rows(self, q: Tensor, pages: Tensor, batch: Rows) -> Tensor:
        """One token a row."""
        return attend_rows(q, pages, batch)

    def width_matters(self, rows: int, kv_heads: int) -> bool:
        """Each context is split by its own length."""
        del rows, kv_heads
        return False
