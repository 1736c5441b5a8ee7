"""Triton's compiler behind a typed door.

A kernel's pointers and numbers are annotated as ``tl.tensor``, what is fixed when it is compiled as ``tl.constexpr``; Triton reads the
annotations, and knows no other names.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import triton

Kernel: TypeAlias = Any
"""A compiled function; ``kernel[grid](...)`` launches it."""


def kernel(*varying: str) -> Callable[[Callable[..., object]], Kernel]:
    """A Triton kernel, or a part of some. Numbers named ``varying`` change from step to step: no version is compiled for one of their values."""

    def compiled(function: Callable[..., object]) -> Kernel:
        return triton.jit(do_not_specialize=list(varying))(function)

    return compiled


def block(size: int, least: int = 1) -> int:
    """The power of two that covers ``size``.

    >>> block(100)
    128
    """
    return max(1 << (size - 1).bit_length(), least)
