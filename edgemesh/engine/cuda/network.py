"""The dense decoder network on one GPU's shards: the matrix products are cuBLAS's, all between them is fused."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from edgemesh.engine.cuda import matvec
from edgemesh.engine.cuda.kernels import Turner, add_rms_norm, rms_norm, silu_mul
from edgemesh.engine.layers import rope_frequencies
from edgemesh.engine.layout import Split, local
from edgemesh.engine.shape import ModelShape
from edgemesh.engine.streams import Stream

Attend = Callable[[Tensor, Tensor], Tensor]
"""From q ``[real, q_heads, head_dim]`` and one layer's pages to ``[real, q_heads * head_dim]``."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's tensors and its pages of the slab; ``norms`` are those of q and k."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    norms: tuple[Tensor, Tensor] | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    pages: Tensor


class CudaNetwork:
    """A decoder over the tensors of one rank (``edgemesh.engine.layout`` names them)."""

    def __init__(self, shape: ModelShape, split: Split, tensors: Mapping[str, Tensor], max_positions: int) -> None:
        self.sizes = local(shape, split)
        self._eps = shape.norm_eps
        self._alone = split.attn_tp == 1
        self._embed = tensors["embed"]
        self._norm = tensors["norm"]
        self._lm_head = tensors["lm_head"][: self.sizes.vocab_count]
        self._layers = [_layer(tensors, number) for number in range(shape.layers)]
        frequencies, scale = rope_frequencies(shape)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        cos, sin = ((each * scale).to(self._embed.device) for each in (angles.cos(), angles.sin()))
        self._turner = Turner(cos, sin, self.sizes.q_local, self.sizes.kv_local, shape.head_dim, shape.norm_eps)

    def forward(self, tokens: Tensor, positions: Tensor, places: Tensor, flow: Stream, attend: Attend) -> Tensor:
        """``[flow.rows, hidden]``, normed, on every rank of the group.

        ``tokens`` ``[flow.rows]`` holds padding after the real rows; ``positions`` and ``places`` are those of the real rows alone.
        """
        x = flow.enter(self._embedding(tokens))
        normed = rms_norm(x, self._layers[0].input_norm, self._eps)
        for number, layer in enumerate(self._layers):
            rows = flow.to_attention(normed)
            attended = flow.from_attention(self._attention(layer, rows, positions, places, attend))
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

    def _embedding(self, tokens: Tensor) -> Tensor:
        """``[rows, hidden]``: zeros for tokens of other ranks."""
        if self._alone:
            return self._embed.index_select(0, tokens)
        at = tokens - self.sizes.vocab_start
        here = (at >= 0) & (at < self.sizes.vocab_count)
        return self._embed.index_select(0, at * here) * here[:, None]

    def _attention(
        self, layer: LayerWeights, rows: Tensor, positions: Tensor, places: Tensor, attend: Attend
    ) -> Tensor:
        """A part of the attention's output for every row of the group; padding rows are zero."""
        real = len(positions)
        if not real:
            return torch.zeros_like(rows)
        qkv = linear(rows[:real], layer.qkv, layer.qkv_bias)
        q = self._turner.turn(qkv, positions, places, layer.norms, layer.pages)
        output = linear(attend(q, layer.pages), layer.o, layer.o_bias)
        return functional.pad(output, (0, 0, 0, len(rows) - real)) if real < len(rows) else output


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, by the kernels that suit the number of rows."""
    if len(x) != 1:
        return functional.linear(x, weight, bias)
    product = matvec.dot(x, weight)
    return product if bias is None else product.add_(bias)


def _layer(tensors: Mapping[str, Tensor], number: int) -> LayerWeights:
    name = f"layers.{number}"
    q_norm = tensors.get(f"{name}.q_norm")
    return LayerWeights(
        tensors[f"{name}.input_norm"],
        tensors[f"{name}.qkv"],
        tensors.get(f"{name}.qkv_bias"),
        None if q_norm is None else (q_norm, tensors[f"{name}.k_norm"]),
        tensors[f"{name}.o"],
        tensors.get(f"{name}.o_bias"),
        tensors[f"{name}.post_norm"],
        tensors[f"{name}.gate_up"],
        tensors[f"{name}.down"],
        tensors["kv"][number],
    )
