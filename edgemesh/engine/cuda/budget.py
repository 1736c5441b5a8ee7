"""How a card's memory is dealt: weights, what processes take, and KV from the rest; arithmetic alone."""

from collections.abc import Sequence
from typing import Final

import msgspec

from edgemesh.engine.capacity import KvBudget, holding, page_bytes
from edgemesh.engine.shape import ModelError, ModelShape
from edgemesh.topology import Topology
from edgemesh.topology.budget import ModelNumbers, overheads
from edgemesh.wire.ids import MAX_PAGES

_GIB: Final = 1 << 30


class Card(msgspec.Struct, frozen=True):
    """A card before anything of a run is on it: ``taken`` is what others, and the vault's own context, hold."""

    device: int
    total: int
    taken: int


class CardBudget(msgspec.Struct, frozen=True):
    """Where the bytes of one card go; together they are all of it."""

    device: int
    total: int
    taken: int
    weights: int
    contexts: int
    communicators: int
    graphs: int
    activations: int
    kv: int
    spare: int

    def __str__(self) -> str:
        parts = (
            ("weights", self.weights),
            ("KV", self.kv),
            ("contexts", self.contexts + self.taken),
            ("communicators", self.communicators),
            ("graphs", self.graphs),
            ("activations", self.activations),
            ("spare", self.spare),
        )
        return f"GPU {self.device}, {self.total / _GIB:.1f} GiB: " + ", ".join(
            f"{name} {nbytes / _GIB:.1f}" for name, nbytes in parts if nbytes
        )


def numbers_of(shape: ModelShape) -> ModelNumbers:
    """A shape as the sizes that budgets are made from."""
    return ModelNumbers(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.mlp,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.max_position,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tie,
    )


def deal(
    topology: Topology, shape: ModelShape, cards: Sequence[Card], weights: int
) -> tuple[KvBudget, tuple[CardBudget, ...]]:
    """The KV of every rank of a host, one to a card, and each card's budget.

    All ranks have equally many pages: the card with the least room decides. Raises ``ModelError`` where a card does not hold what it must.
    """
    need = overheads(topology, numbers_of(shape))
    page = page_bytes(shape, topology.attn_tp, topology.engine.page_tokens)
    rooms = [int(card.total * topology.engine.memory_fraction) - card.taken - weights - need.total for card in cards]
    pages = topology.engine.kv_pages or max(0, min(MAX_PAGES, min(rooms) // page))
    kv = holding(topology, shape, pages, 1)
    budgets = tuple(
        CardBudget(
            device=card.device,
            total=card.total,
            taken=card.taken,
            weights=weights,
            contexts=need.contexts,
            communicators=need.communicators,
            graphs=need.graphs,
            activations=need.activations,
            kv=pages * page,
            spare=card.total - card.taken - weights - need.total - pages * page,
        )
        for card in cards
    )
    for budget in budgets:
        if budget.spare < 0:
            message = f"engine.kv_pages = {pages} takes {-budget.spare >> 20} MiB more than there is: {budget}"
            raise ModelError(message)
    return kv, budgets
