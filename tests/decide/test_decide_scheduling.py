"""The scheduler against ranks that remember every KV slot: whatever happens, each stream gets exactly its own tokens."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling_world import PAGE, VOCAB, World, ask, draw, scores, scripted, stream

from edgemesh.decide import planning
from edgemesh.decide.results import apply
from edgemesh.decide.scheduling import Scheduler
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.codec import INLINE_BYTES, MAX_FRAMES, encode
from edgemesh.wire.ids import Finish, Layout, Plane
from edgemesh.wire.messages import (
    Cancel,
    Credit,
    Done,
    Failed,
    Place,
    Plan,
    Sampling,
    Submit,
    Verdict,
)

PLANES = st.sampled_from([(Plane.PREFILL, Plane.DECODE), (Plane.MIXED,)])


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    planes=PLANES,
    pages=st.integers(9, 40),
    slots=st.integers(1, 6),
    peers=st.booleans(),
    prefix=st.booleans(),
    park_ns=st.sampled_from([0, 5, 10**6]),
    pace_ns=st.sampled_from([0, 0, 7, 40]),
)
def test_every_stream_gets_exactly_its_own_tokens_and_every_page_comes_back(
    seed, planes, pages, slots, peers, prefix, park_ns, pace_ns
):
    world = World(seed, planes, pages, slots, peers=peers, prefix=prefix, park_ns=park_ns, pace_ns=pace_ns)
    rng = world.rng
    common = [rng.randrange(VOCAB) for _ in range(12)]
    cancelled = set()
    for number in range(rng.randrange(1, 14)):
        length, output = rng.randrange(1, 18), rng.randrange(14)
        prompt = [*common, *common][: rng.choice([0, length])] or [rng.randrange(VOCAB) for _ in range(length)]
        stops = tuple(rng.sample(range(VOCAB), rng.choice([0, 3])))
        sampling = Sampling(stop_token_ids=stops)
        credit = rng.choice([1, 3, 1 << 20])
        world.submit(
            Submit(
                f"r{number}",
                0,
                number % 2,
                TokenArray.of(prompt),
                sampling,
                output,
                key=f"k{number % 3}",
                credit=credit,
                prompt_logprobs=rng.choice([-1, -1, 0, 2]),
            )
        )
        for _ in range(rng.randrange(4)):
            world.step()
        if rng.random() < 0.2:
            victim = f"r{rng.randrange(number + 1)}"
            if victim not in world.ends:
                cancelled.add(victim)
                world.scheduler.cancel(Cancel(0, victim, 0))
    for _ in range(20_000):
        world.step()
        for name in world.submits:
            if rng.random() < 0.3:
                world.scheduler.credit(Credit(0, name, 0, len(world.got[name]) + 2))
        if world.scheduler.quiet:
            break
    for name, submit in world.submits.items():
        tokens, reason = stream(submit)
        end = world.ends.get(name)
        if isinstance(end, Failed):
            assert end.status == 400, end
            assert len(submit.prompt) + submit.max_tokens > (pages - 1) * PAGE
        elif name in cancelled and end is None:
            assert world.got[name] == tokens[: len(world.got[name])]
        else:
            assert world.got[name] == tokens
            assert end is reason
            assert world.scores[name] == scores(submit)
    world.scheduler.check()
    state = world.scheduler.state
    assert state.pages.free == state.pages.usable
    assert not state.wasted
    assert sorted(state.free_slots) == list(range(slots))
    assert not any((state.live, state.admitted, state.ready, state.rows, state.paused, len(state.queue)))


def test_a_prompt_that_is_known_is_not_computed_again():
    world = scripted()
    ask(world, "a", list(range(17)), 3)
    world.finish()
    ask(world, "b", [*range(16), 40], 3)
    world.settle()
    (sequence,) = world.scheduler.state.admitted
    assert sequence.cached == 16
    world.finish()
    assert world.got["b"] == stream(world.submits["b"])[0]


@pytest.mark.parametrize("tenants", [("", ""), ("a", "a"), ("a", "b"), ("", "a"), ("a", "")])
def test_a_prompt_is_known_to_its_own_tenant_alone(tenants):
    world = scripted()
    prompt = list(range(1, 18))
    for name, tenant in zip("rs", tenants, strict=True):
        ask(world, name, prompt, 3, tenant=tenant)
        sequence = world.scheduler.state.live[name]
        world.finish()
    assert sequence.cached == (16 if tenants[0] == tenants[1] else 0)


def test_a_request_larger_than_the_pool_is_refused_and_hurts_no_one():
    world = scripted(pages=5)
    ask(world, "big", list(range(15)), 2)
    ask(world, "small", [1, 2], 3)
    world.finish()
    assert world.ends["big"].code == "context_length_exceeded"
    assert world.got["small"] == stream(world.submits["small"])[0]


@pytest.mark.parametrize("planes", [(Plane.PREFILL, Plane.DECODE), (Plane.MIXED,)])
@pytest.mark.parametrize(("pages", "slots"), [(9, 4), (40, 2)])
def test_clients_that_do_not_read_keep_their_place_from_nobody(planes, pages, slots):
    world = scripted(planes, pages, slots, park_ns=20)
    for number in range(2):  # together they hold all pages, or all slots
        ask(world, f"slow{number}", [number] * 12, 10, credit=4)
    for _ in range(60):
        world.step()
    assert [len(world.got[f"slow{number}"]) for number in range(2)] == [4, 4]
    held = set(world.scheduler.state.admitted)
    assert len(held) == 2, "who is in nobody's way keeps what it has"
    ask(world, "other", [7] * 10, 3)
    due = world.scheduler.deadline
    for _ in range(60):
        world.step()
    assert world.ends["other"] is Finish.LENGTH
    assert world.got["other"] == stream(world.submits["other"])[0]
    assert due() is not None
    assert due() > world.now, "nothing is left to be done at once"
    for number in range(2):
        world.scheduler.credit(Credit(0, f"slow{number}", 0, 100))
    world.finish()
    for number in range(2):
        assert world.got[f"slow{number}"] == stream(world.submits[f"slow{number}"])[0]
    assert world.scheduler.state.pages.free == world.scheduler.state.pages.usable


@pytest.mark.parametrize("end", ["cancel", "deadline", "gateway"])
def test_a_parked_request_ends_as_any_other(end):
    world = scripted(slots=1, park_ns=5)
    ask(world, "slow", [1, 2, 3], 10, credit=2)
    for _ in range(30):
        world.step()
    ask(world, "other", [7] * 10, 30)
    while not world.got["other"]:
        world.step()
    (parked,) = world.scheduler.state.paused
    assert not parked.pages
    if end == "cancel":
        world.scheduler.cancel(Cancel(0, "slow", 0))
    elif end == "gateway":
        world.scheduler.abort_gateway(0)
    else:
        world.now += world.config.pause_ns
    world.finish()
    assert len(world.got["slow"]) == 2
    assert ("slow" in world.ends) == (end == "deadline")
    assert not world.scheduler.state.paused


def test_a_cancel_before_its_request_is_remembered_once():
    world = scripted()
    world.scheduler.cancel(Cancel(0, "a", 0))
    ask(world, "a", [1, 2, 3], 5)
    world.finish()
    assert world.got["a"] == []
    ask(world, "a", [1, 2, 3], 5, attempt=1)
    world.finish()
    assert world.got["a"] == stream(world.submits["a"])[0]


def test_tombstones_are_bounded():
    world = scripted()
    for number in range(10_000):
        world.scheduler.cancel(Cancel(0, f"r{number}", 0))
    assert len(world.scheduler.state.tombstones) == 4096


def test_a_later_attempt_takes_over_with_the_tokens_so_far():
    world = scripted()
    ask(world, "a", [1, 2, 3], 8)
    while len(world.got["a"]) < 3:
        world.step()
    so_far = world.got["a"]
    whole = stream(world.submits["a"])[0]
    ask(world, "a", [1, 2, 3], 8, attempt=1, emitted=TokenArray.of(so_far))
    world.finish()
    assert world.got["a"] == whole


def test_a_client_that_takes_nothing_loses_its_request_and_no_other():
    world = scripted()
    ask(world, "slow", [1, 2], 20, credit=2)
    ask(world, "fast", [3, 4], 6)
    for _ in range(200):
        world.step()
    assert world.ends["fast"] is Finish.LENGTH
    assert world.got["slow"] == stream(world.submits["slow"])[0][:2]
    world.now = world.scheduler.deadline()
    world.settle()
    assert (world.ends["slow"].status, world.ends["slow"].code) == (408, "slow_client")
    world.finish()


def test_a_short_prompt_is_not_stuck_behind_a_long_one():
    world = scripted()
    ask(world, "long", list(range(80)), 1)
    world.step()
    ask(world, "short", [1, 2, 3], 1)
    while "short" not in world.ends:
        world.step()
    assert "long" not in world.ends


def test_keys_share_the_group_by_tokens_not_by_requests():
    world = scripted(slots=1, prefix=False)
    for number in range(20):
        ask(world, f"many{number}", list(range(8)), 1, key="many")
    ask(world, "one", list(range(8)), 1, key="one")
    while "one" not in world.ends:
        world.step()
    assert sum(name.startswith("many") for name in world.ends) <= 4


def test_a_full_queue_is_said_so():
    world = scripted()
    for number in range(1001):
        ask(world, f"r{number}", [1], 1)
    world.settle()
    assert (world.ends["r1000"].status, world.ends["r1000"].code) == (429, "queue_full")


@pytest.mark.parametrize("planes", [(Plane.PREFILL, Plane.DECODE), (Plane.MIXED,)])
def test_min_tokens_outlast_a_stop_token(planes):
    world = scripted(planes)
    first = draw((1, 2))
    ask(world, "a", [1, 2], 5, sampling=Sampling(stop_token_ids=(first,), min_tokens=0))
    ask(world, "b", [1, 2], 5, sampling=Sampling(stop_token_ids=(first,), min_tokens=1))
    world.finish()
    assert world.got["a"] == []
    assert world.got["b"][0] == first


def test_a_plan_fits_one_message_however_many_rows_come_with_their_history():
    count, length = MAX_FRAMES + 10, INLINE_BYTES // 4 + 1
    world = scripted(pages=count * (length // PAGE + 2), slots=count, prefix=False)
    scheduler = Scheduler(dataclasses.replace(world.config, chunk_tokens=count * length, max_waiting=count))
    for number in range(count):
        sampling = Sampling(repetition_penalty=2.0)
        scheduler.place(Place(0, Submit(f"r{number}", 0, 0, TokenArray.of(range(length)), sampling, 9)), 0)
    state, joined, largest = scheduler.state, [], 0
    for plane in (Plane.PREFILL, Plane.DECODE):
        while len(joined) < count and (step := planning.plan(state, plane, 0)) is not None:
            sent = encode(Plan(0, plane, 0, 0, Verdict((1,), Layout.EVEN, 1), step.prefill, step.decode))
            largest = max(largest, len(sent))
            joined += [join.request for join in step.decode.joins] if step.decode else []
            firsts = tuple(1 for run in step.chunks if run.final)
            slots = tuple(run.slot for run in step.rows)
            apply(state, step, Done(0, plane, 0, 0, slots, (1,) * len(slots), firsts))
    assert sorted(joined) == sorted(f"r{number}" for number in range(count))
    assert MAX_FRAMES // 4 < largest <= MAX_FRAMES


def test_the_load_tells_the_prompts_that_wait():
    world = scripted(slots=2)
    for number in range(5):
        ask(world, f"r{number}", list(range(7)), 3)
    assert (world.scheduler.load(1).waiting, world.scheduler.load(1).waiting_tokens) == (5, 35)
    world.step()
    load = world.scheduler.load(2)
    assert (load.waiting, load.waiting_tokens) == (3, 21)
    world.finish()
    assert (world.scheduler.load(3).waiting_tokens, world.scheduler.load(3).outstanding_tokens) == (0, 0)


def test_the_load_falls_with_every_token():
    world = scripted(slots=2)
    for number in range(3):
        ask(world, f"r{number}", [number, *range(6)], 9)
    told = [world.scheduler.load(1).outstanding_tokens]
    assert told == [3 * (7 + 9)]
    world.settle()
    while world.step():
        told.append(world.scheduler.load(1).outstanding_tokens)
        live = world.scheduler.state.live.values()
        left = sum(9 - len(world.got[each.submit.request]) for each in live if each.out)
        assert told[-1] >= left
        if all(each.out for each in live):
            assert told[-1] == left
    assert told[-1] == 0
    assert told == sorted(told, reverse=True)
    assert len(set(told)) > 9, "it falls step by step"
