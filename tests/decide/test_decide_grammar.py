"""Masks and the scheduler: no token is drawn before it is known what it may be, and the end comes where the grammar has it."""

import random
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling_world import EOS, VOCAB, World, draw

from edgemesh.decide import planning
from edgemesh.decide.asks import Answer
from edgemesh.decide.grammar import bits, narrowed
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.ids import Finish, Plane
from edgemesh.wire.messages import Cancel, Failed, Sampling, Submit

BYTES = -(-VOCAB // 32) * 4


def mask_of(ids):
    return sum(1 << each for each in ids).to_bytes(BYTES, "little")


def rule(source, out):
    """What may follow: a function of the source and of what was said; nothing after so many tokens as the source says."""
    if len(out) >= int(source.rpartition(" ")[2]):
        return set()
    chance = random.Random(f"{source} {list(out)}")
    return set(chance.sample(range(VOCAB), chance.choice([1, 3, VOCAB])))


def right(submit):
    """What a constrained request must give."""
    out = list(submit.emitted)
    while len(out) < submit.max_tokens:
        allowed = rule(submit.grammar, out) if submit.grammar else set(range(VOCAB))
        if submit.grammar and not allowed:
            return out, Finish.STOP
        if submit.grammar and EOS not in submit.sampling.stop_token_ids:
            allowed = allowed - {EOS} or allowed
        token = draw((*submit.prompt, *out), sum(1 << each for each in allowed))
        if token in submit.sampling.stop_token_ids or (submit.grammar and token == EOS):
            return out, Finish.STOP
        out.append(token)
    return out, Finish.LENGTH


class Host:
    """Answers a world's questions, each time some of them, in any order."""

    def __init__(self, world):
        self.world, self.said = world, {}

    def answer(self, chance=1.0):
        world = self.world
        world.rng.shuffle(world.asks)
        for ask in [each for each in world.asks if world.rng.random() < chance]:
            world.asks.remove(ask)
            said = self.said.setdefault(ask.sequence, [])
            said.extend(ask.tokens)
            allowed = rule(ask.sequence.submit.grammar, said)
            mask = mask_of(allowed) if allowed else b""
            world.scheduler.answer(Answer(ask.sequence, mask, not allowed, mask_ns=1), world.now)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    planes=st.sampled_from([(Plane.PREFILL, Plane.DECODE), (Plane.MIXED,)]),
    pages=st.integers(9, 40),
    slots=st.integers(1, 6),
    peers=st.booleans(),
)
def test_constrained_and_ordinary_streams_get_exactly_their_own_tokens(seed, planes, pages, slots, peers):
    world = World(seed, planes, pages, slots, peers=peers, prefix=True)
    rng, host, cancelled = world.rng, Host(world), set()
    for number in range(rng.randrange(1, 12)):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 18))]
        stops = (EOS,) if rng.random() < 0.5 else ()
        grammar = f"{number} {rng.randrange(12)}" if rng.random() < 0.7 else ""
        sampling = Sampling(stop_token_ids=stops)
        world.submit(Submit(f"r{number}", 0, 0, TokenArray.of(prompt), sampling, rng.randrange(1, 14), grammar=grammar))
        for _ in range(rng.randrange(4)):
            world.step()
            host.answer(0.5)
        if rng.random() < 0.2 and f"r{number}" not in world.ends:
            cancelled.add(f"r{number}")
            world.scheduler.cancel(Cancel(0, f"r{number}", 0))
    for _ in range(20_000):
        world.step()
        host.answer(0.5)
        if world.scheduler.quiet and not world.asks and not world.scheduler.busy:
            break
    for name, submit in world.submits.items():
        end = world.ends.get(name)
        if isinstance(end, Failed):
            assert end.code == "context_length_exceeded"
        elif name in cancelled and end is None:
            assert world.got[name] == right(submit)[0][: len(world.got[name])]
        else:
            assert (world.got[name], end) == right(submit)
    state = world.scheduler.state
    assert state.pages.free == state.pages.usable
    assert not state.asking
    constrained = [submit for name, submit in world.submits.items() if submit.grammar]
    refused = [end for end in world.ends.values() if isinstance(end, Failed)]
    assert len(world.dropped) >= len(constrained) - len(refused)
    assert len(set(world.dropped)) == len(world.dropped)


def scripted(planes=(Plane.MIXED,), pages=40, slots=4):
    world = World(1, planes, pages, slots, peers=False, prefix=True)
    world.rng.random = lambda: 1.0  # every draw is accepted
    return world


def ask(world, name="r", *, output=6, sampling=None, grammar="g 100", **fields):
    world.submit(Submit(name, 0, 0, TokenArray.of(range(5)), sampling or Sampling(), output, grammar=grammar, **fields))
    world.settle()


def answer(world, ids=(), *, ended=False, **fields):
    """Answer the only question, and let things happen until there is another, or nothing moves."""
    (question,) = world.asks
    world.asks.clear()
    world.scheduler.answer(Answer(question.sequence, mask_of(ids), ended, **fields), world.now)
    world.settle()
    while not world.asks and world.step():
        pass


@pytest.mark.parametrize("planes", [(Plane.MIXED,), (Plane.PREFILL, Plane.DECODE)])
def test_the_first_token_waits_for_its_mask_and_takes_it_along(planes):
    world = scripted(planes)
    ask(world)
    while world.step():
        pass
    assert world.got["r"] == []
    answer(world, {7})
    assert world.got["r"] == [7]
    assert world.asks[0].tokens == (7,)


def test_where_only_the_end_may_follow_the_stream_is_whole_without_another_step():
    world = scripted()
    ask(world)
    answer(world, {7})
    ticks = world.scheduler.state.pipelines[Plane.MIXED].tick
    answer(world, ended=True)
    assert (world.got["r"], world.ends["r"]) == ([7], Finish.STOP)
    assert world.scheduler.state.pipelines[Plane.MIXED].tick == ticks


def test_a_grammar_that_allows_nothing_but_the_end_at_once_gives_an_empty_text():
    world = scripted()
    ask(world)
    answer(world, ended=True)
    assert (world.got["r"], world.ends["r"]) == ([], Finish.STOP)
    assert world.scheduler.quiet


def test_an_end_that_is_drawn_is_no_token_of_the_stream():
    world = scripted()
    ask(world, sampling=Sampling(stop_token_ids=(EOS,)))
    answer(world, {7})
    answer(world, {EOS})
    assert (world.got["r"], world.ends["r"]) == ([7], Finish.STOP)


def test_a_client_that_ignores_ends_gets_none_while_anything_else_may_follow():
    world = scripted()
    ask(world)
    answer(world, {EOS, 7})
    assert world.got["r"] == [7]
    answer(world, {EOS})
    assert (world.got["r"], world.ends["r"]) == ([7], Finish.STOP)


def test_an_end_before_enough_is_said_ends_all_the_same():
    world = scripted()
    ask(world, sampling=Sampling(stop_token_ids=(EOS,), min_tokens=5))
    answer(world, {EOS})
    assert (world.got["r"], world.ends["r"]) == ([], Finish.STOP)


def test_only_ids_that_the_client_allows_are_left_and_none_is_an_error():
    world = scripted()
    ask(world, sampling=Sampling(allowed_token_ids=(7, 8)))
    answer(world, {1, 2, 8, 9})
    assert world.got["r"] == [8]
    answer(world, {1, 2})
    assert (world.ends["r"].status, world.ends["r"].code) == (400, "invalid_grammar")
    assert "after 1 tokens" in world.ends["r"].reason
    assert "`allowed_token_ids`" in world.ends["r"].reason


@pytest.mark.parametrize(("status", "code"), [(400, "invalid_grammar"), (500, "grammar_violated")])
def test_an_error_ends_the_request_with_its_reason(status, code):
    world = scripted()
    ask(world)
    answer(world, error="no good", status=status)
    failed = world.ends["r"]
    assert (failed.status, failed.code, failed.reason) == (status, code, "no good")
    assert world.scheduler.quiet


def test_a_request_for_no_token_has_no_grammar_to_ask_about():
    world = scripted()
    ask(world, output=0)
    world.finish()
    assert not world.asks


def test_a_late_answer_about_a_request_that_is_gone_changes_nothing():
    world = scripted()
    ask(world)
    world.scheduler.cancel(Cancel(0, "r", 0))
    assert world.scheduler.quiet
    answer(world, {7})
    assert world.got["r"] == []
    assert len(world.dropped) == 1


def test_a_question_that_is_not_answered_in_time_ends_its_request():
    world = scripted()
    ask(world)
    due = world.scheduler.deadline()
    assert due == world.config.grammar_ns
    world.now = due
    world.settle()
    assert "use a simpler grammar" in world.ends["r"].reason
    assert world.scheduler.deadline() is None


def test_masks_of_a_step_fit_into_a_frame_and_the_others_wait(monkeypatch):
    monkeypatch.setattr(planning, "MAX_MASK_BYTES", 2 * BYTES)
    world, host = scripted(), None
    host = Host(world)
    for number in range(4):
        ask(world, f"r{number}", grammar=f"{number} 100")
    most = 0
    while not world.scheduler.quiet:
        host.answer(2.0)
        world.settle()
        for step in [*world.scheduler.state.pipelines[Plane.MIXED].flying]:
            parts = [part for part in (step.prefill, step.decode) if part is not None]
            most = max([most, *(len(part.masked) for part in parts)])
        world.step()
    assert 2 <= most <= 4
    for number in range(4):
        submit = world.submits[f"r{number}"]
        assert (world.got[submit.request], world.ends[submit.request]) == right(submit)


def test_what_it_cost_is_noted():
    world = scripted()
    ask(world)
    answer(world, {7}, compile_ns=9, mask_ns=3)
    answer(world, {7}, mask_ns=4)
    answer(world, ended=True, mask_ns=5)
    notes = {name: fields for name, fields in world.notes if name in {"request.grammar", "request.masked"}}
    assert notes["request.grammar"]["compile_ns"] == 9
    assert notes["request.grammar"]["characters"] == len("g 100")
    assert (notes["request.masked"]["masks"], notes["request.masked"]["mask_ns"]) == (3, 12)


@given(st.sets(st.integers(0, VOCAB - 1)), st.sets(st.integers(0, VOCAB - 1)), st.sets(st.integers(0, 80)))
def test_a_mask_is_narrowed_as_sets_are(mask, allowed, without):
    left = mask & allowed if allowed else mask
    left = left - without or left
    assert narrowed(mask_of(mask), bits(allowed), bits(without)) == mask_of(left)


def test_what_a_request_allows_is_worked_out_once_and_not_for_each_token(monkeypatch):
    counted = Mock(wraps=bits)
    monkeypatch.setattr("edgemesh.decide.constraining.bits", counted)
    world = scripted()
    ask(world)
    asked = counted.call_count
    for _ in range(3):
        answer(world, {7})
    assert counted.call_count == asked == 2
