import functools
import math

import pytest
import torch
from engine_net import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemesh.engine import cuts
from edgemesh.engine import sampler as module
from edgemesh.engine.collectives import alone
from edgemesh.engine.local import local_collectives
from edgemesh.engine.noise import gumbel, row_key
from edgemesh.engine.sampler import CANDIDATES, ROUNDS, TOP, Row, Sampler
from edgemesh.engine.shaping import Shaper, mask_of
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.messages import Sampling


def draw(logits, rows, ranks=1):
    """The tokens that every rank of the group draws."""
    vocab = logits.shape[1]
    width = -(-vocab // ranks)
    ends = local_collectives(ranks, 1) if ranks > 1 else [alone()]

    def job(rank):
        low, high = min(vocab, rank * width), min(vocab, (rank + 1) * width)
        shard = Sampler(low, high - low, vocab, ends[rank].attn)
        return shard.draw(logits[:, low:high], rows)

    drawn = run_ranks([functools.partial(job, rank) for rank in range(ranks)]) if ranks > 1 else [job(0)]
    assert all(each == drawn[0] for each in drawn)
    return drawn[0]


def rows(count, **changes):
    return [Row(Sampling(**{"seed": 7, **changes}), position, 0) for position in range(count)]


def logits_of(seed, count, vocab, spread=1.0):
    return torch.randn((count, vocab), generator=torch.Generator().manual_seed(seed)) * spread


def kept(logits, sampling):
    """The distribution that a cut leaves, straight from its definition."""
    masses = (logits.double() / sampling.temperature).softmax(dim=-1)
    order = sorted(range(len(masses)), key=lambda token: (-float(masses[token]), token))
    left, above = torch.zeros_like(masses), 0.0
    for number, token in enumerate(order):
        inside = (not sampling.top_k or number < sampling.top_k) and (sampling.top_p >= 1 or above < sampling.top_p)
        if number == 0 or (inside and masses[token] >= sampling.min_p * masses[order[0]]):
            left[token] = masses[token]
        above += float(masses[token])
    return left / left.sum(), float(left.sum())


@pytest.mark.parametrize(
    ("vocab", "spread", "settings"),
    [
        (50, 1.0, {}),
        (50, 1.0, {"temperature": 0.6}),
        (50, 1.0, {"top_k": 7}),
        (50, 1.0, {"top_p": 0.7}),
        (50, 1.0, {"min_p": 0.2}),
        (50, 1.5, {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02}),
        (600, 0.3, {"top_p": 0.6}),
        (600, 0.3, {"top_k": 300}),
        (600, 0.3, {"min_p": 0.5, "temperature": 0.9}),
    ],
)
def test_tokens_follow_the_distribution_that_the_settings_leave(vocab, spread, settings):
    """Chi-square against the definition; the last three keep more tokens than there are candidates."""
    count = 6000 if vocab < CANDIDATES else 2500
    logits = logits_of(1, 1, vocab, spread)
    sampling = Sampling(**settings)
    wanted, mass = kept(logits[0], sampling)
    drawn = draw(logits.expand(count, -1), rows(count, **settings)).tokens
    refused = drawn.count(-1)
    # each row has so many tries, and each of them lands in what the cut keeps with that mass
    assert refused <= count * (1 - mass) ** ROUNDS * 1.3 + 10
    found = torch.bincount(torch.tensor([token for token in drawn if token >= 0]), minlength=vocab)
    assert not found[wanted == 0].any()
    # Tokens are put together until each class expects a few.
    classes, expected, observed = [], 0.0, 0
    for token in wanted.argsort(descending=True).tolist():
        expected += float(wanted[token]) * (count - refused)
        observed += int(found[token])
        if expected >= 8:
            classes.append((observed - expected) ** 2 / expected)
            expected, observed = 0.0, 0
    freedom = len(classes) - 1
    # 4.5 sigma of the chi-square distribution by the Wilson-Hilferty cube root
    assert freedom >= 3
    bound = freedom * (1 - 2 / (9 * freedom) + 4.5 * math.sqrt(2 / (9 * freedom))) ** 3
    assert sum(classes) < bound


MODES = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.8, "logprobs": 0},
    {"top_k": 5},
    {"top_p": 0.9},
    {"top_p": 0.4, "temperature": 2.0},
    {"min_p": 0.1},
    {"top_k": 290, "temperature": 3.0},
]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_number_of_ranks_draws_the_same_tokens(ranks):
    logits = logits_of(2, 4 * len(MODES), 301, 0.7)
    mixed = [Row(Sampling(**{"seed": number, **mode}), 3, 0) for mode in MODES for number in range(4)]
    one, several = draw(logits, mixed), draw(logits, mixed, ranks)
    assert several.tokens == one.tokens
    for left, right in zip(several.logprobs, one.logprobs, strict=True):
        assert (left is None) == (right is None)
        if left is not None and right is not None:
            assert left.token == right.token
            assert left.logprob == pytest.approx(right.logprob, abs=1e-5)
            assert [token for token, _ in left.top] == [token for token, _ in right.top]


def test_more_ranks_than_vocabulary_draw_as_one():
    logits = logits_of(3, 6, 3)
    mixed = [Row(Sampling(seed=1, **mode), 3, 0) for mode in MODES[:6]]
    assert draw(logits, mixed, 4).tokens == draw(logits, mixed).tokens


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_give_the_lowest_id(ranks, dtype):
    logits = torch.zeros((3, 400), dtype=dtype)
    logits[0, [150, 140, 399]] = 2.0
    logits[1, [399, 0]] = 1.0
    assert draw(logits, rows(3, temperature=0.0), ranks).tokens == [140, 0, 0]
    cut = draw(logits, rows(3, top_k=1), ranks).tokens
    assert cut == [140, 0, 0]


def test_only_the_asked_for_draw_decides():
    logits = logits_of(4, 1, 90).expand(7, -1)
    base = {"seed": 9, "choice": 1}
    variants = [Row(Sampling(**base), 5, 0), Row(Sampling(**{**base, "seed": 10}), 5, 0)]
    variants += [Row(Sampling(**{**base, "choice": 2}), 5, 0), Row(Sampling(**base), 6, 0)]
    variants += [Row(Sampling(**base), 5, 0, None, attempt) for attempt in (1, 2)]
    variants += [Row(Sampling(**base), 5, 3)]
    tokens = draw(logits, variants).tokens
    assert tokens[0] == tokens[6]
    keys = {row.key(0) for row in variants[:6]}
    assert len(keys) == 6
    assert len(set(tokens[:6])) > 2


def test_rounds_of_one_attempt_never_meet_those_of_the_next():
    row = Row(Sampling(seed=1), 4, 0)
    first = {row.key(draw) for draw in range(ROUNDS)}
    row.took(-1)
    assert (row.position, row.emitted, row.attempt) == (4, 0, 1)
    assert not first & {row.key(draw) for draw in range(ROUNDS)}
    row.took(11)
    assert (row.position, row.emitted, row.attempt) == (5, 1, 0)


def outside(keys, ids):
    """Noise that always lets one of the last ids win."""
    return (ids > 900).float() * 1e4 + torch.zeros(len(keys), 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_draw_outside_the_cut_gives_no_token(monkeypatch, ranks):
    """A cut that keeps more than the candidates, and noise that always wins outside of it."""
    monkeypatch.setattr(module, "gumbel", outside)
    assert draw(torch.zeros((1, 1000)), rows(1, top_p=0.5), ranks).tokens == [-1]


def test_rows_without_a_token_have_no_logprob(monkeypatch):
    monkeypatch.setattr(module, "gumbel", outside)
    drawn = draw(torch.zeros((1, 1000)), rows(1, top_p=0.5, logprobs=2))
    assert (drawn.tokens, drawn.logprobs) == ([-1], [None])


@given(
    st.integers(1, 40000),
    st.integers(1, 300),
    st.sampled_from([TOP, CANDIDATES]),
    st.integers(0, 1 << 30),
    st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_the_best_of_a_row_are_found_through_blocks(width, levels, count, seed, equal):
    values = torch.rand((2, width), generator=torch.Generator().manual_seed(seed))
    if equal:
        values = (values * levels).floor()
    best, places = cuts.top(values, count)
    wanted, at = (each[:, :count] for each in values.sort(dim=-1, descending=True, stable=True))
    assert best.shape == (2, count)
    assert torch.equal(best[:, : wanted.shape[1]], wanted)
    assert torch.equal(places[:, : wanted.shape[1]], at)
    assert torch.isinf(best[:, wanted.shape[1] :]).all()


def test_noise_is_standard_gumbel_and_the_same_for_a_slice():
    ids = torch.arange(200_000, dtype=torch.int32)
    noise = gumbel([row_key(3, 0, 17, 0)], ids)[0]
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)
    assert noise.isfinite().all()
    below = [(noise < level).float().mean().item() for level in (-1.0, 0.0, 2.0, 6.0)]
    assert below == pytest.approx([math.exp(-math.exp(-level)) for level in (-1.0, 0.0, 2.0, 6.0)], abs=0.004)
    assert torch.equal(gumbel([row_key(3, 0, 17, 0)], ids[777:999])[0], noise[777:999])
    other = gumbel([row_key(3, 0, 18, 0)], ids)[0]
    assert abs(float(torch.corrcoef(torch.stack((noise, other)))[0, 1])) < 0.01
    assert abs(float(torch.corrcoef(torch.stack((noise[1:], noise[:-1])))[0, 1])) < 0.01


def shaped(logits, sampling, history=(), emitted=0, at=None, start=0):
    row = Shaper(sampling, start, len(logits), list(history), emitted)
    logits = logits.clone()
    row.apply(logits, emitted if at is None else at)
    return logits


def test_allowed_ids_are_the_only_ones_and_bias_is_added():
    logits = logits_of(5, 1, 10)[0]
    found = shaped(logits, Sampling(allowed_token_ids=(3, 5), logit_bias=((5, 2.5), (8, 9.0))))
    assert found[3] == logits[3]
    assert found[5] == logits[5] + 2.5
    assert torch.isinf(found).sum() == 8


def test_a_shard_shapes_its_own_ids():
    logits = logits_of(6, 1, 30)[0]
    sampling = Sampling(
        logit_bias=((2, 1.0), (14, -4.0)),
        repetition_penalty=1.4,
        frequency_penalty=0.5,
        stop_token_ids=(13, 29),
        min_tokens=3,
    )
    history = [2, 14, 14, 29, 5, 14]
    whole = shaped(logits, sampling, history, emitted=2)
    parts = [shaped(logits[at : at + 10], sampling, history, 2, start=at) for at in (0, 10, 20)]
    assert torch.equal(torch.cat(parts), whole)


def test_stops_are_banned_until_enough_is_said_but_remain_better_than_what_is_not_allowed():
    logits = torch.zeros(8)
    sampling = Sampling(stop_token_ids=(1, 2), allowed_token_ids=(2,), min_tokens=2)
    early, late = (shaped(logits, sampling, at=at) for at in (1, 2))
    assert early.argmax() == 2
    assert math.isfinite(early[2])
    assert late[2] == 0


def test_a_bad_word_of_one_token_is_banned_but_remains_better_than_what_is_not_allowed():
    found = shaped(torch.zeros(8), Sampling(bad_words=((3,), (5,)), allowed_token_ids=(3, 5)))
    assert found.argmax() == 3
    assert found[3] < -1e20
    assert shaped(torch.zeros(8), Sampling(bad_words=((3,),))).lt(-1e20).nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize(
    ("history", "emitted", "banned"),
    [
        ([9, 1, 2], 3, [3]),
        ([1, 2], 2, [3]),
        ([1, 2], 1, []),  # a prompt's tokens are not the output's
        ([2, 1], 2, []),
        ([9, 9, 4], 1, [5]),
        ([1, 2, 1, 4], 4, [5]),
        ([1], 1, []),
        ([], 0, []),
    ],
)
def test_a_bad_word_of_several_tokens_is_never_completed(history, emitted, banned):
    sampling = Sampling(bad_words=((1, 2, 3), (4, 5)))
    assert shaped(torch.zeros(8), sampling, history, emitted).lt(0).nonzero().flatten().tolist() == banned
    row = Shaper(sampling, 0, 8, history[: len(history) - emitted], 0)
    for token in history[len(history) - emitted :]:
        row.extend(token)
    row.apply(logits := torch.zeros(8), emitted)
    assert logits.lt(0).nonzero().flatten().tolist() == banned


def test_bad_words_are_banned_by_the_shard_of_their_last_token():
    sampling = Sampling(bad_words=((1, 2), (1, 12), (1, 29), (7,), (17,)))
    logits = logits_of(6, 1, 30)[0]
    whole = shaped(logits, sampling, [1], emitted=1)
    parts = [shaped(logits[at : at + 10], sampling, [1], 1, start=at) for at in (0, 10, 20)]
    assert torch.equal(torch.cat(parts), whole)
    assert whole.lt(-1e20).nonzero().flatten().tolist() == [2, 7, 12, 17, 29]


def test_mask_words_hold_ids_from_the_lowest_bit():
    words = TokenArray.of([0b101, -(1 << 31), 0b11])
    assert mask_of(words, 0, 70).nonzero()[:, 0].tolist() == [0, 2, 63, 64, 65]
    assert mask_of(words, 60, 20).nonzero()[:, 0].tolist() == [3, 4, 5]
    assert mask_of(words, 64, 0).tolist() == []
