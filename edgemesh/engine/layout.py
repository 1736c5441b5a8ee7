"""Which rows of which source tensor lie where on which rank: sharding for any head count on any number of ranks.

Heads are dealt in *units* of one KV head with its share of query heads. Where there are fewer KV heads than ranks, a KV
head may be copied to several units that split its query heads. The list of units is then padded with empty ones to a
multiple of the ranks. Padding is zeros: a zero query head attends to something, but its columns of ``o`` are zero;
a zero row of ``gate_up`` gives ``silu(0) * 0``; a padded vocabulary row is never sampled.

All of it is index arithmetic; ``targets`` is the one place that decides, and loading merely copies runs.
"""

import enum
from collections.abc import Iterable, Iterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from edgemesh.engine.shape import ModelShape

ALIGN: Final = 8
"""Local MLP and vocabulary widths are multiples of this: 16 bytes in half precision, as fast kernels require."""

EMBED: Final = "model.embed_tokens.weight"
NORM: Final = "model.norm.weight"
LM_HEAD: Final = "lm_head.weight"

Segment = tuple[int, int, int]
"""(start in the source, count, start in the target)."""

Ranks = Annotated[int, Meta(ge=1)]
Rank = Annotated[int, Meta(ge=0)]


class Split(msgspec.Struct, frozen=True):
    """A rank's place: in its attention group, and among the ranks that share each MLP."""

    attn_tp: Ranks = 1
    attn_rank: Rank = 0
    mlp_tp: Ranks = 1
    mlp_rank: Rank = 0

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a rank outside its group."""
        for field, rank, ranks in (
            ("attn_rank", self.attn_rank, self.attn_tp),
            ("mlp_rank", self.mlp_rank, self.mlp_tp),
        ):
            if not 0 <= rank < ranks:
                message = f"{field}: {rank} is not among {ranks} ranks (0 to {ranks - 1})"
                raise ValueError(message)


class LocalShape(msgspec.Struct, frozen=True):
    """One rank's sizes, padding included.

    Query head ``j`` of the rank reads its KV head ``j // (q_local // kv_local)``. The rank's vocabulary rows are the ids
    ``vocab_start .. vocab_start + vocab_count - 1``; rows from ``vocab_count`` on are padding.
    """

    q_local: int
    kv_local: int
    mlp_local: int
    vocab_local: int
    vocab_start: int
    vocab_count: int


class Units(msgspec.Struct, frozen=True):
    """How heads are dealt: each KV head stands in ``copies`` units of ``queries`` query heads; ``per_rank`` units a rank."""

    copies: int
    queries: int
    per_rank: int


class Share(enum.StrEnum):
    """Which ranks hold the same bytes of a tensor."""

    COMMON = "common"
    """All ranks."""

    ATTENTION = "attn"
    """Equal ranks of all attention groups."""

    MLP = "mlp"
    """Equal ranks of all sets of MLP ranks."""


class Run(msgspec.Struct, frozen=True):
    """``count`` rows (axis 0) or columns (axis 1) of ``source`` from ``start``, put at ``at`` of the target's same axis."""

    source: str
    axis: int
    start: int
    count: int
    at: int


class Target(msgspec.Struct, frozen=True):
    """One tensor of a rank: zeros, but for its runs. With ``same_as`` it is another target's very bytes."""

    name: str
    shape: tuple[int, ...]
    share: Share
    runs: tuple[Run, ...]
    same_as: str = ""


def units(heads: int, kv_heads: int, ranks: int) -> Units:
    """Deal heads so that a rank holds the fewest KV heads (cache is the scarce memory), then the fewest query heads."""
    ratio = heads // kv_heads

    def cost(copies: int) -> tuple[int, int, int]:
        per_rank = _ceil(kv_heads * copies, ranks)
        return per_rank, per_rank * _ceil(ratio, copies), copies

    per_rank, _, copies = min(map(cost, range(1, ratio + 1)))
    return Units(copies, _ceil(ratio, copies), per_rank)


def local(shape: ModelShape, split: Split) -> LocalShape:
    """The sizes of one rank."""
    deal = units(shape.heads, shape.kv_heads, split.attn_tp)
    vocab_local = _round_up(_ceil(shape.vocab, split.attn_tp), ALIGN)
    start, count = _slice(shape.vocab, vocab_local, split.attn_rank)
    return LocalShape(
        q_local=deal.per_rank * deal.queries,
        kv_local=deal.per_rank,
        mlp_local=_round_up(_ceil(shape.mlp, split.mlp_tp), ALIGN),
        vocab_local=vocab_local,
        vocab_start=start,
        vocab_count=count,
    )


def targets(shape: ModelShape, split: Split) -> Iterator[Target]:
    """Every weight of one rank, in the order of use."""
    sizes = local(shape, split)
    vocab = (sizes.vocab_local, shape.hidden)
    rows = (sizes.vocab_start, sizes.vocab_count, 0)
    yield Target("embed", vocab, Share.ATTENTION, _runs(EMBED, 0, [rows]))
    for layer in range(shape.layers):
        yield from _attention(shape, split, sizes, layer)
        yield from _mlp(shape, split, sizes, layer)
    yield _whole(NORM, "norm", shape.hidden)
    if shape.tie:
        yield Target("lm_head", vocab, Share.ATTENTION, (), same_as="embed")
    else:
        yield Target("lm_head", vocab, Share.ATTENTION, _runs(LM_HEAD, 0, [rows]))


def _attention(shape: ModelShape, split: Split, sizes: LocalShape, layer: int) -> Iterator[Target]:
    source, to = f"model.layers.{layer}", f"layers.{layer}"
    queries = _scale(query_runs(shape, split), shape.head_dim)
    keys = _scale(kv_runs(shape, split), shape.head_dim)
    key_at, value_at = sizes.q_local * shape.head_dim, (sizes.q_local + sizes.kv_local) * shape.head_dim
    rows = (sizes.q_local + 2 * sizes.kv_local) * shape.head_dim

    def qkv(kind: str) -> tuple[Run, ...]:
        parts = (("q", queries, 0), ("k", keys, key_at), ("v", keys, value_at))
        return tuple(
            run
            for name, heads, at in parts
            for run in _runs(f"{source}.self_attn.{name}_proj.{kind}", 0, _shift(heads, at))
        )

    yield _whole(f"{source}.input_layernorm.weight", f"{to}.input_norm", shape.hidden)
    yield Target(f"{to}.qkv", (rows, shape.hidden), Share.ATTENTION, qkv("weight"))
    if shape.qkv_bias:
        yield Target(f"{to}.qkv_bias", (rows,), Share.ATTENTION, qkv("bias"))
    if shape.qk_norm:
        yield _whole(f"{source}.self_attn.q_norm.weight", f"{to}.q_norm", shape.head_dim)
        yield _whole(f"{source}.self_attn.k_norm.weight", f"{to}.k_norm", shape.head_dim)
    columns = _runs(f"{source}.self_attn.o_proj.weight", 1, queries)
    yield Target(f"{to}.o", (shape.hidden, sizes.q_local * shape.head_dim), Share.ATTENTION, columns)
    if shape.o_bias:
        # The parts of o are summed over the group: the bias stands on one rank, and is zero on the others.
        bias = _runs(f"{source}.self_attn.o_proj.bias", 0, [(0, shape.hidden, 0)] if split.attn_rank == 0 else [])
        yield Target(f"{to}.o_bias", (shape.hidden,), Share.ATTENTION, bias)


def _mlp(shape: ModelShape, split: Split, sizes: LocalShape, layer: int) -> Iterator[Target]:
    source, to = f"model.layers.{layer}", f"layers.{layer}"
    start, count = _slice(shape.mlp, sizes.mlp_local, split.mlp_rank)
    rows = [(start, count, 0)]
    yield _whole(f"{source}.post_attention_layernorm.weight", f"{to}.post_norm", shape.hidden)
    gate_up = _runs(f"{source}.mlp.gate_proj.weight", 0, rows)
    gate_up += _runs(f"{source}.mlp.up_proj.weight", 0, _shift(rows, sizes.mlp_local))
    yield Target(f"{to}.gate_up", (2 * sizes.mlp_local, shape.hidden), Share.MLP, gate_up)
    down = _runs(f"{source}.mlp.down_proj.weight", 1, rows)
    yield Target(f"{to}.down", (shape.hidden, sizes.mlp_local), Share.MLP, down)


def query_runs(shape: ModelShape, split: Split) -> list[Segment]:
    """The query heads of a rank, as few segments as there are gaps."""
    ratio = shape.heads // shape.kv_heads
    deal = units(shape.heads, shape.kv_heads, split.attn_tp)
    segments = []
    for at in range(deal.per_rank):
        kv_head, copy = divmod(split.attn_rank * deal.per_rank + at, deal.copies)
        count = min(deal.queries, ratio - copy * deal.queries)
        if kv_head < shape.kv_heads and count > 0:
            segments.append((kv_head * ratio + copy * deal.queries, count, at * deal.queries))
    return _join(segments)


def kv_runs(shape: ModelShape, split: Split) -> list[Segment]:
    """The KV heads of a rank."""
    deal = units(shape.heads, shape.kv_heads, split.attn_tp)
    heads = [(split.attn_rank * deal.per_rank + at) // deal.copies for at in range(deal.per_rank)]
    return _join([(head, 1, at) for at, head in enumerate(heads) if head < shape.kv_heads])


def source_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint must have, by its Hugging Face name."""
    whole = [target for target in targets(shape, Split()) if not target.same_as]
    attention, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {"q_proj": attention, "k_proj": kv, "v_proj": kv}
    shapes: dict[str, tuple[int, ...]] = {}
    for target in whole:
        for run in target.runs:
            part = run.source.split(".")[-2]
            full = list(target.shape)
            full[run.axis] = sizes.get(part, full[run.axis])
            if part in {"gate_proj", "up_proj", "down_proj"}:
                full[run.axis] = shape.mlp
            if part in {"embed_tokens", "lm_head"}:
                full[run.axis] = shape.vocab
            shapes[run.source] = tuple(full)
    return shapes


def _whole(source: str, name: str, size: int) -> Target:
    return Target(name, (size,), Share.COMMON, _runs(source, 0, [(0, size, 0)]))


def _runs(source: str, axis: int, segments: Iterable[Segment]) -> tuple[Run, ...]:
    return tuple(Run(source, axis, start, count, at) for start, count, at in segments if count)


def _shift(segments: Iterable[Segment], at: int) -> list[Segment]:
    return [(start, count, at + to) for start, count, to in segments]


def _scale(segments: Iterable[Segment], size: int) -> list[Segment]:
    return [(start * size, count * size, at * size) for start, count, at in segments]


def _join(segments: Iterable[Segment]) -> list[Segment]:
    """Segments that follow each other in source and target become one."""
    joined: list[Segment] = []
    for start, count, at in segments:
        if joined and joined[-1][0] + joined[-1][1] == start and joined[-1][2] + joined[-1][1] == at:
            joined[-1] = (joined[-1][0], joined[-1][1] + count, joined[-1][2])
        else:
            joined.append((start, count, at))
    return joined


def _slice(total: int, width: int, rank: int) -> tuple[int, int]:
    """(start, count) of what is left for a rank of ``width`` each: the last ones may get less, or nothing."""
    start = min(rank * width, total)
    return start, min(width, total - start)


def _ceil(value: int, parts: int) -> int:
    return -(-value // parts)


def _round_up(value: int, multiple: int) -> int:
    return _ceil(value, multiple) * multiple
