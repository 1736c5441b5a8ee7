"""A rank's tensors by what they are for (``edgemesh.engine.layout`` names them), whatever device computes with them."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from edgemesh.engine.layout import LocalShape


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer's; ``norms`` ``[head_dim]`` are those of q and k."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    norms: tuple[Tensor, Tensor] | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


def layer_tensors(tensors: Mapping[str, Tensor], number: int) -> LayerTensors:
    """Those of the ``number``-th layer."""
    name = f"layers.{number}"
    q_norm = tensors.get(f"{name}.q_norm")
    return LayerTensors(
        tensors[f"{name}.input_norm"],
        tensors[f"{name}.qkv"],
        tensors.get(f"{name}.qkv_bias"),
        None if q_norm is None else (q_norm, tensors[f"{name}.k_norm"]),
        tensors[f"{name}.o"],
        tensors.get(f"{name}.o_bias"),
        tensors[f"{name}.post_norm"],
        tensors[f"{name}.gate_up"],
        tensors[f"{name}.down"],
    )


class Embedding:
    """This rank's rows of the embedding; the sum over the group's ranks is the whole of it."""

    def __init__(self, weight: Tensor, sizes: LocalShape, *, alone: bool) -> None:
        self._weight = weight
        self._start, self._count = sizes.vocab_start, sizes.vocab_count
        self._alone = alone

    def rows(self, tokens: Tensor) -> Tensor:
        """``[rows, hidden]``: zeros for tokens of other ranks."""
        if self._alone:
            return self._weight.index_select(0, tokens)
        at = tokens - self._start
        here = (at >= 0) & (at < self._count)
        return self._weight.index_select(0, at * here) * here[:, None]
