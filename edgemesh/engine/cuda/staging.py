"""What goes from the host to the device and back without waiting: pinned buffers, one copy each way per step."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGN: Final = 64
_SENDS: Final = 16
"""Copies that may be under way before a buffer is used again; two steps in flight make six at most."""

_KINDS: Final = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}

Array = NDArray[np.int32] | NDArray[np.int64] | NDArray[np.float32]


class _Buffer:
    """A pinned buffer, its copy on the device, and the end of the last copy between them."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.bytes = self.host.numpy()
        self.device = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it so


class Outbox:
    """Arrays to the device: packed, sent with one copy, handed out as views that live for the next few sends."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device = device
        self._buffers = [_Buffer(nbytes, device) for _ in range(_SENDS)]
        self._next = 0

    def send(self, arrays: Sequence[Array]) -> list[Tensor]:
        """The arrays on the device, in stream order."""
        places, total = [], 0
        for array in arrays:
            places.append(total)
            total += -(-array.nbytes // _ALIGN) * _ALIGN
        buffer = self._take(total)
        for array, at in zip(arrays, places, strict=True):
            buffer.bytes[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
        buffer.device[:total].copy_(buffer.host[:total], non_blocking=True)
        buffer.copied.record()
        return [
            buffer.device[at : at + array.nbytes].view(_KINDS[array.dtype]).view(array.shape)
            for array, at in zip(arrays, places, strict=True)
        ]

    def _take(self, nbytes: int) -> _Buffer:
        at, self._next = self._next, (self._next + 1) % _SENDS
        buffer = self._buffers[at]
        buffer.copied.synchronize()
        if buffer.host.numel() < nbytes:
            buffer = self._buffers[at] = _Buffer(1 << (nbytes - 1).bit_length(), self._device)
        return buffer


class Inbox:
    """Tokens of one step from the device."""

    def __init__(self, device: torch.device, rows: int) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._host = torch.empty(rows, dtype=torch.int32, pin_memory=device.type == "cuda")

    def fetch(self, tokens: Tensor) -> None:
        """Begin to copy, after all that the stream does before."""
        if len(tokens) > len(self._host):
            self._host = torch.empty(2 * len(tokens), dtype=torch.int32, pin_memory=tokens.device.type == "cuda")
        self._host[: len(tokens)].copy_(tokens, non_blocking=True)
        self._event.record()

    def query(self) -> bool:
        """Whether the copy is through."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Return when it is."""
        self._event.synchronize()

    def tokens(self, count: int) -> list[int]:
        """The first ``count`` tokens, once they are here."""
        found: list[int] = self._host[:count].tolist()
        return found
