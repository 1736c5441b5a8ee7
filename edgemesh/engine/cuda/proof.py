"""Whether this process's share of a card multiplies matrices right, tried before anything depends on it.

A process that was given part of a card can get products of which tiles were never written, without an error: seen on an H200 with
driver 580 and cuBLAS 13.0 within MPS's active thread percentage. So each rank multiplies by its own weights, into memory that is
full of NaN, and compares with plain sums.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

ROWS: Final = (1, 6, 64, 512, 2048)
"""Batches that different kernels serve."""

COLUMNS: Final = 64
MOST: Final = 0.02
"""The largest relative error of a bfloat16 product that counts as right (0.002 seen)."""

REMEDY: Final = (
    'Set prefill.sm_percent and decode.sm_percent to 100; if it is wrong then too, set engine.mps = "off", and see the kernel\'s'
    " log (dmesg): the card or its driver may be at fault"
)


class ProductError(RuntimeError):
    """Matrix products that are wrong on this card, in this process."""


@torch.inference_mode()
def prove_products(weights: Mapping[str, Tensor], longest: int) -> None:
    """Multiply rows by the first layer's weights and the vocabulary's. Raises ``ProductError`` where a product is wrong."""
    noise = torch.Generator(weights["lm_head"].device).manual_seed(0)
    for name in ("layers.0.qkv", "layers.0.gate_up", "layers.0.down", "lm_head"):
        weight = weights[name]
        for rows in ROWS:
            # The vocabulary is only asked for the few rows that draw.
            if rows <= (ROWS[2] if name == "lm_head" else longest):
                _prove(name, weight, rows, noise)
    torch.cuda.empty_cache()


def _prove(name: str, weight: Tensor, rows: int, noise: torch.Generator) -> None:
    x = torch.randn((rows, weight.shape[1]), dtype=weight.dtype, device=weight.device, generator=noise)
    out = torch.full((rows, weight.shape[0]), float("nan"), dtype=weight.dtype, device=weight.device)
    torch.mm(x, weight.t(), out=out)
    step = max(1, weight.shape[0] // COLUMNS)
    chosen = weight[::step]
    wanted = torch.stack([(x.float() * column.float()).sum(dim=-1) for column in chosen], dim=-1)
    found = out[:, ::step].float()
    error = float((found - wanted).norm() / wanted.norm().clamp_min(1e-20))
    unwritten = int(out.isnan().sum())
    if unwritten or not error <= MOST:
        message = (
            f"{rows} rows times {name} {list(weight.shape)} come out wrong: {unwritten} of {out.numel()} elements are no"
            f" number, relative error {error:.3f} in {len(chosen)} columns. {REMEDY}"
        )
        raise ProductError(message)
