from importlib.util import find_spec

import pytest
import torch
from torch.nn import functional

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from cuda_cases import draws_of, prompts_of, turned_heads

from edgemesh.engine.attention.batch import AttentionBatch, Span
from edgemesh.engine.attention.sdpa import SdpaAttention
from edgemesh.engine.collectives import alone
from edgemesh.engine.cuda import attention as attention_module
from edgemesh.engine.cuda import matvec
from edgemesh.engine.cuda.attention import AttentionUnavailableError, FastestAttention, Rows, choose
from edgemesh.engine.cuda.cutting import CutRow, Cutter
from edgemesh.engine.cuda.drawing import Drawer
from edgemesh.engine.cuda.kernels import Turner, add_rms_norm, rms_norm, silu_mul
from edgemesh.engine.cuda.paged import TritonAttention
from edgemesh.engine.cuda.staging import Outbox
from edgemesh.engine.sampler import Row, Sampler
from edgemesh.wire.messages import Sampling

ROUNDED = 0.004
"""The relative error of one rounding to bfloat16, and some."""


def randn(*shape, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).bfloat16()


def close(found, wanted, limit=ROUNDED):
    assert found.shape == wanted.shape
    error = (found.float() - wanted.float()).norm() / wanted.float().norm()
    assert error < limit, float(error)


@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (129, 5120), (33, 72), (0, 512)])
def test_norms(rows, width):
    x, delta, weight = randn(rows, width), randn(rows, width, seed=1), randn(width, seed=2)
    if not rows:
        assert rms_norm(x, weight, 1e-6).shape == (0, width)
        return
    close(rms_norm(x, weight, 1e-6), functional.rms_norm(x.float(), (width,), weight.float(), 1e-6))
    total = x.float() + delta.float()
    close(add_rms_norm(x, delta, weight, 1e-6), functional.rms_norm(total, (width,), weight.float(), 1e-6))
    assert torch.equal(x, total.bfloat16())


@pytest.mark.parametrize(("rows", "width"), [(1, 12288), (129, 1408), (5, 104)])
def test_silu_mul(rows, width):
    both = randn(rows, 2 * width)
    gate, up = both.float().chunk(2, dim=-1)
    close(silu_mul(both), functional.silu(gate) * up)


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 8), (7, 1, 80)])
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_normed_turned_and_put_into_their_pages(q_heads, kv_heads, head_dim, normed):
    rows, half = 37, head_dim // 2
    qkv = randn(rows, (q_heads + 2 * kv_heads) * head_dim)
    angles = torch.rand((500, half), device="cuda") * 6
    turner = Turner(angles.cos(), angles.sin(), q_heads, kv_heads, head_dim, 1e-6)
    positions = torch.randint(0, 500, (rows,), dtype=torch.int32, device="cuda")
    places = torch.randperm(4 * 256, device="cuda")[:rows]
    pages = torch.full((2, 4, 256, kv_heads, head_dim), 7.0, dtype=torch.bfloat16, device="cuda")
    norms = (randn(head_dim, seed=3), randn(head_dim, seed=4)) if normed else None
    q = turner.turn(qkv, positions, places, norms, pages)
    wanted_q, wanted_k, wanted_v = turned_heads(qkv, angles, positions, norms, q_heads, kv_heads)
    close(q, wanted_q)
    close(pages[0].flatten(0, 1)[places], wanted_k)
    assert torch.equal(pages[1].flatten(0, 1)[places].float(), wanted_v)
    untouched = torch.ones(4 * 256, dtype=torch.bool, device="cuda")
    untouched[places] = False
    assert (pages.flatten(1, 2)[:, untouched] == 7).all()


@pytest.fixture(params=["torch", "flash-attn"])
def attention(request):
    if request.param == "flash-attn":
        pytest.importorskip("flash_attn")
    return choose(request.param, 256, 128, lambda _line: None)


class Paged:
    """Sequences in pages, and attention over them in float32."""

    def __init__(self, q_heads, kv_heads, head_dim, spans, width=16):
        self.spans = spans
        self.pages = randn(2, 60, 256, kv_heads, head_dim, seed=5)
        free = iter((torch.randperm(59) + 1).tolist())
        self.tables = [[next(free) for _ in range(-(-(start + count) // 256))] for start, count in spans]
        self.table = torch.zeros((len(spans), width), dtype=torch.int32, device="cuda")
        for number, pages in enumerate(self.tables):
            self.table[number, : len(pages)] = torch.tensor(pages)
        self.q = randn(sum(count for _, count in spans), q_heads, head_dim, seed=6)

    def wanted(self):
        slab = self.pages.float().cpu()[None]
        places, parts = [], []
        for (start, count), pages in zip(self.spans, self.tables, strict=True):
            at = torch.arange(start, start + count)
            places.append(torch.tensor(pages)[at // 256] * 256 + at % 256)
            parts.append(Span(start, count, torch.tensor(pages)))
        places = torch.cat(places)
        reference = SdpaAttention(slab)
        empty = torch.empty(0, dtype=torch.int64)
        reference.begin(AttentionBatch(parts, places, empty[None], empty, 0))
        k, v = (slab[0, part].flatten(0, 1)[places] for part in (0, 1))
        return reference.attend(0, self.q.float().cpu(), k, v).cuda()


HEADS = [(32, 8, 128), (7, 1, 64), (6, 6, 80), (4, 2, 256)]


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), HEADS)
def test_prompts_over_pages(attention, q_heads, kv_heads, head_dim):
    case = Paged(q_heads, kv_heads, head_dim, [(0, 700), (300, 513), (256, 1), (0, 3), (1000, 64), (64, 65)])
    close(attention.prompts(case.q, case.pages, prompts_of(case.spans, case.table)), case.wanted())


def test_what_lies_after_a_context_is_never_seen(attention):
    case = Paged(32, 8, 128, [(0, 700), (300, 513), (256, 1), (0, 3), (1000, 64), (64, 64)])
    wanted = case.wanted()
    seen = torch.full_like(case.pages, float("nan"))
    for (start, count), pages in zip(case.spans, case.tables, strict=True):
        at = torch.arange(start + count)
        page, offset = torch.tensor(pages)[at // 256].cuda(), (at % 256).cuda()
        seen[:, page, offset] = case.pages[:, page, offset]
    close(attention.prompts(case.q, seen, prompts_of(case.spans, case.table)), wanted)
    ends = torch.tensor([count for _, count in case.spans]).cumsum(0).cuda() - 1
    lengths = torch.tensor([start + count for start, count in case.spans], dtype=torch.int32, device="cuda")
    close(attention.rows(case.q[ends], seen, Rows(lengths, case.table)), wanted[ends])


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("lengths", [(1,), (3000,), (256, 257, 1, 40, 511), tuple(range(1, 40))])
def test_rows_over_pages(attention, q_heads, kv_heads, head_dim, lengths):
    case = Paged(q_heads, kv_heads, head_dim, [(length - 1, 1) for length in lengths])
    batch = Rows(torch.tensor(lengths, dtype=torch.int32, device="cuda"), case.table)
    close(attention.rows(case.q, case.pages, batch), case.wanted())


def test_the_choice_of_kernels_says_which_and_why(monkeypatch):
    said = []
    assert isinstance(choose("torch", 256, 128, said.append), TritonAttention)
    assert isinstance(choose("auto", 64, 128, said.append), TritonAttention)
    for hopper, head_dim, chosen in (
        (True, 128, TritonAttention),
        (True, 64, FastestAttention),
        (False, 128, FastestAttention),
    ):
        if find_spec("flash_attn") is not None:
            monkeypatch.setattr(attention_module, "on_hopper", lambda hopper=hopper: hopper)
            assert isinstance(choose("auto", 256, head_dim, [].append), chosen)
    assert "as engine.attention says" in said[0]
    assert "engine.page_tokens is 64" in said[1]
    with pytest.raises(AttentionUnavailableError, match="a multiple of 256 tokens"):
        choose("flash-attn", 64, 128, said.append)


def test_the_device_draws_what_the_sampler_draws_and_moves_the_batch_on():
    count, width, start = 64, 151936, 1000
    differ = 0
    for seed in range(10):
        logits = randn(count, width, seed=seed) * 3
        logits[0, 70] = logits[0, 4000] = 50
        temperatures = (0.0, 1.0, 0.7, 3.0)
        rows = [
            Row(Sampling(seed=(1 << 62) + 7919 * seed + at, choice=at % 5, temperature=temperatures[at % 4]), 9 * at, 0)
            for at in range(count)
        ]
        wanted = Sampler(start, width, 200000, alone().attn).draw(logits.cpu(), rows).tokens
        last = torch.full((count + 1,), -5, dtype=torch.int32, device="cuda")
        position = torch.arange(count + 1, dtype=torch.int32, device="cuda")
        tokens = torch.empty(count, dtype=torch.int32, device="cuda")
        slots = [*range(count - 2), count, count - 1]
        drawer = Drawer(start, width, alone().attn, last, position)
        drawer.draw(logits, draws_of(rows, slots, "cuda", elsewhere={3}), tokens)
        found = tokens.tolist()
        assert found[0] == wanted[0] == start + 70
        differ += sum(a != b for at, (a, b) in enumerate(zip(found, wanted, strict=True)) if at != 3)
        moved = [at for at in range(count + 1) if position[at] != at]
        assert moved == [at for at in range(count) if at not in {3, count - 2}]
        assert last[5] == found[5]
        assert last[count - 1] == found[count - 1]
        assert last[[3, count - 2, count]].tolist() == [-5] * 3
    # Only a logarithm's last bit, in a tie, may tell the two apart.
    assert differ <= 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_no_number_is_never_drawn(temperature):
    width = 5000
    logits = torch.full((3, width), float("nan"), dtype=torch.bfloat16, device="cuda")
    logits[1, 4321] = -2.0
    logits[2] = float("-inf")
    rows = [Row(Sampling(seed=1, temperature=temperature), 5, 0) for _ in range(3)]
    state = torch.zeros(2, dtype=torch.int32, device="cuda")
    tokens = torch.full((3,), -9, dtype=torch.int32, device="cuda")
    Drawer(0, width, alone().attn, state, state.clone()).draw(logits, draws_of(rows, [1] * 3, "cuda"), tokens)
    found = tokens.tolist()
    assert found[1] == 4321
    assert all(0 <= token < width for token in found)


def test_draws_follow_the_distribution():
    count, width = 4096, 8
    logits = torch.linspace(-1, 2, width, device="cuda").bfloat16().expand(count, width).contiguous()
    rows = [Row(Sampling(seed=seed), 5, 0) for seed in range(count)]
    state = torch.zeros(2, dtype=torch.int32, device="cuda")
    tokens = torch.empty(count, dtype=torch.int32, device="cuda")
    Drawer(0, width, alone().attn, state, state.clone()).draw(logits, draws_of(rows, [1] * count, "cuda"), tokens)
    wanted = logits[0].float().softmax(dim=-1)
    found = torch.bincount(tokens, minlength=width) / count
    assert (found - wanted).abs().max() < 0.03


@pytest.mark.parametrize(
    ("settings", "temperature"),
    [
        ({"top_k": 3}, 1.0),
        ({"top_p": 0.5}, 1.0),
        ({"min_p": 0.4}, 0.8),
        ({"top_k": 2}, 1.0),
        ({"top_k": 9, "top_p": 0.9}, 2.0),
    ],
)
def test_cut_rows_follow_the_distribution_of_what_the_cut_keeps(settings, temperature):
    count, width = 2048, 5000
    base = randn(width, seed=9) * 3
    logits = base.expand(count, width).contiguous()
    scaled = base.float() / temperature
    probabilities, order = scaled.softmax(dim=-1).sort(descending=True, stable=True)
    above = probabilities.cumsum(0) - probabilities
    kept = torch.ones_like(above, dtype=torch.bool)
    if "top_k" in settings:
        kept &= torch.arange(width, device="cuda") < settings["top_k"]
    if "top_p" in settings:
        kept &= above < settings["top_p"]
    if "min_p" in settings:
        kept &= probabilities >= probabilities[0] * settings["min_p"]
    last, position, attempt = (torch.full((count + 1,), 6, dtype=torch.int32, device="cuda") for _ in range(3))
    attempt.zero_()
    rows = [
        CutRow(at, at if at % 2 else -1, Row(Sampling(seed=77 * at, temperature=temperature, **settings), 7, 0))
        for at in range(count)
    ]
    tokens = torch.full((count,), -9, dtype=torch.int32, device="cuda")
    cutter = Cutter(0, width, alone().attn, last, position, attempt, Outbox(torch.device("cuda"), 1 << 16))
    cutter.draw(logits, rows, tokens)
    found = tokens.tolist()
    drawn = [token for token in found if token >= 0]
    assert set(found) <= {-1, *order[kept].tolist()}
    assert len(drawn) > 0.98 * count
    wanted = probabilities[kept] / probabilities[kept].sum()
    shares = torch.bincount(torch.tensor(drawn, device="cuda"), minlength=width)[order[kept]] / len(drawn)
    assert (shares - wanted).abs().max() < 0.05
    for at in (1, 3, 501):
        took = found[at] >= 0
        assert last[at] == (found[at] if took else 6)
        assert position[at] == 6 + took
        assert attempt[at] == (not took)
    assert position[::2].eq(6).all()


@pytest.mark.parametrize(("outer", "inner"), [(6144, 4096), (4096, 12288), (1004, 520)])
def test_one_row_times_a_matrix(outer, inner):
    x, weight = randn(1, inner), randn(outer, inner, seed=1)
    product = x.float() @ weight.float().t()
    close(matvec.dot(x, weight), product)
    if outer % 2 == 0:
        gate, up = product.bfloat16().float().chunk(2, dim=-1)
        close(matvec.gated(x, weight), functional.silu(gate) * up)
