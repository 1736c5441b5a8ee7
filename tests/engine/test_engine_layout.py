"""Sharding is exact for any head count on any number of ranks: parts sum to the whole, and padding changes nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemesh.engine.layout import (
    ALIGN,
    Split,
    Target,
    kv_runs,
    local,
    query_runs,
    source_shapes,
    targets,
    units,
)
from edgemesh.engine.shape import Family, ModelShape, RopeScaling

DOUBLE = torch.float64


def shape_of(heads=4, kv_heads=2, head_dim=2, mlp=8, vocab=16, hidden=6, **flags):
    fields = {
        "family": Family.QWEN3,
        "hidden": hidden,
        "layers": 1,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "mlp": mlp,
        "vocab": vocab,
        "rope_theta": 10000.0,
        "rope_scaling": RopeScaling(),
        "norm_eps": 1e-6,
        "qkv_bias": True,
        "o_bias": True,
        "qk_norm": True,
        "tie": False,
        "max_position": 128,
        "sliding_window": 0,
        "dtype": "float32",
    }
    return ModelShape(**{**fields, **flags})


def sources(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, dtype=DOUBLE, generator=generator) for name, size in source_shapes(shape).items()}


def fill(target: Target, weights):
    tensor = torch.zeros(target.shape, dtype=DOUBLE)
    for run in target.runs:
        tensor.narrow(run.axis, run.at, run.count).copy_(weights[run.source].narrow(run.axis, run.start, run.count))
    return tensor


def shard(shape, split, weights):
    return {target.name: fill(target, weights) for target in targets(shape, split) if not target.same_as}


def attend(x, qkv, bias, o, q_heads, kv_heads, dim):
    """Plain causal attention, query head j over KV head j // (q_heads // kv_heads)."""
    q, k, v = (x @ qkv.T + bias).split([q_heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    q, k, v = (part.view(len(x), -1, dim).transpose(0, 1) for part in (q, k, v))
    ratio = q_heads // kv_heads
    k, v = k.repeat_interleave(ratio, 0), v.repeat_interleave(ratio, 0)
    scores = q @ k.transpose(1, 2) / dim**0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1) @ o.T


def gated(x, gate_up, down):
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up) @ down.T


heads = st.tuples(st.integers(1, 8), st.integers(1, 6)).map(lambda pair: (pair[0] * pair[1], pair[0]))


@settings(max_examples=120, deadline=None)
@given(heads=heads, ranks=st.integers(1, 17), seed=st.integers(0, 99))
def test_attention_over_ranks_sums_to_the_whole(heads, ranks, seed):
    shape = shape_of(*heads)
    weights = sources(shape, seed)
    x = torch.randn(5, shape.hidden, dtype=DOUBLE)
    layer = "model.layers.0.self_attn."
    qkv = torch.cat([weights[f"{layer}{part}_proj.weight"] for part in "qkv"])
    bias = torch.cat([weights[f"{layer}{part}_proj.bias"] for part in "qkv"])
    whole = attend(x, qkv, bias, weights[f"{layer}o_proj.weight"], shape.heads, shape.kv_heads, shape.head_dim)
    whole += weights[f"{layer}o_proj.bias"]

    parts = torch.zeros_like(whole)
    for rank in range(ranks):
        split = Split(attn_tp=ranks, attn_rank=rank)
        sizes, part = local(shape, split), shard(shape, split, weights)
        qkv, bias, o = (part[f"layers.0.{name}"] for name in ("qkv", "qkv_bias", "o"))
        parts += attend(x, qkv, bias, o, sizes.q_local, sizes.kv_local, shape.head_dim) + part["layers.0.o_bias"]
    torch.testing.assert_close(parts, whole)


@settings(max_examples=60, deadline=None)
@given(mlp=st.integers(1, 70), ranks=st.integers(1, 17))
def test_mlp_over_ranks_sums_to_the_whole(mlp, ranks):
    shape = shape_of(mlp=mlp)
    weights = sources(shape)
    x = torch.randn(5, shape.hidden, dtype=DOUBLE)
    layer = "model.layers.0.mlp."
    gate_up = torch.cat([weights[f"{layer}gate_proj.weight"], weights[f"{layer}up_proj.weight"]])
    whole = gated(x, gate_up, weights[f"{layer}down_proj.weight"])

    parts = torch.zeros_like(whole)
    for rank in range(ranks):
        part = shard(shape, Split(mlp_tp=ranks, mlp_rank=rank), weights)
        assert part["layers.0.gate_up"].shape[0] == 2 * local(shape, Split(mlp_tp=ranks, mlp_rank=rank)).mlp_local
        parts += gated(x, part["layers.0.gate_up"], part["layers.0.down"])
    torch.testing.assert_close(parts, whole)


@settings(max_examples=60, deadline=None)
@given(vocab=st.integers(1, 90), ranks=st.integers(1, 17), tie=st.booleans())
def test_vocabulary_rows_of_ranks_are_the_whole_in_order(vocab, ranks, tie):
    shape = shape_of(vocab=vocab, tie=tie)
    weights = sources(shape)
    source = "model.embed_tokens.weight" if tie else "lm_head.weight"
    rows = []
    for rank in range(ranks):
        split = Split(attn_tp=ranks, attn_rank=rank)
        sizes = local(shape, split)
        head = {target.name: target for target in targets(shape, split)}["embed" if tie else "lm_head"]
        tensor = fill(head, weights)
        assert tensor.shape[0] == sizes.vocab_local
        assert not tensor[sizes.vocab_count :].any()
        assert sizes.vocab_start == sum(map(len, rows))
        rows.append(tensor[: sizes.vocab_count])
    assert torch.equal(torch.cat(rows), weights[source])


@settings(max_examples=200, deadline=None)
@given(heads=heads, ranks=st.integers(1, 64))
def test_every_query_head_stands_on_one_rank_beside_its_kv_head(heads, ranks):
    shape = shape_of(*heads)
    ratio = shape.heads // shape.kv_heads
    seen = []
    for rank in range(ranks):
        split = Split(attn_tp=ranks, attn_rank=rank)
        sizes = local(shape, split)
        held = {at + i: start + i for start, count, at in kv_runs(shape, split) for i in range(count)}
        for start, count, at in query_runs(shape, split):
            for i in range(count):
                assert held[(at + i) // (sizes.q_local // sizes.kv_local)] == (start + i) // ratio
                seen.append(start + i)
    assert sorted(seen) == list(range(shape.heads))


@settings(max_examples=200, deadline=None)
@given(heads=heads, ranks=st.integers(1, 64))
def test_no_rank_caches_more_kv_heads_than_needed(heads, ranks):
    deal = units(*heads, ranks)
    assert deal.per_rank == -(-heads[1] // ranks)
    assert deal.copies * deal.queries >= heads[0] // heads[1]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "q_local", "kv_local"),
    [
        (9, 3, 1, 9, 3),
        (9, 3, 2, 6, 2),
        (9, 3, 3, 3, 1),
        (9, 3, 4, 3, 1),  # a fourth unit of zeros
        (9, 3, 8, 2, 1),  # each KV head on two ranks, with two of its queries
        (9, 3, 9, 1, 1),
        (32, 8, 8, 4, 1),
        (32, 8, 16, 2, 1),
        (40, 8, 5, 10, 2),
        (64, 8, 7, 16, 2),
    ],
)
def test_known_deals(heads, kv_heads, ranks, q_local, kv_local):
    sizes = local(shape_of(heads, kv_heads), Split(attn_tp=ranks))
    assert (sizes.q_local, sizes.kv_local) == (q_local, kv_local)


def test_widths_suit_kernels_and_runs_are_few():
    shape = shape_of(32, 8, mlp=1000, vocab=999)
    split = Split(attn_tp=4, attn_rank=2, mlp_tp=3, mlp_rank=1)
    sizes = local(shape, split)
    assert sizes.mlp_local % ALIGN == sizes.vocab_local % ALIGN == 0
    qkv = next(target for target in targets(shape, split) if target.name == "layers.0.qkv")
    assert len(qkv.runs) == 3


def test_a_rank_outside_its_group_is_refused():
    with pytest.raises(ValueError, match=r"attn_rank: 2 is not among 2 ranks \(0 to 1\)"):
        Split(attn_tp=2, attn_rank=2)
    with pytest.raises(ValueError, match="mlp_rank"):
        Split(mlp_rank=-1)
