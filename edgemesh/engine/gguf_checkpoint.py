"""Weights from a GGUF file, dequantised as they are read.

The ``gguf`` package alone does this: it needs neither transformers nor accelerate, and it dequantises any range of rows,
so that no tensor larger than asked for is ever made. llama.cpp stores the q and k rows of Llama models with the halves of
each head interleaved for its own rotary kernel; they are put back into the order that Hugging Face has.
"""

from pathlib import Path
from typing import Final

import numpy as np
import torch
from gguf import dequantize

from edgemesh.engine.gguf_config import config_of
from edgemesh.engine.gguf_file import GgufFile, TensorInfo
from edgemesh.engine.layout import EMBED, LM_HEAD, NORM, Run
from edgemesh.engine.shape import Dtype, Family, ModelError, parse_shape

_TOP: Final = {EMBED: "token_embd.weight", NORM: "output_norm.weight", LM_HEAD: "output.weight"}
_LAYER: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_INTERLEAVED: Final = ("self_attn.q_proj", "self_attn.k_proj")


class GgufCheckpoint:
    """A GGUF file behind the names that Hugging Face gives the tensors."""

    def __init__(self, path: Path, dtype: Dtype) -> None:
        self.path = path
        self._file = GgufFile(path)
        self.shape = parse_shape(config_of(self._file), dtype, str(path))
        self._whole: tuple[str, torch.Tensor] = ("", torch.empty(0))

    def size(self, source: str) -> tuple[int, ...] | None:
        """The shape of a tensor."""
        info = self._file.tensors.get(gguf_name(source))
        return None if info is None else info.shape

    def read(self, run: Run) -> torch.Tensor:
        """The rows or columns of a run, as float32.

        Columns need the whole tensor; the latest one is kept, since the ranks' columns are asked for one after the other.
        """
        info = self._file.tensors[gguf_name(run.source)]
        if run.axis == 0:
            return self._rows(run.source, info, run.start, run.count)
        if self._whole[0] != run.source:
            self._whole = (run.source, self._rows(run.source, info, 0, info.shape[0]))
        return self._whole[1].narrow(1, run.start, run.count)

    def where(self, source: str) -> str:
        """The file of a tensor."""
        return f"{self.path} ({gguf_name(source)})"

    def close(self) -> None:
        """Let go of the file."""
        self._whole = ("", torch.empty(0))
        self._file.data.close()

    def _rows(self, source: str, info: TensorInfo, start: int, count: int) -> torch.Tensor:
        if len(info.shape) == 1:
            return self._dequantise(source, info, info.start, info.nbytes)[start : start + count]
        at = info.start + start * info.row_bytes
        rows = self._dequantise(source, info, at, count * info.row_bytes).view(count, *info.shape[1:])
        if self.shape.family is Family.LLAMA and any(part in source for part in _INTERLEAVED):
            return deinterleave(rows, self.shape.head_dim)
        return rows

    def _dequantise(self, source: str, info: TensorInfo, at: int, nbytes: int) -> torch.Tensor:
        # A bytearray, since torch wants memory that may be written where no dequantising copies it (float32 tensors).
        raw = np.frombuffer(bytearray(self._file.data[at : at + nbytes]), dtype=np.uint8)
        try:
            values = dequantize(raw.reshape(-1, info.row_bytes), info.kind)
        except (NotImplementedError, ValueError) as error:
            message = f"{self.where(source)}: type {info.kind.name} cannot be dequantised: {error}"
            raise ModelError(message) from error
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32).reshape(-1))


def gguf_name(source: str) -> str:
    """The name that llama.cpp gives a tensor (``blk.3.attn_q.weight``)."""
    if source in _TOP:
        return _TOP[source]
    layer, rest = source.removeprefix("model.layers.").split(".", 1)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER[module]}.{kind}"


def deinterleave(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Whole heads ``[heads * head_dim, ...]`` with rotary pairs side by side, to heads with them half a head apart."""
    pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
