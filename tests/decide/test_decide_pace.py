"""`pace_ns`: decode steps that leave the cards to prompts that wait, for how long, and what is told of it."""

import itertools
from statistics import median

import pytest
from scheduling_world import ask, scripted, stream

from edgemesh.decide import planning
from edgemesh.decide.admission import admit
from edgemesh.decide.grammar import Constraint
from edgemesh.decide.steps import Pipeline, Step
from edgemesh.wire.ids import Plane
from edgemesh.wire.messages import Done, IdleDone, Shape


@pytest.mark.parametrize("peers", [False, True])
def test_decode_keeps_its_pace_while_prompts_are_read_and_no_longer(peers):
    world = scripted(pages=140, pace_ns=12)
    world.peers = peers
    state, decode = world.scheduler.state, world.scheduler.state.pipelines[Plane.DECODE]

    holds, settle = [], world.settle

    def settled():
        """What each hold took, from the first turn in which nothing was planned to the plan."""
        settle()
        if state.held_until_ns is not None:
            holds.extend([] if holds and holds[-1] < 0 else [-world.now])
        elif holds and holds[-1] < 0 and decode.committed is not None:
            holds[-1] += world.now

    world.settle = settled

    def gaps(going):
        """Times between decode steps with work, while ``going`` says so."""
        begun = [decode.worked_ns]
        while going():
            world.step()
            if state.held_until_ns is not None:
                assert world.scheduler.deadline() == state.held_until_ns
                assert decode.arrived is None, "peers wait for a step that is held, and do not run without it"
            if decode.worked_ns != begun[-1]:
                begun.append(decode.worked_ns)
        return [later - earlier for earlier, later in itertools.pairwise(begun)]

    ask(world, "row", [1, 2], 60)
    assert median(gaps(lambda: len(world.got["row"]) < 12)) < 12
    ask(world, "prompt", [7] * 500, 3)
    while not state.prefilling:
        world.step()

    def pressed():
        left = sum(each.target - each.planned for each in state.prefilling)
        return left >= (planning.PRESSED_CHUNKS + 1) * world.config.chunk_tokens

    held = gaps(pressed)
    assert len(held) > 2
    assert min(held[1:]) >= 12
    eased = gaps(lambda: state.prefilling)
    assert max(eased[1:], default=0) <= max(held)
    assert median(gaps(lambda: len(world.got["row"]) < 50)[1:]) < 12
    world.finish()
    assert world.got["row"] == stream(world.submits["row"])[0]
    told = [(fields["paced_ns"], fields["idle"]) for event, fields in world.notes if "paced_ns" in fields]
    assert told
    assert not any(idle for _, idle in told)
    assert [ns for ns, _ in told] == holds


def decoding(pace_ns):
    """(world, state, decode's pipeline) with a row that decodes, and no step under way."""
    world = scripted(pages=140, pace_ns=pace_ns)
    ask(world, "row", [1, 2], 60)
    state = world.scheduler.state
    while not state.rows:
        world.step()
    decode = state.pipelines[Plane.DECODE]
    decode.committed = None
    decode.flying.clear()
    return world, state, decode


@pytest.mark.parametrize(
    ("chunks", "typical_ns", "working", "until"),
    [
        # Full chunks of prompts that wait, of which four make the whole pace of 100.
        (1, 0, False, 1025),
        (2, 0, False, 1050),
        (4, 0, False, 1100),
        (8, 0, False, 1100),
        # From the end of the last step, less what a step takes; while that runs, from its beginning.
        (4, 30, False, 1070),
        (2, 30, False, 1020),
        (1, 30, False, None),
        (4, 100, False, None),
        (4, 30, True, 1000),
        (4, 100, True, None),
        (8, 99, True, 1000),
    ],
)
def test_a_step_is_held_the_longer_the_more_prompts_wait(chunks, typical_ns, working, until):
    world, state, decode = decoding(100)
    ask(world, "prompt", [7] * (chunks * world.config.chunk_tokens), 3)
    admit(state, world.now)
    if working:
        decode.flying.append(Step(Shape(1, 1, 3)))
    decode.worked_ns, decode.done_ns, decode.typical_ns = 900, 1000, typical_ns
    assert planning.pace(state, 910) == until
    if until is not None:
        assert planning.pace(state, until - 1) == until
        assert planning.pace(state, until) is None


@pytest.mark.parametrize("still", ["row without credit", "row under a grammar", "prompt under a grammar"])
def test_nothing_is_held_by_rows_or_for_prompts_that_cannot_run(still):
    world, state, decode = decoding(1000)
    for number in range(3):
        ask(world, f"prompt-{number}", [7 + number] * world.config.chunk_tokens, 3)
    admit(state, world.now)
    assert len(state.prefilling) == 3
    decode.done_ns = world.now
    (row,) = state.rows.values()
    assert planning.pace(state, world.now) is not None
    if still == "row without credit":
        row.credit = row.out + row.flying
    else:
        for each in [row] if "row" in still else state.prefilling:
            each.grammar = Constraint()
    assert planning.pace(state, world.now) is None


def test_what_a_step_takes_is_followed_over_some_steps():
    pipeline = Pipeline(0, 0, Plane.DECODE, 0, 2)
    seen = []
    for tick, step_ns in enumerate([800, 1600, 1600, 0]):
        pipeline.flying.append(Step(Shape(1, 1, 1), tick=tick))
        pipeline.acknowledge(Done(0, Plane.DECODE, 0, tick, (), (), step_ns=step_ns), 5000 + tick)
        seen.append(pipeline.typical_ns)
    assert seen == [800, 900, 987, 863]
    assert pipeline.done_ns == 5003
    pipeline.flying.append(Step(Shape(), tick=4))
    pipeline.acknowledge(IdleDone(0, Plane.DECODE, 0, 4), 6000)
    assert (pipeline.done_ns, pipeline.typical_ns) == (5003, 863)


def test_steps_that_take_as_long_as_the_pace_follow_each_other_at_once():
    world = scripted(pages=140, pace_ns=12)
    world.ranks[Plane.DECODE].step_ns = 12
    ask(world, "row", [1, 2], 60)
    while len(world.got["row"]) < 3:
        world.step()
    ask(world, "prompt", [7] * 500, 3)
    while len(world.got["row"]) < 20:
        world.step()
        assert world.scheduler.state.held_until_ns is None
    assert world.scheduler.state.prefilling, "prompts wait all the while"
