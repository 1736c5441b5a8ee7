"""What the model and the mesh allow, for those who check requests against it."""

from __future__ import annotations

import msgspec

from edgemesh.wire.messages import Capacity


class Limits(msgspec.Struct, frozen=True):
    """Bounds of every request; ``context`` is the most tokens that prompt and output may have together."""

    model: str
    context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    groups: int


def limits_of(capacity: Capacity, model: str, groups: int) -> Limits:
    """The limits that follow from what the vault found: a request must fit the model and one group's KV pool alone."""
    pool = (capacity.pages - 1) * capacity.page_tokens
    return Limits(
        model=model,
        context=min(capacity.max_model_len, pool),
        vocab_size=capacity.vocab_size,
        eos_token_ids=capacity.eos_token_ids,
        groups=groups,
    )
