"""The kernels between the matrix products, run by Triton's interpreter where no card is: the same code, program by program, over small shapes."""

import math

import pytest
import torch
from torch.nn import functional

if torch.cuda.is_available():
    pytest.skip("here the kernels run on the card, in their other tests", allow_module_level=True)
pytest.importorskip("triton", reason="the interpreter comes with Triton, for Linux on x86-64 and arm64")

from cuda_cases import draws_of, prompts_of, turned_heads

from edgemesh.engine.collectives import alone
from edgemesh.engine.cuda import matvec
from edgemesh.engine.cuda.attention import Rows
from edgemesh.engine.cuda.drawing import Drawer
from edgemesh.engine.cuda.kernels import Turner, add_rms_norm, rms_norm, silu_mul
from edgemesh.engine.cuda.paged_prompts import attend_prompts
from edgemesh.engine.cuda.paged_rows import attend_rows
from edgemesh.engine.sampler import Row, Sampler
from edgemesh.wire.messages import Sampling

# A kernel's part of a context may be empty; its weight of nothing is a logarithm of zero.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")

PAGE = 64
EXACT = 1e-5


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(found, wanted):
    assert found.shape == wanted.shape
    error = float((found - wanted).norm() / wanted.norm())
    assert error < EXACT, error


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 72)])
def test_norms(rows, width):
    x, delta, weight = randn(rows, width), randn(rows, width, seed=1), randn(width, seed=2)
    total = x + delta
    close(rms_norm(x, weight, 1e-6), functional.rms_norm(x, (width,), weight, 1e-6))
    close(add_rms_norm(x, delta, weight, 1e-6), functional.rms_norm(total, (width,), weight, 1e-6))
    assert torch.equal(x, total)


def test_the_gate_of_many_rows_and_of_one():
    both = randn(3, 2 * 1100)
    gate, up = both.chunk(2, dim=-1)
    close(silu_mul(both), functional.silu(gate) * up)
    x, weight = randn(1, 96), randn(40, 96, seed=1)
    product = x @ weight.t()
    close(matvec.dot(x, weight), product)
    gate, up = product.chunk(2, dim=-1)
    close(matvec.gated(x, weight), functional.silu(gate) * up)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(4, 2, 16), (7, 1, 24)])
def test_heads_are_normed_turned_and_put_into_their_pages(q_heads, kv_heads, head_dim, normed):
    rows, half = 5, head_dim // 2
    qkv = randn(rows, (q_heads + 2 * kv_heads) * head_dim)
    angles = torch.rand((50, half), generator=torch.Generator().manual_seed(1)) * 6
    positions, places = torch.tensor([3, 49, 0, 7, 8], dtype=torch.int32), torch.tensor([100, 3, 64, 190, 1])
    pages = torch.full((2, 3, PAGE, kv_heads, head_dim), 7.0)
    norms = (randn(head_dim, seed=3), randn(head_dim, seed=4)) if normed else None
    q = Turner(angles.cos(), angles.sin(), q_heads, kv_heads, head_dim, 1e-6).turn(qkv, positions, places, norms, pages)
    wanted_q, wanted_k, wanted_v = turned_heads(qkv, angles, positions, norms, q_heads, kv_heads)
    close(q, wanted_q)
    close(pages[0].flatten(0, 1)[places], wanted_k)
    assert torch.equal(pages[1].flatten(0, 1)[places], wanted_v)
    untouched = torch.ones(3 * PAGE, dtype=torch.bool)
    untouched[places] = False
    assert (pages.flatten(1, 2)[:, untouched] == 7).all()


class Paged:
    """Sequences in pages, with no number after each, and what attention over them gives."""

    def __init__(self, q_heads, kv_heads, head_dim, spans):
        self.spans = spans
        count = sum(-(-(start + new) // PAGE) for start, new in spans)
        self.pages = torch.full((2, count + 1, PAGE, kv_heads, head_dim), math.nan)
        self.table = torch.zeros((len(spans), 4), dtype=torch.int32)
        self.q = randn(sum(new for _, new in spans), q_heads, head_dim, seed=6)
        free = iter((torch.randperm(count, generator=torch.Generator().manual_seed(7)) + 1).tolist())
        wanted, done = [], 0
        for number, (start, new) in enumerate(spans):
            context = start + new
            kv = randn(2, context, kv_heads, head_dim, seed=8 + number)
            for place, part in enumerate(kv.split(PAGE, dim=1) if context else ()):
                page = self.table[number, place] = next(free)
                self.pages[:, page, : part.shape[1]] = part
            q = self.q[done : done + new].transpose(0, 1)
            k, v = kv.transpose(1, 2).repeat_interleave(q_heads // kv_heads, 1)
            seen = torch.arange(context) <= torch.arange(start, context)[:, None]
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            wanted.append(mixed.transpose(0, 1).flatten(1))
            done += new
        self.wanted = torch.cat(wanted)


@pytest.mark.parametrize("describes", [False, True])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(2, 1, 16), (3, 3, 24)])
def test_attention_over_pages(q_heads, kv_heads, head_dim, describes):
    # Contexts that end in, at and just after a block; rows that begin in the middle of one; a span without rows.
    spans = [(0, 70), (60, 65), (64, 1), (0, 64), (63, 2), (128, 64), (0, 0), (0, 1)]
    case = Paged(q_heads, kv_heads, head_dim, spans)
    counts, contexts = [new for _, new in spans], [start + new for start, new in spans]
    close(attend_prompts(case.q, case.pages, prompts_of(spans, case.table), describes=describes), case.wanted)
    real = [number for number, new in enumerate(counts) if new]
    ends = torch.tensor(counts).cumsum(0)[real] - 1
    lengths = torch.tensor(contexts, dtype=torch.int32)[real]
    close(attend_rows(case.q[ends], case.pages, Rows(lengths, case.table[real])), case.wanted[ends])


def test_the_device_draws_what_the_sampler_draws_and_moves_the_batch_on():
    count, width, start = 6, 700, 1000
    logits = randn(count, width) * 3
    logits[0, 70] = logits[0, 400] = 50
    temperatures = (0.0, 1.0, 0.7)
    rows = [
        Row(Sampling(seed=(1 << 62) + at, choice=at % 2, temperature=temperatures[at % 3]), 9 * at, 0)
        for at in range(count)
    ]
    wanted = Sampler(start, width, 2000, alone().attn).draw(logits, rows).tokens
    last, position = torch.full((count + 1,), -5, dtype=torch.int32), torch.zeros(count + 1, dtype=torch.int32)
    tokens = torch.empty(count, dtype=torch.int32)
    Drawer(start, width, alone().attn, last, position).draw(logits, draws_of(rows, range(count), "cpu"), tokens)
    assert tokens.tolist() == list(wanted)
    assert tokens[0] == start + 70, "of equals the lowest"
    assert last.tolist() == [*tokens.tolist(), -5]
    assert position.tolist() == [1] * count + [0]
