"""The pieces of a dense decoder layer that have no state: norms and rotary positions."""

import math
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from edgemesh.engine.shape import ModelShape, RopeKind, RopeScaling


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last dimension (Zhang and Sennrich, 2019)."""
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


class Rotary:
    """Rotary position embedding (Su et al., 2021) in the half-split form, from tables made once.

    ``tables`` gives ``cos`` and signed ``sin`` rows ``[tokens, 1, head_dim]``; ``turn`` applies them to ``[tokens, heads, head_dim]``.
    """

    def __init__(self, shape: ModelShape, positions: int, device: torch.device, dtype: torch.dtype) -> None:
        frequencies, scale = rope_frequencies(shape)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        self._half: Final = shape.head_dim // 2
        self._cos = torch.cat((cos, cos), dim=-1)[:, None, :].to(device, dtype)
        self._sin = torch.cat((-sin, sin), dim=-1)[:, None, :].to(device, dtype)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of these positions."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def turn(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """``x`` with each head's pairs turned by its token's angles."""
        cos, sin = tables
        return (x * cos).addcmul_(torch.roll(x, self._half, -1), sin)


def rope_frequencies(shape: ModelShape) -> tuple[Tensor, float]:
    """``[head_dim / 2]`` angular frequencies, and the factor on cos and sin, for the shape's kind of scaling."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
    frequencies = 1.0 / (shape.rope_theta**exponents)
    scaling = shape.rope_scaling
    match scaling.kind:
        case RopeKind.DEFAULT:
            return frequencies, 1.0
        case RopeKind.LINEAR:
            return frequencies / scaling.factor, 1.0
        case RopeKind.LLAMA3:
            return _llama3(frequencies, scaling), 1.0
        case RopeKind.YARN:
            return _yarn(frequencies, shape), _yarn_attention(scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are stretched, short ones kept, those between blended (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    context = scaling.original_max_position
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((context / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _yarn(frequencies: Tensor, shape: ModelShape) -> Tensor:
    """NTK-by-parts interpolation (Peng et al., 2023, YaRN): a linear ramp over dimensions by their number of turns."""
    scaling = shape.rope_scaling

    def dimension(turns: float) -> float:
        spread = math.log(scaling.original_max_position / (turns * 2 * math.pi))
        return shape.head_dim * spread / (2 * math.log(shape.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, shape.head_dim - 1)
    span = high - low or 0.001
    ramp = ((torch.arange(shape.head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


def _yarn_attention(scaling: RopeScaling) -> float:
    """The factor that YaRN puts on cos and sin, stated or by its rule."""

    def rule(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.attention_factor:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return rule(scaling.mscale) / rule(scaling.mscale_all_dim)
    return rule(1.0)
