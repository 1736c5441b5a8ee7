"""Log-probabilities of prompts: every position exactly once, whatever is cached, cut, preempted or asked for again."""

import dataclasses

import pytest
from scheduling_world import World, scores, stream

from edgemesh.decide import planning
from edgemesh.decide.scheduling import Scheduler
from edgemesh.decide.scoring import ScoresError
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.ids import Finish, Layout, Plane
from edgemesh.wire.messages import Done, Failed, Place, PromptLogprobs, Release, Sampling, Submit, Verdict

SPLIT = (Plane.PREFILL, Plane.DECODE)


def scripted(planes=SPLIT, pages=40, slots=4):
    world = World(1, planes, pages, slots, peers=False, prefix=True)
    world.rng.random = lambda: 1.0  # every draw is accepted
    return world


def ask(world, name, prompt, output, top=0, **fields):
    submit = Submit(name, 0, 0, TokenArray.of(prompt), Sampling(), output, prompt_logprobs=top, **fields)
    world.submit(submit)
    return submit


def right(world):
    for name, submit in world.submits.items():
        assert world.ends[name] is Finish.LENGTH
        assert world.got[name] == stream(submit)[0]
        assert world.scores[name] == scores(submit)


@pytest.mark.parametrize("planes", [SPLIT, (Plane.MIXED,)])
@pytest.mark.parametrize("output", [0, 1, 3])
def test_a_known_prompt_is_scored_anew_and_becomes_known_itself(planes, output):
    world = scripted(planes)
    prompt = list(range(18))
    for name, top in (("plain", -1), ("first", 2), ("again", 0), ("after", -1)):
        ask(world, name, prompt, output, top)
        world.settle()
        cached = world.scheduler.state.live[name].cached
        assert cached == {"plain": 0, "after": 16}.get(name, 0)
        world.finish()
    right(world)


def test_a_prompt_alone_ends_when_it_is_computed_and_its_pages_come_back():
    world = scripted()
    ask(world, "long", list(range(30)), 0, -1)
    ask(world, "one", [7], 0, 3)
    world.finish()
    right(world)
    assert world.got == {"long": [], "one": []}
    assert world.scheduler.state.pages.free == world.scheduler.state.pages.usable
    ask(world, "known", list(range(30)), 0, -1)
    world.settle()
    assert world.scheduler.state.live["known"].cached == 28
    world.finish()


def test_what_was_sent_stays_sent_when_a_prompt_is_preempted():
    world = scripted((Plane.MIXED,))
    submit = ask(world, "a", list(range(30)), 2, 1)
    while len(world.scores["a"]) < 4 * 12:
        world.step()
    sequence = world.scheduler.state.live["a"]
    assert 12 <= sequence.scored < 29
    had = sequence.scored
    world.scheduler.state.preempt(sequence)
    world.settle()
    # The pages of what was sent are known: nothing of them is computed or scored again, all after them is.
    assert sequence.pages
    assert world.scheduler.state.pipelines[Plane.MIXED].committed.chunks[0].scoring.first == had
    world.finish()
    assert world.scores["a"] == scores(submit)
    right(world)


def test_a_request_that_is_sent_again_is_owed_only_what_its_gateway_lacks():
    world = scripted()
    ask(world, "before", list(range(20)), 1, -1)
    world.finish()
    ask(world, "again", list(range(20)), 4, 2, scored=9)
    world.settle()
    assert world.scheduler.state.live["again"].cached == 8
    world.finish()
    ask(world, "all", list(range(20)), 4, 2, scored=19, emitted=TokenArray.of(stream(world.submits["again"])[0][:2]))
    world.settle()
    assert world.scheduler.state.live["all"].cached == 20
    world.finish()
    assert world.scores["all"] == []
    right(world)


def test_a_step_scores_no_more_positions_than_it_may_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(planning, "MAX_SCORED", 3)
    world = scripted()
    world.scheduler.state.config = dataclasses.replace(world.config, chunk_tokens=12)
    steps = []
    scheduler_release = world.scheduler.release

    def release(message, now):
        scheduler_release(message, now)
        plan = world.scheduler.state.effects.plans[-1]
        if plan.plane is Plane.PREFILL and plan.prefill:
            steps.append([(each.request, each.scoring and len(each.scoring.targets)) for each in plan.prefill.chunks])

    world.scheduler.release = release
    for name, top in (("a", 0), ("b", 1), ("plain", -1)):
        ask(world, name, list(range(14)), 1, top)
    world.finish()
    right(world)
    assert all(sum(count or 0 for _, count in step) <= 3 for step in steps)
    assert any({"plain", "a"} <= {name for name, _ in step} for step in steps)


def test_a_failed_draw_scores_nothing_twice():
    world = scripted()
    draws = iter([0.0, 0.0, 1.0])
    world.rng.random = lambda: next(draws, 1.0)
    ask(world, "a", list(range(11)), 2, 1)
    world.finish()
    right(world)


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ((), "0 scored chunks, where 1"),
        ((PromptLogprobs(0, 0, TokenArray.of([0, 1])),), "1 positions from 0 are scored, where 3 from 0"),
        ((PromptLogprobs(1, 0, TokenArray.of([0, 1] * 3)),), "3 positions from 1 are scored, where 3 from 0"),
    ],
)
def test_an_answer_to_another_question_is_a_fault(found, named):
    scheduler = Scheduler(World(1, SPLIT, 40, 4, peers=False, prefix=True).config)
    scheduler.place(Place(0, Submit("a", 0, 0, TokenArray.of([1, 2, 3, 4]), Sampling(), 1, prompt_logprobs=0)), 0)
    scheduler.advance(0)
    scheduler.release(Release(Plane.PREFILL, 0, 0, Verdict((4, 0), Layout.RAGGED, 0)), 0)
    with pytest.raises(ScoresError, match=named):
        scheduler.done(Done(0, Plane.PREFILL, 0, 0, firsts=(1,), prompt_logprobs=found), 0)


@pytest.mark.parametrize(("output", "emitted"), [(0, 1), (2, 2), (2, 3)])
def test_nothing_is_left_of_a_request_whose_tokens_are_out(output, emitted):
    world = scripted()
    ask(world, "a", [1, 2], output, emitted=TokenArray.of([3] * emitted))
    world.settle()
    assert isinstance(world.ends["a"], Failed)
    assert world.ends["a"].code == "nothing_left"
