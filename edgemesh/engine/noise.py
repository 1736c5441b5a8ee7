"""Counter-based noise: a function of (seed, choice, position, round, token id) and nothing else.

A replayed step draws the same token, on any number of ranks and in any batch. A row's key is mixed from the first four on
the host (SplitMix64's finaliser); the id is hashed against it in 32-bit lanes (MurmurHash3's finaliser, keyed in the middle too).
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_MASK64: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


def _mix64(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def row_stem(seed: int, choice: int) -> int:
    """What all keys of one row come from, an unsigned 64-bit number."""
    key = 0
    for part in (seed, choice):
        key = _mix64((key + _GOLDEN + part) & _MASK64)
    return key


def row_key(seed: int, choice: int, position: int, draw: int) -> tuple[int, int]:
    """Two signed 32-bit keys of one draw of one row."""
    key = row_stem(seed, choice)
    for part in (position, draw):
        key = _mix64((key + _GOLDEN + part) & _MASK64)
    return _signed(key & 0xFFFFFFFF), _signed(key >> 32)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def gumbel(keys: Sequence[tuple[int, int]], ids: Tensor) -> Tensor:
    """Standard Gumbel noise ``[keys, ids]`` (or of ``ids``' own two dimensions) for int32 token ids.

    The uniform has 31 bits and is precise near zero, where the largest noise comes from.
    """
    pairs = torch.tensor(keys, dtype=torch.int64, device=ids.device).to(torch.int32)
    x = ids * -1640531527 + pairs[:, 0, None]
    x ^= _shifted(x, 16)
    x *= -2048144789
    x ^= _shifted(x, 13)
    x += pairs[:, 1, None]
    x *= -1028477387
    x ^= _shifted(x, 16)
    x *= 0x27D4EB2F
    x ^= _shifted(x, 15)
    uniform = x.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)
    exponential = uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()
    return exponential.log_().neg_()


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A logical shift to the right of signed lanes."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)
