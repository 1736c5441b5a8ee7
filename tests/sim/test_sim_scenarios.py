"""Situations that others' engines failed in, each set up on purpose in a whole simulated mesh."""

from collections import Counter

import pytest
from players import MS, ask
from simulation import Simulation
from worlds import world

from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.ids import Plane
from edgemesh.wire.messages import Cancel, Drain


def mesh(streams, seed=0, **values):
    return Simulation(seed, world(spikes=0.0, **values), streams)


def by_name(simulation):
    return {stream.submit.request: stream for stream in simulation.streams}


@pytest.mark.parametrize("split", ["true", "false"])
@pytest.mark.parametrize("groups", [2, 3, 8, 16])
def test_one_request_runs_while_all_other_groups_are_idle(groups, split):
    streams = [ask("only", 30, 10, pin=groups - 1)]
    simulation = mesh(streams, dp=groups, tp=groups, split=split).play()
    assert len(simulation.streams[0].tokens) == 10
    for verdict in simulation.verdicts.values():
        assert [bool(each) for each in verdict.tokens] == [False] * (groups - 1) + [True]


def test_nothing_runs_before_the_first_request_and_after_the_last():
    simulation = mesh([ask("only", 8, 4)], dp=4, tp=4).play()
    ticks = len(simulation.verdicts)
    assert 0 < ticks <= 1 + 4 + 1, "one prefill, a decode per token, and at most one planned ahead"
    simulation.at(simulation.clock.now() + 10_000 * MS, lambda: None)
    simulation.run(lambda: False)
    assert len(simulation.verdicts) == ticks


@pytest.mark.parametrize("groups", [2, 5, 16])
@pytest.mark.parametrize("stopped", [0, -1])
@pytest.mark.parametrize("seed", range(2))
def test_a_stopped_group_is_named_a_second_after_it_is_missed(groups, stopped, seed):
    stopped %= groups
    streams = [ask(f"r{each}", 20, 40, pin=each % groups, at_ms=each) for each in range(4 * groups)]
    simulation = mesh(streams, seed, dp=groups, tp=groups)
    simulation.begin()
    began = simulation.clock.now()
    simulation.at(began + 30 * MS, lambda: simulation.frozen.add(f"group-{stopped}"))
    simulation.run(lambda: False)
    late = simulation.events("tick.late")
    assert {fields["groups"] for fields in late} == {(stopped,)}
    for fields in late:
        assert began <= fields["since_ns"] <= began + 200 * MS
    assert simulation.clock.now() >= min(fields["since_ns"] for fields in late) + 1000 * MS


def test_a_healthy_mesh_names_nobody():
    streams = [ask(f"r{each}", 20, 10, at_ms=each) for each in range(40)]
    assert mesh(streams, dp=4, tp=4).play().events("tick.late") == []


@pytest.mark.parametrize("policy", ["prefix", "round_robin", "least_tokens"])
def test_a_burst_is_spread_over_all_groups(policy):
    streams = [ask(f"r{each}", 24, 8, seed=each) for each in range(64)]
    simulation = mesh(streams, dp=4, tp=4, policy=policy).play()
    placed = Counter(stream.group for stream in simulation.streams)
    assert max(placed.values()) - min(placed[group] for group in range(4)) <= 3, placed


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("split", ["true", "false"])
@pytest.mark.parametrize("reserve", [0, 8])
def test_a_pool_for_one_still_serves_all(seed, split, reserve):
    streams = [ask(f"r{each}", 10 + each, 50, seed=each, at_ms=each / 4) for each in range(20)]
    simulation = mesh(streams, seed, dp=1, tp=1, split=split, pages=25, slots=8, reserve_tokens=reserve).play()
    assert {stream.end for stream in simulation.streams} == {"length"}
    assert reserve or simulation.events("request.preempted"), "the pool is so small that some must give way"
    computed = sum(sum(verdict.tokens) for verdict in simulation.verdicts.values())
    useful = sum(len(stream.submit.prompt) + len(stream.tokens) for stream in simulation.streams)
    assert computed < 3 * useful, f"{computed} tokens computed for {useful}"


@pytest.mark.parametrize("seed", range(4))
def test_a_key_that_floods_the_queue_does_not_keep_another_key_waiting(seed):
    flood = [ask(f"flood-{each}", 60, 20, seed=each, key="heavy") for each in range(40)]
    light = [ask(f"light-{each}", 8, 4, seed=50 + each, key="light", at_ms=5 + each) for each in range(3)]
    simulation = mesh([*flood, *light], seed, dp=1, tp=1, slots=4, pages=100).play()
    streams = by_name(simulation)
    finished_before = sum(
        stream.ended_ns < max(streams[f"light-{each}"].ended_ns for each in range(3))
        for name, stream in streams.items()
        if name.startswith("flood")
    )
    assert finished_before < 15, f"{finished_before} of the flood came first"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("key", ["same", "other"])
def test_no_request_is_passed_over_for_longer_than_the_ageing_bound(seed, key):
    hasty = [ask(f"hasty-{each}", 20, 8, seed=each, key="same", at_ms=2 * each, priority=-1) for each in range(200)]
    patient = ask("patient", 20, 8, key=key, at_ms=20, priority=5)
    simulation = mesh([*hasty, patient], seed, dp=1, tp=1, slots=2, pages=60, age_s=0.1, prefix_cache="false").play()
    waited = patient.first_ns - patient.at_ns
    busy = max(stream.ended_ns for stream in simulation.streams) - patient.at_ns
    assert busy > 300 * MS, "the flood is too small to show anything"
    assert waited < 180 * MS, f"waited {waited / MS:.0f} ms of the {busy / MS:.0f} ms in which others were served"


@pytest.mark.parametrize("seed", range(10))
def test_a_cancel_that_overtakes_its_request_still_ends_it(seed):
    stream = ask("gone", 30, 40, pin=1)
    simulation = mesh([stream], seed, dp=2, tp=2, repeats=0, delay_ms=2)
    simulation.begin()
    port = simulation.ports["gateway-0"]
    stream.cancelled, stream.end = True, "cancelled"
    simulation.at(stream.at_ns, lambda: port.send(LinkKind.STEER, Cancel(1, "gone", 0), "group-1"))
    simulation.run(lambda: False)
    scheduler = simulation.groups[1].scheduler
    assert scheduler.quiet
    assert not scheduler.state.live
    assert not scheduler.state.tombstones
    assert simulation.events("request.aborted")


@pytest.mark.parametrize("seed", range(4))
def test_clients_that_all_leave_cost_nothing_afterwards(seed):
    streams = [ask(f"r{each}", 30, 40, seed=each, at_ms=each) for each in range(30)]
    for stream in streams:
        stream.abort_ns = (int(stream.submit.request[1:]) * 7919 + seed * 104729) % (40 * MS)
    simulation = mesh(streams, seed, dp=2, tp=2, pages=60).play()
    assert sum(stream.end == "cancelled" for stream in simulation.streams) > 15


@pytest.mark.parametrize("seed", range(4))
def test_a_gateway_that_dies_takes_its_requests_along_and_nobody_elses(seed):
    streams = [ask(f"r{each}", 30, 40, seed=each, at_ms=each, gateway=each % 2) for each in range(30)]
    simulation = mesh(streams, seed, dp=2, tp=2, pages=60, gateways=2)
    simulation.begin()

    def die():
        simulation.net.remove("gateway-1")
        simulation.frozen.add("gateway-1")
        for stream in streams[1::2]:
            stream.end = stream.end or "dead"

    simulation.at(simulation.clock.now() + 40 * MS, die)
    simulation.finish()
    assert {stream.end for stream in streams[::2]} == {"length"}
    assert sum(stream.end == "dead" for stream in streams[1::2]) > 5


@pytest.mark.parametrize("seed", range(4))
def test_a_drain_ends_what_runs_and_takes_nothing_new(seed):
    streams = [ask(f"r{each}", 30, 20, seed=each, at_ms=2 * each) for each in range(40)]
    simulation = mesh(streams, seed, dp=2, tp=2)
    simulation.begin()

    def drain():
        for name in ("router-0", "group-0", "group-1"):
            simulation.ports["supervisor-0"].send(LinkKind.COMMAND, Drain(10**12), name)

    simulation.at(simulation.clock.now() + 40 * MS, drain)
    simulation.finish()
    ends = Counter(stream.end for stream in streams)
    assert set(ends) == {"length", "error 503"}
    assert min(ends.values()) > 5
    assert simulation.actors["supervisor-0"].drained == {"group-0", "group-1"}


def test_a_hold_lets_groups_prefill_together():
    def ticks(hold_ms):
        streams = [ask(f"r{each}", 16, 1, pin=each % 4, seed=each, at_ms=each) for each in range(80)]
        simulation = mesh(streams, dp=4, tp=4, hold_ms=hold_ms, policy="round_robin").play()
        return sum(plane is Plane.PREFILL for _, plane, _ in simulation.verdicts)

    assert ticks(4) < ticks(0) * 0.7


def test_a_group_that_holds_its_decode_for_prompts_takes_its_peers_along():
    rows = [ask(f"row-{group}", 8, 60, pin=group, seed=group) for group in (0, 1)]
    prompts = [ask(f"prompt-{each}", 80, 1, pin=0, seed=10 + each, at_ms=5) for each in range(16)]
    simulation = mesh([*rows, *prompts], dp=2, tp=2, chunk_tokens=4, pages=600, slots=24, pace_ms=20).play()
    assert {stream.end for stream in simulation.streams} == {"length"}
    held = [fields for fields in simulation.events("tick.plan") if "paced_ns" in fields]
    assert len(held) > 3
    assert {(fields["plane"], fields["idle"]) for fields in held} == {("decode", False)}
    # The pace, and by how much the step before took longer than such steps did of late.
    assert max(fields["paced_ns"] for fields in held) <= 25 * MS
    ticks = {fields["tick"] for fields in held}
    ran = [
        verdict.tokens
        for (_, plane, tick), verdict in simulation.verdicts.items()
        if plane is Plane.DECODE and tick in ticks
    ]
    assert len(ran) == len(ticks)
    assert all(map(all, ran)), "a peer ran without the group that held its step"


def test_a_full_queue_says_when_to_come_back():
    streams = [ask(f"r{each}", 20, 20, seed=each) for each in range(60)]
    simulation = mesh(streams, dp=1, tp=1, slots=1, max_waiting=5).play()
    ends = Counter(stream.end for stream in simulation.streams)
    assert ends["error 429"] > 30
    assert ends["length"] + ends["error 429"] == 60
    assert all("try again" in stream.reason for stream in simulation.streams if stream.end == "error 429")
