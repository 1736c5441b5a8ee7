"""Requests whose output a grammar restricts, in whole simulated meshes: beside others, alone, late, preempted, and gone."""

from collections import Counter

import pytest
from grammars import Rule
from players import MS, ask
from simulation import Simulation
from test_sim_catches import found
from worlds import world

from edgemesh.decide import planning
from edgemesh.decide.request import Sequence
from edgemesh.decide.state import GroupState


def mesh(streams, seed=0, **values):
    return Simulation(seed, world(spikes=0.0, **values), streams)


def constrained(count, seed=0, **fields):
    return [
        ask(f"r{each}", 8 + each, 24, seed=each, at_ms=each / 3, **fields | {"grammar": f"grammar-{seed}-{each}"})
        for each in range(count)
    ]


@pytest.mark.parametrize("split", ["true", "false"])
@pytest.mark.parametrize("groups", [2, 4, 8])
@pytest.mark.parametrize("seed", range(2))
def test_a_constrained_request_runs_while_all_other_groups_are_idle(groups, split, seed):
    streams = [ask("only", 30, 24, pin=groups - 1, grammar=f"grammar-{seed}")]
    simulation = mesh(streams, seed, dp=groups, tp=groups, split=split).play()
    tokens, finish = simulation.oracles["only"]
    assert (streams[0].tokens, streams[0].end) == (tokens, finish)
    assert tokens
    for verdict in simulation.verdicts.values():
        assert [bool(each) for each in verdict.tokens] == [False] * (groups - 1) + [True]


@pytest.mark.parametrize("split", ["true", "false"])
def test_rows_beside_a_slow_grammar_go_on(split):
    slow = ask("slow", 20, 10, grammar="grammar-1")
    others = [ask(f"r{each}", 20, 40, seed=each) for each in range(4)]
    simulation = mesh([slow, *others], dp=1, tp=1, split=split, grammar_ms=5_000, pages=200).play()
    assert all(other.ended_ns - other.at_ns < 300 * MS for other in others)
    assert slow.first_ns - slow.at_ns > 300 * MS
    joint = [plan for plan in simulation.plans.values() if plan.decode and plan.decode.sits]
    assert not joint, "a row that was never ready has no slot to sit in"


def test_an_ordinary_row_runs_in_every_tick_in_which_a_constrained_one_sits():
    constrained_one = ask("c", 8, 24, grammar="grammar-3")
    ordinary = ask("o", 8, 40, seed=1)
    simulation = mesh([constrained_one, ordinary], dp=1, tp=1, split="false", grammar_ms=3, step_ms=1).play()
    sitting = [plan.decode for plan in simulation.plans.values() if plan.decode and plan.decode.sits]
    assert sitting, "the constrained row never waited"
    assert all(len(decode.sits) == 1 for decode in sitting)
    assert Counter(stream.end for stream in simulation.streams)[""] == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("split", ["true", "false"])
def test_a_small_pool_preempts_constrained_requests_which_still_get_their_own_tokens(seed, split):
    streams = constrained(20, seed)
    simulation = mesh(
        streams, seed, dp=1, tp=1, split=split, pages=14, slots=8, reserve_tokens=0, retries=0.3, longest=52
    ).play()
    assert simulation.events("request.preempted")
    for stream in streams:
        tokens, finish = simulation.oracles[stream.submit.request]
        assert (stream.tokens, stream.end) == (tokens, finish)


@pytest.mark.parametrize("seed", range(4))
def test_clients_of_constrained_requests_that_leave_cost_nothing_afterwards(seed):
    streams = constrained(30, seed)
    for stream in streams:
        stream.abort_ns = (int(stream.submit.request[1:]) * 7919 + seed * 104729) % (30 * MS)
    simulation = mesh(streams, seed, dp=2, tp=2, grammar_ms=2).play()
    assert sum(stream.end == "cancelled" for stream in streams) > 10
    assert all(not group.scheduler.state.asking for group in simulation.groups)


def test_a_source_that_does_not_compile_ends_its_own_request_alone():
    streams = constrained(12)
    streams[5] = ask("r5", 13, 24, seed=5, grammar="bad")
    simulation = mesh(streams, dp=2, tp=2).play()
    assert streams[5].end == "error 400"
    assert "this source is none" in streams[5].reason
    assert all(stream.end in {"stop", "length"} for at, stream in enumerate(streams) if at != 5)
    assert len(simulation.events("request.grammar")) == 11 + 1


def test_an_answer_that_never_comes_ends_the_request_and_nobody_elses(monkeypatch):
    def lose(self, asks, _dropped):
        self.lost = getattr(self, "lost", 0) + len(asks)

    monkeypatch.setattr("grammars.SimDesk.take", lose)
    lost, other = ask("lost", 8, 24, grammar="grammar-1"), ask("other", 8, 24)
    mesh([lost, other], dp=1, tp=1).play()
    assert (lost.end, other.end) == ("error 400", "length")
    assert "took longer than 60 s" in lost.reason


def test_what_a_grammar_cost_is_in_the_trace():
    streams = constrained(3)
    simulation = mesh(streams, dp=1, tp=1).play()
    assert {each["compile_ns"] for each in simulation.events("request.grammar")} == {5}
    for each in simulation.events("request.masked"):
        assert each["mask_ns"] == 7 * each["masks"]
        assert each["waited_ns"] > 0


def test_a_stream_that_was_submitted_again_goes_on_within_its_grammar():
    first = ask("r0", 8, 24, grammar="grammar-2")
    whole = mesh([first], dp=1, tp=1).play().oracles["r0"][0]
    assert 2 < len(whole) <= Rule("grammar-2").longest
    for have in range(1, len(whole)):
        again = ask("r0", 8, 24, grammar="grammar-2", emitted=first.submit.prompt.of(whole[:have]))
        again.tokens.extend(whole[:have])
        mesh([again], dp=1, tp=1).play()
        assert again.tokens == whole


# --- faults that are put in on purpose ---

ALL = {"grammars": 1.0, "slots": 4}


def test_the_simulator_finds_nothing_wrong_with_grammars():
    assert found(**ALL) == "nothing"


def test_a_row_that_draws_before_its_mask_is_known(monkeypatch):
    monkeypatch.setattr(Sequence, "drawable", property(lambda _self: True))
    text = found(**ALL)
    assert "is right" in text or "but it has said" in text


def test_a_mask_that_is_left_out_of_the_plan(monkeypatch):
    monkeypatch.setattr(planning, "packed", lambda masks: type("None", (), {"__len__": lambda _: 0})())
    assert found(**ALL) != "nothing"


def test_a_token_that_is_asked_about_twice(monkeypatch):
    asked = GroupState.ask
    monkeypatch.setattr(
        GroupState, "ask", lambda self, sequence, grammar, tokens: asked(self, sequence, grammar, tokens * 2)
    )
    assert "but it has said" in found(**ALL)
