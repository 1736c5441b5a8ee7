"""What kernels are given and must give, on whatever device they run: on a card, or in Triton's interpreter."""

import torch
from torch.nn import functional

from edgemesh.engine.cuda.attention import Prompts
from edgemesh.engine.cuda.drawing import ELSEWHERE, Draws
from edgemesh.engine.noise import row_stem


def turned_heads(qkv, angles, positions, norms, q_heads, kv_heads):
    """(q, k, v) ``[rows, heads, head_dim]`` of ``qkv``: q and k normed, if there are ``norms``, and turned by their positions' angles."""
    head_dim = 2 * angles.shape[1]
    heads = qkv.float().view(len(qkv), -1, head_dim)
    turned, v = heads[:, : q_heads + kv_heads], heads[:, q_heads + kv_heads :]
    if norms is not None:
        weights = torch.cat((norms[0].expand(q_heads, -1), norms[1].expand(kv_heads, -1))).float()
        turned = functional.rms_norm(turned, (head_dim,), None, 1e-6) * weights
    cos, sin = (each[positions][:, None] for each in (angles.cos(), angles.sin()))
    low, high = turned.chunk(2, dim=-1)
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    return turned[:, :q_heads], turned[:, q_heads:], v


def prompts_of(spans, table):
    """The batch of ``spans``, (tokens before, new tokens) each, over a table of pages."""
    counts = torch.tensor([0, *(new for _, new in spans)])
    contexts = torch.tensor([0, *(start + new for start, new in spans)])
    starts, context_starts = (each.cumsum(0).int().to(table.device) for each in (counts, contexts))
    return Prompts(starts, context_starts, table, int(counts.max()), int(contexts.max()))


def draws_of(rows, slots, device, elsewhere=()):
    """How these rows draw, but those that are drawn ``elsewhere``."""

    def signed(key):
        return key - (1 << 64) if key >= 1 << 63 else key

    heats = [
        ELSEWHERE if at in elsewhere else row.sampling.temperature if row.hot else 0 for at, row in enumerate(rows)
    ]
    return Draws(
        torch.tensor(heats, device=device),
        torch.tensor([signed(row_stem(row.sampling.seed, row.sampling.choice)) for row in rows], device=device),
        torch.tensor([row.position for row in rows], dtype=torch.int32, device=device),
        torch.tensor(slots, dtype=torch.int32, device=device),
    )
