import pytest

from edgemesh.engine.null import NullEngine
from edgemesh.engine.turns import Limits, Station, StepRefusedError
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.ids import Layout, Plane
from edgemesh.wire.messages import (
    Chunk,
    Decode,
    Done,
    IdleDone,
    IdlePlan,
    Join,
    Plan,
    Prefill,
    Sampling,
    Scoring,
    Verdict,
)

LIMITS = Limits(pages=20, page_tokens=4, slots=4, positions=60, vocab=50)


def engine(eos=(2,), limits=LIMITS):
    return NullEngine(Station(0, Plane.MIXED, 0), limits, eos)


def plan(tick, rows=0, prefill=None, **decode):
    tokens = rows + (len(prefill.tokens) if prefill else 0)
    verdict = Verdict((tokens,), Layout.RAGGED, 0)
    return Plan(0, Plane.MIXED, 0, tick, verdict, prefill, Decode(**decode) if rows else None)


def chunk(request, final=True, stops=()):
    sampling = Sampling(stop_token_ids=stops) if final else None
    return Prefill((Chunk(request, 0, 3, (1,), final, sampling),), TokenArray.of([1, 2, 3]))


def join(slot, request, token, position=3, stops=()):
    return Join(slot, request, token, position, (1,) * 12, Sampling(stop_token_ids=stops), 1)


def say(request, count, stops=(), eos=(2,)):
    """What a sequence gets: its first token, then decoded ones."""
    null = engine(eos)
    tokens = list(null.execute(plan(0, prefill=chunk(request, stops=stops))).firsts)
    joins = (join(0, request, tokens[0], stops=stops),)
    for tick in range(1, count):
        answer = null.execute(plan(tick, 1, joins=joins if tick == 1 else ()))
        assert (type(answer), answer.slots) == (Done, (0,))
        tokens += answer.tokens
    return tokens


def test_a_request_gets_the_same_tokens_wherever_it_is_and_joins():
    whole = say("a", 30)
    assert whole == say("a", 30)
    assert whole != say("b", 30)
    assert len(set(whole)) > 5
    null = engine()
    rejoined = null.execute(plan(0, 2, joins=(join(3, "a", 1, position=13), join(1, "b", 1))))
    assert rejoined.slots == (1, 3)
    assert rejoined.tokens == (say("b", 2)[1], whole[11])


def test_no_token_ends_its_request():
    free = say("a", 30, eos=())
    stops = tuple(sorted(set(free)))[:3]
    assert not set(say("a", 30, stops, eos=free[:2])) & {*stops, *free[:2]}
    assert all(0 <= token < LIMITS.vocab for token in free)


def test_rows_sit_and_leave_and_idle_plans_are_answered():
    null = engine()
    null.execute(plan(0, 2, joins=(join(0, "a", 1), join(2, "b", 1))))
    assert null.execute(plan(1, 1, sits=(0,))).slots == (2,)
    assert null.execute(plan(2, 1, leaves=(2,))).tokens == (say("a", 3)[2],)
    idle = null.execute(IdlePlan(0, Plane.MIXED, 0, 3, Verdict((0,), Layout.RAGGED, 0)))
    assert (type(idle), idle.tick) == (IdleDone, 3)
    assert null.execute(plan(4, prefill=chunk("c", final=False))).firsts == ()


def test_prompts_are_scored_with_a_made_up_number():
    null = engine()
    scored = [
        Chunk("a", 0, 3, (1,), scoring=Scoring(1, 2, TokenArray.of([7, 49]))),
        Chunk("b", 0, 3, (2,), scoring=Scoring(0, 0, TokenArray.of([1]))),
        Chunk("c", 0, 3, (3,)),
    ]
    first, second = null.execute(plan(0, prefill=Prefill(tuple(scored), TokenArray.of([1] * 9)))).prompt_logprobs
    assert (first.start, first.top, first.count, second.start, second.count) == (1, 2, 2, 0, 1)
    numbers, values = first.rows.tolist(), first.rows.buffer.cast("f").tolist()
    assert (numbers[1], numbers[2::2][:2], numbers[8], numbers[10]) == (1, [7, 8], 49, 0)
    assert {values[0], values[3], values[5], values[6]} == {-5.0}


def test_what_a_rank_would_refuse_is_refused():
    null = engine()
    with pytest.raises(StepRefusedError, match="slot 3 leaves"):
        null.execute(plan(0, 1, leaves=(3,)))
    with pytest.raises(StepRefusedError, match="tick: 1"):
        null.execute(plan(1, prefill=chunk("a")))
    assert null.execute(plan(0, prefill=chunk("a"))).tick == 0
