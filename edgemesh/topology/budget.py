"""Does it fit: weights, contexts, communicators and graphs of one card, and how many tokens of KV are left.

Pure arithmetic over a model's numbers. A card holds its part of attention and vocabulary (over ``attn_tp``) and of the
MLP (over ``tp``) once, whatever the number of planes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from edgemesh.topology.config import Topology
from edgemesh.topology.errors import TopologyError
from edgemesh.topology.rules import resolve
from edgemesh.wire.ids import MAX_RANKS

CONTEXT_BYTES: Final = 400 << 20
"""One process's CUDA context, with its kernels and cuBLAS workspace."""

COMMUNICATOR_BYTES: Final = 64 << 20
"""One process group's buffers on a card."""

GRAPH_BYTES: Final = 256 << 20
"""Captured graphs of the plane that decodes."""

_DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2}

Count = Annotated[int, Meta(ge=1, le=1 << 24)]


class ModelNumbers(Struct, frozen=True):
    """The numbers of a model that decide its size, under the names of its ``config.json``."""

    hidden_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    intermediate_size: Count
    vocab_size: Count
    max_position_embeddings: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    tie_word_embeddings: bool = False

    @property
    def kv_heads(self) -> int:
        """Key and value heads (as many as query heads, if not said)."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


class Overheads(Struct, frozen=True):
    """What the processes of a card's planes take on it beside weights and KV, in bytes."""

    contexts: int
    communicators: int
    graphs: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.contexts + self.communicators + self.graphs + self.activations


class Budget(Struct, frozen=True):
    """One card's memory in bytes, and the KV it leaves. ``longest`` is the longest request in tokens."""

    weights_bytes: int
    overhead_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int
    longest: int

    @property
    def full_requests(self) -> float:
        """Full-length requests that the KV of one group holds at once."""
        return self.kv_tokens / self.longest


def read_numbers(model: Path) -> ModelNumbers:
    """The numbers in a model directory's ``config.json``. Raises ``TopologyError``."""
    file = model / "config.json"
    try:
        numbers = msgspec.json.decode(file.read_bytes(), type=ModelNumbers)
    except OSError as error:
        message = f"cannot read {file}: {error.strerror or error}. Name a directory with a model's config.json."
        raise TopologyError(message) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"{file} does not have the numbers of a model: {error}."
        raise TopologyError(message) from error
    if numbers.num_attention_heads % numbers.kv_heads:
        message = (
            f"{file}: num_attention_heads = {numbers.num_attention_heads} is no multiple of num_key_value_heads ="
            f" {numbers.kv_heads}."
        )
        raise TopologyError(message)
    return numbers


def budget(topology: Topology, model: ModelNumbers, card_bytes: int) -> Budget:
    """What one card of ``card_bytes`` holds under this topology."""
    item = _DTYPE_BYTES[topology.model.dtype]
    attn_tp, tp = topology.attn_tp, topology.mesh.tp
    kv_local = -(-model.kv_heads // attn_tp)
    ratio = model.num_attention_heads // model.kv_heads
    copies = min(ratio, max(1, attn_tp // model.kv_heads))
    q_local = kv_local * -(-ratio // copies)
    attention = (2 * q_local + 2 * kv_local) * model.head * model.hidden_size
    mlp = 3 * model.hidden_size * -(-model.intermediate_size // tp)
    vocabulary = -(-model.vocab_size // attn_tp) * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    weights = (model.num_hidden_layers * (attention + mlp) + vocabulary) * item
    # The vault has a context too.
    overhead = CONTEXT_BYTES + overheads(topology, model).total
    per_token = 2 * model.num_hidden_layers * kv_local * model.head * item
    left = max(0, int(card_bytes * topology.engine.memory_fraction) - weights - overhead)
    page = topology.engine.page_tokens
    tokens = left // (per_token * page) * page
    if topology.engine.kv_pages:
        tokens = min(tokens, (topology.engine.kv_pages - 1) * page)
    longest = topology.model.max_model_len or model.max_position_embeddings
    return Budget(weights, overhead, tokens * per_token, per_token, tokens, longest)


def overheads(topology: Topology, model: ModelNumbers) -> Overheads:
    """Contexts of each plane's process, communicators, graphs, and the activations of a chunk."""
    planes = len(topology.planes)
    groups = (topology.attn_tp > 1) + topology.coupled
    wide = -(-model.intermediate_size // topology.mesh.tp)
    tokens = topology.prefill.chunk_tokens * (topology.mesh.dp if topology.coupled else 1)
    activations = _DTYPE_BYTES[topology.model.dtype] * (
        topology.prefill.chunk_tokens * 6 * model.hidden_size + tokens * (2 * model.hidden_size + 3 * wide)
    )
    return Overheads(planes * CONTEXT_BYTES, planes * groups * COMMUNICATOR_BYTES, GRAPH_BYTES, activations)


def check_budget(topology: Topology, model: ModelNumbers, card_bytes: int) -> Budget:
    """The budget, if each group's KV holds ``engine.min_full_requests``; else ``TopologyError`` naming what fits."""
    found = budget(topology, model, card_bytes)
    least = topology.engine.min_full_requests
    if found.full_requests >= least:
        return found
    shape = topology.mesh
    message = (
        f"tp = {shape.tp}, dp = {shape.dp}, attn_tp = {topology.attn_tp} does not fit cards of {card_bytes / (1 << 30):g} GiB:"
        f" {found.weights_bytes / 1e9:.1f} GB of weights and {found.overhead_bytes / 1e9:.1f} GB of contexts, communicators,"
        f" graphs and activations leave KV for {found.kv_tokens} tokens a group, which is {found.full_requests:.1f} requests"
        f" of {found.longest} tokens; engine.min_full_requests asks for {least}. {_advice(topology, model, card_bytes)}"
    )
    if found.kv_tokens // least >= 1024:
        message += f" Or set model.max_model_len to {found.kv_tokens // least} or less."
    raise TopologyError(message)


def _advice(topology: Topology, model: ModelNumbers, card_bytes: int) -> str:
    for other in _others(topology):
        if budget(other, model, card_bytes).full_requests >= topology.engine.min_full_requests:
            shape = other.mesh
            cards = "as many" if other.world == topology.world else str(other.world)
            return f"On {cards} cards this fits: tp = {shape.tp}, dp = {shape.dp}, attn_tp = {shape.attn_tp} ({other.mode})."
    return f"No topology of up to {MAX_RANKS} such cards fits."


def _others(topology: Topology) -> Iterator[Topology]:
    """Other shapes: of the same number of cards first, then of more; attention DP with many groups before few."""
    world = topology.world
    for cards in range(world, MAX_RANKS + 1, world):
        for dp in range(cards, 0, -1):
            if cards % dp == 0:
                shape = msgspec.structs.replace(topology.mesh, tp=cards, dp=dp, attn_tp=cards // dp)
                yield resolve(msgspec.structs.replace(topology, mesh=shape))
