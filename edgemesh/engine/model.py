"""The dense decoder network on one rank's shards: Llama, Qwen2 and Qwen3 by the flags of their shape."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from edgemesh.engine.attention.batch import Attention, AttentionBatch
from edgemesh.engine.layers import Rotary, rms_norm
from edgemesh.engine.layout import Split, local
from edgemesh.engine.matmul import gated_mlp, linear, logits
from edgemesh.engine.shape import ModelShape
from edgemesh.engine.streams import Stream
from edgemesh.engine.tensors import Embedding, LayerTensors, layer_tensors


@dataclass(frozen=True, slots=True)
class Step:
    """The rows that one forward computes; ``wanted`` are those whose hidden state is asked for, ascending and each once.

    ``tokens`` and ``positions`` ``[stream.rows]`` hold padding after the real rows.
    """

    tokens: Tensor
    positions: Tensor
    attention: AttentionBatch
    stream: Stream
    wanted: Sequence[int]


class Network:
    """A decoder over the tensors of one rank (``edgemesh.engine.layout`` names them)."""

    def __init__(
        self, shape: ModelShape, split: Split, tensors: Mapping[str, Tensor], attention: Attention, max_positions: int
    ) -> None:
        self.sizes = local(shape, split)
        self._eps = shape.norm_eps
        self._head_dim = shape.head_dim
        self._attention = attention
        self._embedding = Embedding(tensors["embed"], self.sizes, alone=split.attn_tp == 1)
        self._norm = tensors["norm"]
        self._lm_head = tensors["lm_head"][: self.sizes.vocab_count]
        self._layers = [layer_tensors(tensors, number) for number in range(shape.layers)]
        self._head_norms = [self._head_norm(layer) for layer in self._layers]
        self._rotary = Rotary(shape, max_positions, self._norm.device, self._norm.dtype)

    def _head_norm(self, layer: LayerTensors) -> Tensor | None:
        """Q's and k's RMS norm for each local head, side by side."""
        if layer.norms is None:
            return None
        q_norm, k_norm = layer.norms
        return torch.cat((q_norm.repeat(self.sizes.q_local, 1), k_norm.repeat(self.sizes.kv_local, 1)))

    def forward(self, step: Step) -> Tensor:
        """``[wanted, hidden]``, normed, the same on every rank of the group."""
        stream = step.stream
        tables = self._rotary.tables(step.positions)
        if step.attention.real:
            self._attention.begin(step.attention)
        x = stream.enter(self._embedding.rows(step.tokens))
        for number, layer in enumerate(self._layers):
            rows = stream.to_attention(rms_norm(x, layer.input_norm, self._eps))
            attended = self._attend(number, layer, rows, tables, step.attention.real)
            x = x + stream.from_attention(attended)
            rows = stream.to_mlp(rms_norm(x, layer.post_norm, self._eps))
            x = x + stream.from_mlp(gated_mlp(rows, layer.gate_up, layer.down))
        return rms_norm(stream.pick(x, step.wanted), self._norm, self._eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[rows, vocab_count]``: this rank's part of the vocabulary, without its padding."""
        return logits(hidden, self._lm_head)

    def _attend(
        self, number: int, layer: LayerTensors, rows: Tensor, tables: tuple[Tensor, Tensor], real: int
    ) -> Tensor:
        """A part of the attention's output for every row of the group; padding rows are zero."""
        sizes, head_dim = self.sizes, self._head_dim
        heads = sizes.q_local + sizes.kv_local
        if not real:
            return rows.new_zeros(rows.shape)
        qkv = linear(rows, layer.qkv, layer.qkv_bias).view(len(rows), -1, head_dim)
        qk, v = qkv[:, :heads], qkv[:, heads:]
        head_norm = self._head_norms[number]
        if head_norm is not None:
            qk = rms_norm(qk, None, self._eps).mul_(head_norm)
        qk = self._rotary.turn(qk, tables)
        q, k = qk[:real, : sizes.q_local], qk[:real, sizes.q_local :]
        attended = self._attention.attend(number, q, k, v[:real])
        output = linear(attended, layer.o, layer.o_bias)
        return functional.pad(output, (0, 0, 0, len(rows) - real)) if real < len(rows) else output
