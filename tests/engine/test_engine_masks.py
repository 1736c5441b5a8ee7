"""Masks on ranks: whatever else a row asks for, it draws as if the forbidden ids had no chance, and reports raw log-probabilities."""

import functools
import math

import pytest
import torch
from engine_net import Mesh, run_ranks, save_model
from test_engine_runner import GREEDY, Driver, Stream

from edgemesh.engine.collectives import alone
from edgemesh.engine.local import local_collectives
from edgemesh.engine.sampler import Row, Sampler
from edgemesh.engine.shaping import masks_of, shaper
from edgemesh.engine.turns import StepRefusedError
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.messages import Decode, Prefill, Sampling

VOCAB = 131
WORDS = -(-VOCAB // 32)
KINDS = {
    "greedy": {"temperature": 0.0},
    "hot": {},
    "top_p": {"top_p": 0.3},
    "top_k": {"top_k": 40},
    "min_p": {"min_p": 0.2},
    "all cuts": {"top_p": 0.9, "top_k": 3, "min_p": 0.01, "temperature": 1.7},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.7, "presence_penalty": 1.0, "logit_bias": ((3, 50.0),)},
}


def words_of(*allowed):
    """Mask words of some rows' ids."""
    rows = (sum(1 << each for each in ids).to_bytes(4 * WORDS, "little") for ids in allowed)
    return TokenArray(b"".join(rows))


def draw(logits, settings, allowed, ranks, *, by_hand):
    """What rows draw under these sets of ids: by their masks, or from logits in which all others are gone."""
    width = -(-VOCAB // ranks)
    ends = local_collectives(ranks, 1) if ranks > 1 else [alone()]
    if by_hand:
        gone = torch.ones_like(logits, dtype=torch.bool)
        for row, ids in enumerate(allowed):
            gone[row, sorted(ids)] = False
        logits = logits.masked_fill(gone, -math.inf)

    def job(rank):
        low, high = min(VOCAB, rank * width), min(VOCAB, (rank + 1) * width)
        masks = masks_of(range(len(allowed)), words_of(*allowed), low, high - low)
        rows = []
        for at in range(len(allowed)):
            sampling = Sampling(**{"seed": at, **settings})
            shape = shaper(sampling, low, high - low, [3, 5, 5], 2)
            rows.append(Row(sampling, at, 2, shape, mask=None if by_hand else masks[at]))
        return Sampler(low, high - low, VOCAB, ends[rank].attn).draw(logits[:, low:high].clone(), rows)

    drawn = run_ranks([functools.partial(job, rank) for rank in range(ranks)]) if ranks > 1 else [job(0)]
    assert all(each == drawn[0] for each in drawn)
    return drawn[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 3, 20])
def test_a_masked_row_draws_as_if_what_is_forbidden_had_no_chance(kind, ranks):
    logits = torch.randn((24, VOCAB), generator=torch.Generator().manual_seed(4)) * 3
    chance = torch.Generator().manual_seed(5)
    allowed = [
        set(torch.randperm(VOCAB, generator=chance)[: (1, 2, 7, 60, VOCAB)[at % 5]].tolist()) for at in range(24)
    ]
    found = draw(logits, KINDS[kind], allowed, ranks, by_hand=False)
    assert found.tokens == draw(logits, KINDS[kind], allowed, ranks, by_hand=True).tokens
    assert all(token in ids for token, ids in zip(found.tokens, allowed, strict=True))


@pytest.mark.parametrize("ranks", [1, 3])
def test_log_probabilities_of_a_masked_row_are_the_models_own(ranks):
    logits = torch.randn((5, VOCAB), generator=torch.Generator().manual_seed(4)) * 3
    found = draw(logits, {"temperature": 0.0, "logprobs": 3}, [{at, at + 40} for at in range(5)], ranks, by_hand=False)
    for row, (wanted, logprob) in enumerate(zip(logits.log_softmax(dim=-1), found.logprobs, strict=True)):
        assert logprob.token in {row, row + 40}
        assert logprob.logprob == pytest.approx(float(wanted[logprob.token]), abs=1e-4)
        assert [token for token, _ in logprob.top] == wanted.topk(3).indices.tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    return path, save_model("llama", path)


def masked(tokens):
    """A grammar of sorts: a function of all tokens so far."""
    return {(each * 7 + len(tokens) + sum(tokens)) % VOCAB for each in range(9)}


def reference(model, stream, count):
    tokens = list(stream.prompt)
    for _ in range(count):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        ids = sorted(masked(tokens))
        tokens.append(ids[int(logits[ids].argmax())])
    return tokens[len(stream.prompt) :]


@pytest.mark.parametrize(("attn_tp", "groups"), [(1, 1), (3, 1), (1, 2), (2, 2)])
def test_greedy_under_masks_is_what_transformers_says_under_them(model, attn_tp, groups):
    path, judge = model
    driver = Driver(Mesh(path, attn_tp, groups), member=groups - 1)
    a, b = Stream("a", range(5, 14)), Stream("b", range(30, 37), GREEDY)
    plain = Stream("plain", range(50, 60))
    streams = [a, b, plain]
    for each in streams:
        each.take(driver.free, 30)
    chunks = tuple(each.chunk(0, len(each.prompt)) for each in streams)
    tokens = [token for each in streams for token in each.prompt]
    words = words_of(masked(a.tokens), masked(b.tokens))
    done = driver.step(Prefill(chunks, TokenArray.of(tokens), (0, 1), words))
    for each, token in zip(streams, done.firsts, strict=True):
        each.tokens.append(token)
    joins = tuple(each.join(slot) for slot, each in enumerate(streams))
    for step in range(8):
        # b sits out every other step: what it may draw is not known yet.
        sits = (1,) if step % 2 else ()
        rows = [0, 2] if sits else [0, 1, 2]
        held = tuple(slot for slot in (1, 0) if slot in rows)
        words = words_of(*(masked(streams[slot].tokens) for slot in held))
        decode = Decode(joins=joins if not step else (), sits=sits, masked=held, masks=words)
        done = driver.step(decode=decode, rows=len(rows))
        assert done.slots == tuple(rows)
        for slot, token in zip(done.slots, done.tokens, strict=True):
            streams[slot].tokens.append(token)
    for each in (a, b):
        assert each.output == reference(judge, each, len(each.output))
    with torch.inference_mode():
        free = [int(judge(torch.tensor([plain.tokens[: 10 + at]])).logits[0, -1].argmax()) for at in range(9)]
    assert plain.output == free


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"masked": (1,), "masks": words_of({1})}, "chunk 1 is masked, but is no final one of 1"),
        ({"masked": (0, 0), "masks": words_of({1}, {1})}, "a row is masked twice"),
        ({"masked": (0,), "masks": TokenArray.of([1])}, "1 mask words for 1 rows; 5 are one row's"),
        ({"masks": words_of({1})}, "5 mask words for 0 rows"),
    ],
)
def test_masks_that_do_not_fit_a_prompt_are_refused(model, wanted, why):
    driver = Driver(Mesh(model[0], 1))
    stream = Stream("a", range(5))
    stream.take(driver.free, 5)
    with pytest.raises(StepRefusedError, match=why):
        driver.step(Prefill((stream.chunk(0, 5),), TokenArray.of(range(5)), **wanted))


def test_a_row_that_sits_out_has_no_mask(model):
    driver = Driver(Mesh(model[0], 1))
    stream = Stream("a", range(5))
    driver.prefill(stream)
    other = Stream("b", range(5))
    driver.prefill(other)
    joins = (stream.join(0), other.join(1))
    with pytest.raises(StepRefusedError, match="slot 0 sits out and is masked"):
        driver.step(decode=Decode(joins=joins, sits=(0,), masked=(0,), masks=words_of({1})), rows=1)
