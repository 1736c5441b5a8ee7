"""Online softmax (Milakov and Gimelshein, 2018) by powers of two, for kernels that meet their keys block by block."""

import math

import triton.language as tl

from edgemesh.engine.cuda.jit import kernel


@kernel()
def weighed(
    score: tl.tensor, best: tl.tensor, total: tl.tensor, scale: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """A block of scores taken into an online softmax by powers of two: (weights, what the past fades by, best, total)."""
    higher = tl.maximum(best, tl.max(score, axis=1) * scale)
    weight = tl.exp2(score * scale - higher[:, None])
    fade = tl.exp2(best - higher)
    return weight, fade, higher, total * fade + tl.sum(weight, axis=1)


@kernel()
def nothing(rows: tl.constexpr, columns: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """An online softmax over nothing yet: (best, total, mixed)."""
    best = tl.full([rows], float("-inf"), tl.float32)
    return best, tl.zeros([rows], tl.float32), tl.zeros([rows, columns], tl.float32)


def scale_of(head_dim: int) -> float:
    """What scores of heads so wide are multiplied with, so that powers of two of them are those of e of scaled ones."""
    return math.log2(math.e) / math.sqrt(head_dim)
