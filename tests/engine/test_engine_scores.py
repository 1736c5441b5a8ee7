"""Log-probabilities of prompts on sharded vocabularies, against `transformers` on the same weights."""

import pytest
import torch
from engine_net import PAGE_TOKENS, Mesh, run_ranks, save_model

from edgemesh.engine import scores
from edgemesh.engine.local import local_collectives
from edgemesh.engine.turns import StepRefusedError
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.ids import Layout
from edgemesh.wire.messages import Chunk, Decode, IdlePlan, Join, Plan, Prefill, Sampling, Scoring, Verdict

LIMIT = 1e-4
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    return path, save_model("llama", path, tie_word_embeddings=True)


def prompt(seed, length):
    return torch.randint(0, 131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def reference(model, tokens):
    """``[positions, vocab]`` of the whole prompt."""
    return torch.log_softmax(model(torch.tensor([tokens])).logits[0], dim=-1)


class Prompt:
    """A prompt whose positions are all asked for, computed in chunks of any length."""

    def __init__(self, name, tokens, top, first_page, *, draws=True):
        self.name, self.tokens, self.top, self.draws = name, tokens, top, draws
        self.pages = tuple(range(first_page, first_page + -(-len(tokens) // PAGE_TOKENS)))
        self.at, self.found = 0, []

    def chunk(self, length):
        start, stop = self.at, min(len(self.tokens), self.at + length)
        final = self.draws and stop == len(self.tokens)
        targets = self.tokens[start + 1 : stop + 1]
        scoring = Scoring(start, self.top, TokenArray.of(targets)) if targets and self.top >= 0 else None
        self.at = stop
        pages = self.pages[: -(-stop // PAGE_TOKENS)]
        return Chunk(self.name, start, stop - start, pages, final, GREEDY if final else None, 0, scoring=scoring)

    def take(self, found):
        assert found.start == len(self.found)
        numbers, values = found.rows.tolist(), found.rows.buffer.cast("f").tolist()
        assert len(numbers) == found.count * found.width
        for row in range(found.count):
            at = row * found.width
            pairs = [(numbers[each], values[each + 1]) for each in range(at + 2, at + found.width, 2)]
            self.found.append((values[at], numbers[at + 1], pairs))

    def check(self, model, most):
        right = reference(model, self.tokens)
        assert len(self.found) == len(self.tokens) - 1
        for position, (value, rank, pairs) in enumerate(self.found):
            row, token = right[position], self.tokens[position + 1]
            assert value == pytest.approx(float(row[token]), abs=LIMIT)
            larger = int((row > row[token] + LIMIT).sum())
            assert 1 + larger <= rank <= 1 + int((row > row[token] - LIMIT).sum())
            assert len(pairs) == len({each for each, _ in pairs}) == min(self.top, most)
            assert [each for _, each in pairs] == sorted((each for _, each in pairs), reverse=True)
            assert [each for _, each in pairs] == pytest.approx(row.topk(len(pairs)).values.tolist(), abs=LIMIT)
            assert [each for _, each in pairs] == pytest.approx([float(row[each]) for each, _ in pairs], abs=LIMIT)
            # Whether the prompt is what greedy decoding would have said is read off by comparing these numbers exactly.
            if rank <= len(pairs):
                assert value in [each for _, each in pairs]
            if pairs:
                assert (rank == 1) == (value == pairs[0][1])


class Ranks:
    """A set of ranks that runs the steps of one member group; the others are idle."""

    def __init__(self, path, attn_tp, groups=1, *, pads=False, dtype="float32"):
        self.mesh, self.tick = Mesh(path, attn_tp, groups, pads=pads, dtype=dtype), 0
        self.member = groups - 1

    def step(self, chunks, tokens, decode=None, rows=0):
        counts = [0] * self.mesh.groups
        counts[self.member] = len(tokens) + rows
        verdict = Verdict(tuple(counts), Layout.RAGGED, 0)
        plans = [IdlePlan(group, self.mesh.plane, 0, self.tick, verdict) for group in range(self.mesh.groups)]
        prefill = Prefill(tuple(chunks), TokenArray.of(tokens)) if chunks else None
        plans[self.member] = Plan(self.member, self.mesh.plane, 0, self.tick, verdict, prefill, decode)
        self.tick += 1
        return self.mesh.execute(plans)[self.member]

    def compute(self, prompts, length):
        firsts = {}
        while going := [each for each in prompts if each.at < len(each.tokens)]:
            begins = {each: each.at for each in going}
            chunks = [each.chunk(length) for each in going]
            tokens = [token for each in going for token in each.tokens[begins[each] : each.at]]
            done = self.step(chunks, tokens)
            asked = [each for each, chunk in zip(going, chunks, strict=True) if chunk.scoring]
            for each, found in zip(asked, done.prompt_logprobs, strict=True):
                each.take(found)
            ended = [each.name for each, chunk in zip(going, chunks, strict=True) if chunk.final]
            firsts |= dict(zip(ended, done.firsts, strict=True))
        return firsts


@pytest.mark.parametrize(("attn_tp", "groups", "pads"), [(1, 1, False), (2, 1, False), (3, 1, False), (2, 2, True)])
@pytest.mark.parametrize("length", [100, 7])
def test_prompts_are_scored_as_transformers_does(model, attn_tp, groups, pads, length):
    path, right = model
    ranks = Ranks(path, attn_tp, groups, pads=pads)
    prompts = [
        Prompt("a", prompt(1, 23), 20, 1),
        Prompt("b", prompt(2, 9), 1, 10),
        Prompt("c", prompt(3, 12), 0, 15, draws=False),
        Prompt("d", prompt(4, 5), -1, 20),
    ]
    firsts = ranks.compute(prompts, length)
    for each in prompts[:3]:
        each.check(right, 20)
    assert firsts == {each.name: int(reference(right, each.tokens)[-1].argmax()) for each in prompts if each.draws}


@pytest.mark.parametrize("attn_tp", [1, 3])
def test_a_slice_of_a_few_rows_gives_the_same_bits(model, monkeypatch, attn_tp):
    path, _ = model

    def found():
        each = Prompt("a", prompt(5, 30), 5, 1)
        Ranks(path, attn_tp).compute([each], 100)
        return each.found

    whole = found()
    monkeypatch.setattr(scores, "SLICE_BYTES", 4 * 131 * 4)
    assert [(rank, [each for each, _ in pairs]) for _, rank, pairs in found()] == [
        (rank, [each for each, _ in pairs]) for _, rank, pairs in whole
    ]
    assert [value for value, _, _ in found()] == pytest.approx([value for value, _, _ in whole], abs=1e-5)


def test_a_slice_of_logits_has_a_bound(model):
    path, _ = model
    scorer = Ranks(path, 2).mesh.runners[0]._scorer
    shapes = []

    def logits(rows):
        shapes.append(len(rows))
        return torch.zeros((len(rows), scorer._width))

    scorer._group = type("Alone", (), {"gather": staticmethod(lambda each: each[None])})
    scorer._slice = 64
    rows = scorer.score(torch.zeros((200, 72)), torch.zeros(200, dtype=torch.int64), logits, 3)
    assert (shapes, rows.shape) == ([64, 64, 64, 8], (200, 8))


def test_equal_logits_are_no_larger_ones_and_come_by_their_ids(model):
    path, _ = model
    scorer = Ranks(path, 1).mesh.runners[0]._scorer
    rows = scorer.score(torch.zeros((1, 72)), torch.tensor([130]), lambda _: torch.zeros((1, 131)), 3)
    (found,) = scores.packed(rows, [Scoring(0, 3, TokenArray.of([130]))])
    numbers = found.rows.tolist()
    assert (numbers[1], numbers[2::2]) == (1, [0, 1, 2])
    assert found.rows.buffer.cast("f")[0] == found.rows.buffer.cast("f")[3]


@pytest.mark.parametrize("attn_tp", [1, 3])
def test_no_alternatives_may_be_all_that_is_asked(model, attn_tp):
    path, right = model
    each = Prompt("a", prompt(8, 6), 0, 1)
    Ranks(path, attn_tp).compute([each], 4)
    each.check(right, 20)


def test_a_rank_without_vocabulary_and_alternatives_beyond_all_tokens():
    hub = local_collectives(3, 1)
    logits = torch.randn((4, 5), generator=torch.Generator().manual_seed(1))
    shares = [(0, 3), (3, 2), (5, 0)]
    targets = torch.tensor([0, 4, 2, 3])

    def part(rank, start, width):
        scorer = scores.Scorer(start, width, 5, hub[rank].attn)
        return lambda: scorer.score(torch.zeros((4, 1)), targets, lambda _: logits[:, start : start + width], 20)

    made = run_ranks([part(rank, *share) for rank, share in enumerate(shares)])
    assert all(torch.equal(each, made[0]) for each in made)
    right = logits.log_softmax(dim=-1)
    assert torch.allclose(made[0][:, 0].view(torch.float32), right.gather(1, targets[:, None])[:, 0], atol=1e-6)
    assert made[0][:, 2::2].tolist() == right.argsort(dim=-1, descending=True).tolist()


def test_rows_beside_scored_prompts_draw_their_own(model):
    path, right = model
    ranks = Ranks(path, 2)
    row, scored = Prompt("row", prompt(6, 9), -1, 1), Prompt("scored", prompt(7, 10), 2, 10)
    first = ranks.compute([row], 100)["row"]
    join = Join(0, "row", first, 9, row.pages, GREEDY, 1)
    done = ranks.step([scored.chunk(100)], scored.tokens, Decode(joins=(join,)), rows=1)
    scored.take(done.prompt_logprobs[0])
    scored.check(right, 20)
    assert done.tokens == (int(reference(right, [*row.tokens, first])[-1].argmax()),)
    assert done.firsts == (int(reference(right, scored.tokens)[-1].argmax()),)


@pytest.mark.parametrize(
    ("scoring", "named"),
    [
        (Scoring(0, 1, TokenArray()), "0 positions from 0"),
        (Scoring(4, 1, TokenArray.of([1])), "1 positions from 4"),
        (Scoring(2, 1, TokenArray.of([1, 2, 3])), "3 positions from 2"),
        (Scoring(0, 1, TokenArray.of([131])), "target that is not among 0 to 130"),
        (Scoring(0, 1, TokenArray.of([-1])), "target that is not among 0 to 130"),
    ],
)
def test_what_is_not_in_the_chunk_is_not_scored(model, scoring, named):
    ranks = Ranks(model[0], 1)
    with pytest.raises(StepRefusedError, match=named):
        ranks.step([Chunk("a", 0, 4, (1,), scoring=scoring)], [1, 2, 3, 4])
