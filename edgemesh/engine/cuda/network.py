"""The dense decoder network on one GPU's shards: the matrix products are cuBLAS's, all between them is fused."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from edgemesh.engine.cuda import matvec
from edgemesh.engine.cuda.kernels import Turner, add_rms_norm, rms_norm, silu_mul
from edgemesh.engine.layers import rope_frequencies
from edgemesh.engine.layout import Split, local
from edgemesh.engine.shape import ModelShape
from edgemesh.engine.streams import Stream
from edgemesh.engine.tensors import Embedding, layer_tensors

Attend = Callable[[Tensor, Tensor], Tensor]
"""From q ``[real, q_heads, head_dim]`` and one layer's pages to ``[real, q_heads * head_dim]``."""


class CudaNetwork:
    """A decoder over the tensors of one rank (``edgemesh.engine.layout`` names them)."""

    def __init__(self, shape: ModelShape, split: Split, tensors: Mapping[str, Tensor], max_positions: int) -> None:
        self.sizes = local(shape, split)
        self._eps = shape.norm_eps
        self._embedding = Embedding(tensors["embed"], self.sizes, alone=split.attn_tp == 1)
        self._norm = tensors["norm"]
        self._lm_head = tensors["lm_head"][: self.sizes.vocab_count]
        self._layers = [layer_tensors(tensors, number) for number in range(shape.layers)]
        self._pages = tensors["kv"].unbind()
        frequencies, scale = rope_frequencies(shape)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        cos, sin = ((each * scale).to(self._norm.device) for each in (angles.cos(), angles.sin()))
        self._turner = Turner(cos, sin, self.sizes.q_local, self.sizes.kv_local, shape.head_dim, shape.norm_eps)

    def forward(self, tokens: Tensor, positions: Tensor, places: Tensor, flow: Stream, attend: Attend) -> Tensor:
        """``[flow.rows, hidden]``, normed, on every rank of the group.

        ``tokens`` ``[flow.rows]`` holds padding after the real rows; ``positions`` and ``places`` are those of the real rows alone.
        """
        x = flow.enter(self._embedding.rows(tokens))
        normed = rms_norm(x, self._layers[0].input_norm, self._eps)
        for number, layer in enumerate(self._layers):
            rows = flow.to_attention(normed)
            attended = flow.from_attention(self._attention(number, rows, positions, places, attend))
            normed = add_rms_norm(x, attended, layer.post_norm, self._eps)
            rows = flow.to_mlp(normed)
            gated = matvec.gated(rows, layer.gate_up) if len(rows) == 1 else silu_mul(linear(rows, layer.gate_up))
            added = flow.from_mlp(linear(gated, layer.down))
            last = number + 1 == len(self._layers)
            normed = add_rms_norm(x, added, self._norm if last else self._layers[number + 1].input_norm, self._eps)
        return flow.to_attention(normed)

    def logits(self, hidden: Tensor, into: Tensor) -> Tensor:
        """``[rows, vocab_count]`` of this rank's part of the vocabulary, in the first rows of ``into``."""
        found = into[: len(hidden)]
        if len(hidden) == 1 and found.shape[1]:
            matvec.dot(hidden, self._lm_head, found)
        elif found.shape[1]:
            torch.mm(hidden, self._lm_head.t(), out=found)
        return found

    def _attention(self, number: int, rows: Tensor, positions: Tensor, places: Tensor, attend: Attend) -> Tensor:
        """A part of the attention's output for every row of the group; padding rows are zero."""
        real = len(positions)
        if not real:
            return torch.zeros_like(rows)
        layer, pages = self._layers[number], self._pages[number]
        qkv = linear(rows[:real], layer.qkv, layer.qkv_bias)
        q = self._turner.turn(qkv, positions, places, layer.norms, pages)
        output = linear(attend(q, pages), layer.o, layer.o_bias)
        return functional.pad(output, (0, 0, 0, len(rows) - real)) if real < len(rows) else output


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, by the kernels that suit the number of rows."""
    if len(x) != 1:
        return functional.linear(x, weight, bias)
    product = matvec.dot(x, weight)
    return product if bias is None else product.add_(bias)
