"""The life of a mesh without processes: what is decided on each event."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemesh.decide.stalls import holders
from edgemesh.decide.supervision import GRACE_NS, KILLED_NS, SECOND, STOP_NS, Kill, Note, Send, Stage, Supervision
from edgemesh.topology import derive, parse
from edgemesh.wire.ids import Phase, Plane, Role
from edgemesh.wire.messages import (
    Begin,
    Capacity,
    Drain,
    Drained,
    Fault,
    Health,
    Hello,
    Loading,
    Mark,
    Progress,
    Ready,
    Stop,
    VaultReady,
)

CAPACITY = Capacity(8, 16, 64, 100, (0,), None, 0, 0)
MESH = derive(parse("", ["mesh.tp=4", "mesh.dp=2", "mesh.split=false", "supervisor.drain_s=10"]), "/r")
NAMES = [actor.name for actor in MESH.actors if actor.role is not Role.SUPERVISOR]


def fresh() -> Supervision:
    supervision = Supervision(MESH, 0, 0)
    for pid, name in enumerate(NAMES):
        supervision.spawned(name, pid)
    return supervision


def serving() -> Supervision:
    supervision = fresh()
    for name in NAMES:
        supervision.heard(Hello(name, 0, 1), SECOND)
    supervision.heard(VaultReady("vault-0", 0, CAPACITY), SECOND)
    for name in NAMES:
        supervision.heard(Ready(name, 0), SECOND)
    assert supervision.stage is Stage.SERVING
    return supervision


def sent(actions, kind):
    return [action.to for action in actions if isinstance(action, Send) and isinstance(action.message, kind)]


def events(actions):
    return [action.event for action in actions if isinstance(action, Note)]


# --- start ----------------------------------------------------------------------------------------------


def test_begin_goes_to_each_actor_once_it_listens_and_the_vault_is_ready():
    supervision = fresh()
    assert sent(supervision.heard(Hello("group-0", 0, 1), 1), Begin) == []
    supervision.heard(Hello("vault-0", 0, 1), 1)
    actions = supervision.heard(VaultReady("vault-0", 0, CAPACITY), 2)
    assert sent(actions, Begin) == ["group-0"]
    assert actions[-1].message == Begin(0, CAPACITY)
    assert sent(supervision.heard(Hello("rank-0.mixed", 0, 1), 3), Begin) == ["rank-0.mixed"]


def test_health_goes_to_gateways_and_router_when_the_last_is_ready():
    supervision = fresh()
    supervision.heard(VaultReady("vault-0", 0, CAPACITY), 1)
    for name in NAMES[:-2]:
        assert sent(supervision.heard(Ready(name, 0), 1), Health) == []
    assert NAMES[-1] == "vault-0"
    assert sent(supervision.heard(Ready(NAMES[-2], 0), 1), Health) == ["gateway-0", "router-0"]
    assert supervision.stage is Stage.SERVING
    assert supervision.heard(Ready("group-0", 0), 2) == []


@pytest.mark.parametrize(
    ("heard", "name", "words"),
    [
        ([], "vault-0", "has not said hello"),
        ([Loading("vault-0", 0, "reading", 5_000_000, 20_000_000)], "vault-0", "reading, 5 of 20 MB"),
        ([VaultReady("vault-0", 0, CAPACITY)], "rank-0.mixed", "has not said hello"),
        (
            [
                VaultReady("vault-0", 0, CAPACITY),
                Hello("rank-0.mixed", 0, 1),
                Progress("rank-0.mixed", 0, (Mark(Plane.MIXED, 0, Phase.CONNECTING, SECOND, 0),)),
                *(Ready(name, 0) for name in NAMES if name not in {"rank-0.mixed", "group-0"}),
            ],
            "rank-0.mixed",
            "connecting for 599",
        ),
    ],
)
def test_the_start_deadline_names_the_first_that_is_late_and_its_step(heard, name, words):
    supervision = fresh()
    for message in heard:
        supervision.heard(message, SECOND)
    assert supervision.clock(600 * SECOND) == []
    actions = supervision.clock(600 * SECOND + 1_000)
    assert "mesh.failed" in events(actions)
    assert supervision.culprit == name
    assert words in supervision.failure
    assert name in supervision.failure


def test_silence_does_not_count_while_starting():
    supervision = fresh()
    supervision.heard(Hello("group-0", 0, 1), 0)
    assert supervision.clock(500 * SECOND) == []


# --- failures ---------------------------------------------------------------------------------------------


def test_a_failure_is_told_to_clients_then_all_ends_and_what_stays_is_killed():
    supervision = serving()
    actions = supervision.exited("rank-1.mixed", "was killed by SIGKILL", 2 * SECOND)
    assert events(actions) == ["actor.exited", "mesh.failed"]
    assert sent(actions, Health) == ["gateway-0", "router-0"]
    assert actions[-1].message == Health(0, serving=False, reason=supervision.failure)
    assert "rank-1.mixed (rank 1 of group 0, mixed plane) was killed by SIGKILL" in supervision.failure
    # What follows from it does not take its place.
    first = supervision.failure
    assert events(supervision.heard(Fault("group-0", 0, "a peer is gone"), 2 * SECOND)) == []
    assert events(supervision.exited("rank-0.mixed", "exited with code 70", 2 * SECOND)) == ["actor.exited"]
    assert supervision.failure == first

    due = 2 * SECOND + GRACE_NS
    assert supervision.clock(due) == []
    left = [name for name in NAMES if name not in {"rank-0.mixed", "rank-1.mixed"}]
    assert sent(supervision.clock(due + 1), Stop) == left
    assert supervision.clock(due + 1 + STOP_NS) == []
    assert supervision.clock(due + 2 + STOP_NS) == [Kill(tuple(left))]
    for name in left:
        assert supervision.stage is Stage.ENDING
        supervision.exited(name, "was killed by SIGKILL", due + 3 + STOP_NS)
    assert supervision.stage is Stage.OVER


@pytest.mark.parametrize("hasty", [False, True])
def test_a_killed_process_that_does_not_go_is_named_and_waited_for_no_longer(hasty):
    supervision = serving()
    supervision.heard(Fault("rank-1.mixed", 0, "driver"), 2 * SECOND)
    now = 2 * SECOND + GRACE_NS + 1
    supervision.clock(now)
    for name in NAMES:
        if name != "rank-1.mixed":
            supervision.exited(name, "exited with code 0", now, clean=True)
    now += 1 if hasty else STOP_NS + 1
    assert (supervision.asked_to_stop(now) if hasty else supervision.clock(now))[-1] == Kill(("rank-1.mixed",))
    assert supervision.clock(now + KILLED_NS) == []
    assert supervision.stage is Stage.ENDING
    (left,) = supervision.clock(now + KILLED_NS + 1)
    assert (left.event, left.fields["name"]) == ("actor.left", "rank-1.mixed")
    assert supervision.stage is Stage.OVER


def test_a_failed_start_has_no_clients_to_wait_for():
    supervision = fresh()
    supervision.heard(Fault("vault-0", 0, "no such model"), SECOND)
    assert supervision.failure == "vault-0 cannot go on: no such model"
    assert sent(supervision.clock(SECOND + 1), Stop) == NAMES


def test_a_stopped_process_is_killed_without_being_asked_to_stop():
    supervision = serving()
    supervision.stopped("group-1", "stopped by SIGSTOP", 2 * SECOND)
    assert "group-1 was stopped by SIGSTOP" in supervision.failure
    assert supervision.clock(2 * SECOND + GRACE_NS + 1)[-1] == Kill(("group-1",))


def test_silence_counts_after_its_bound_and_not_when_the_supervisor_was_away():
    supervision = serving()
    supervision.clock(SECOND)
    for tick in range(30):
        now = SECOND + tick * SECOND // 10
        for name in NAMES:
            if name != "router-0":
                supervision.heard(Progress(name, 0, ()), now)
        assert supervision.clock(now) == []
    # Away for a minute: nobody could be heard.
    assert supervision.clock(64 * SECOND) == []
    assert supervision.clock(64 * SECOND + SECOND // 10) == supervision.clock(64 * SECOND + SECOND // 10) == []
    for name in NAMES:
        if name != "router-0":
            supervision.heard(Progress(name, 0, ()), 64 * SECOND + SECOND // 5)
    actions = supervision.clock(64 * SECOND + SECOND // 5)
    assert events(actions) == ["actor.silent", "mesh.failed"]
    assert supervision.culprit == "router-0"
    assert "router-0 has not reported for 3." in supervision.failure


def mark(tick, phase, since=0, bound=0, plane=Plane.MIXED):
    return (Mark(plane, tick, phase, since, bound),)


def test_a_step_over_its_bound_is_hung_and_one_within_is_not():
    supervision = serving()
    late = Progress("rank-2.mixed", 0, mark(5, Phase.RUNNING, 2 * SECOND, SECOND))
    assert events(supervision.heard(late, 3 * SECOND)) == ["mesh.first_tick"]
    actions = supervision.heard(late, 3 * SECOND + 1)
    assert events(actions) == ["actor.hung", "mesh.failed"]
    assert "hung: mixed tick 5 is running for 1.0 s" in supervision.failure
    assert "rank-2.mixed (rank 2 of group 1, mixed plane) at mixed tick 5, running" in supervision.failure


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_over_its_bound_names_its_actor_alone_whatever_others_wait_for(name):
    supervision = serving()
    for other in NAMES:
        phase = Phase.RUNNING if other.startswith("rank") else Phase.ARRIVED
        supervision.heard(Progress(other, 0, mark(5, phase, 2 * SECOND)), 2 * SECOND)
    # Longer than its bound, but the mesh serves for less.
    early = Progress(name, 0, (*mark(5, Phase.WAITING), *mark(0, Phase.BUSY, 1, SECOND)))
    assert events(supervision.heard(early, 2 * SECOND)) == []
    late = Progress(name, 0, (*mark(5, Phase.WAITING), *mark(0, Phase.BUSY, SECOND, SECOND)))
    actions = supervision.heard(late, 2 * SECOND + 1)
    assert [each.fields["name"] for each in actions if isinstance(each, Note) and each.event == "actor.hung"] == [name]
    assert supervision.culprit == name
    assert f"hung: its loop is busy for 1.0 s at {name}" in supervision.failure


RANKS = ["rank-0.mixed", "rank-1.mixed", "rank-2.mixed", "rank-3.mixed"]
RUNNING = mark(5, Phase.RUNNING, 0, 1)


@pytest.mark.parametrize(
    ("standing", "named"),
    [
        (dict.fromkeys(RANKS, RUNNING), set(RANKS)),
        # Its peers are inside the step, and it has not begun it.
        (dict.fromkeys(RANKS, RUNNING) | {"rank-3.mixed": mark(5, Phase.WAITING)}, {"rank-3.mixed"}),
        (dict.fromkeys(RANKS, RUNNING) | {"rank-3.mixed": mark(4, Phase.RUNNING)}, {"rank-3.mixed"}),
        # No rank of group 1 has its plan: the group owes it.
        (
            dict.fromkeys(RANKS, RUNNING) | dict.fromkeys(RANKS[2:], mark(5, Phase.WAITING)),
            {"group-1"},
        ),
        # One has gone on: those inside hold it.
        (dict.fromkeys(RANKS, RUNNING) | {"rank-1.mixed": mark(6, Phase.WAITING)}, {RANKS[0], RANKS[2], RANKS[3]}),
        ({"rank-0.mixed": RUNNING}, {"rank-0.mixed"}),
    ],
)
def test_who_holds_a_step(standing, named):
    assert set(holders(MESH, "rank-0.mixed", RUNNING[0], standing)) == named


@pytest.mark.parametrize(
    ("standing", "named"),
    [
        ({"group-0": mark(5, Phase.ARRIVED), "group-1": mark(4, Phase.PLANNED)}, ("group-1",)),
        ({"group-0": mark(5, Phase.ARRIVED)}, ("group-1",)),
        ({"group-0": mark(5, Phase.ARRIVED), "group-1": mark(5, Phase.ARRIVED)}, ("barrier-0",)),
    ],
)
def test_who_holds_an_arrival(standing, named):
    assert holders(MESH, "group-0", mark(5, Phase.ARRIVED, 0, 1)[0], standing) == named


# --- the end ------------------------------------------------------------------------------------------------


def test_a_drain_waits_for_groups_and_gateways():
    supervision = serving()
    actions = supervision.asked_to_stop(2 * SECOND)
    assert sent(actions, Health) == ["gateway-0", "router-0"]
    assert sent(actions, Drain) == ["gateway-0", "router-0", "group-0", "group-1"]
    assert actions[-1].message == Drain(12 * SECOND)
    for name in ("gateway-0", "group-1"):
        assert supervision.heard(Drained(name, 0), 3 * SECOND) == []
    assert sent(supervision.heard(Drained("group-0", 0), 3 * SECOND), Stop) == NAMES
    assert supervision.stage is Stage.ENDING
    assert supervision.failure == ""


def test_a_drain_ends_at_its_deadline_and_at_a_second_signal():
    late, hasty = serving(), serving()
    for supervision in (late, hasty):
        supervision.asked_to_stop(2 * SECOND)
    for name in NAMES:
        late.heard(Progress(name, 0, ()), 12 * SECOND)
    late.clock(12 * SECOND)
    assert sent(late.clock(12 * SECOND + 1), Stop) == NAMES
    assert sent(hasty.asked_to_stop(3 * SECOND), Stop) == NAMES
    assert hasty.asked_to_stop(3 * SECOND)[-1] == Kill(tuple(NAMES))


def test_a_drained_actor_may_leave_but_not_crash():
    supervision = serving()
    supervision.asked_to_stop(2 * SECOND)
    supervision.heard(Drained("gateway-0", 0), 2 * SECOND)
    assert events(supervision.exited("gateway-0", "exited with code 0", 3 * SECOND, clean=True)) == ["actor.exited"]
    supervision.exited("group-0", "exited with code 1", 3 * SECOND)
    assert supervision.culprit == "group-0"


def test_a_stop_before_anything_runs_is_the_end():
    supervision = Supervision(MESH, 0, 0)
    supervision.asked_to_stop(1)
    assert supervision.stage is Stage.OVER


STEPS = st.one_of(
    st.tuples(st.just("exited"), st.sampled_from(NAMES)),
    st.tuples(st.just("stopped"), st.sampled_from(NAMES)),
    st.tuples(st.just("fault"), st.sampled_from(NAMES)),
    st.tuples(st.just("drained"), st.sampled_from(NAMES)),
    st.tuples(st.just("ready"), st.sampled_from(NAMES)),
    st.tuples(st.just("signal"), st.just("")),
    st.tuples(st.just("clock"), st.integers(0, 20 * SECOND)),
)


def happen(supervision: Supervision, step: str, of: str, now: int) -> None:
    match step:
        case "exited":
            supervision.exited(of, "exited with code 1", now)
        case "stopped":
            supervision.stopped(of, "stopped by SIGSTOP", now)
        case "fault":
            supervision.heard(Fault(of, 0, "x"), now)
        case "drained":
            supervision.heard(Drained(of, 0), now)
        case "ready":
            supervision.heard(Ready(of, 0), now)
        case "signal":
            supervision.asked_to_stop(now)


@settings(max_examples=100, deadline=None)
@given(st.booleans(), st.lists(STEPS, max_size=40))
def test_whatever_happens_the_end_comes_and_the_first_failure_stays(served, steps):
    supervision = serving() if served else fresh()
    now, gone, first = 2 * SECOND, set(), ""
    for step, of in steps:
        if step == "clock":
            now += of
            supervision.clock(now)
        elif of not in gone:
            happen(supervision, step, of, now)
            gone |= {of} if step == "exited" else set()
        assert first in {"", supervision.failure}
        first = supervision.failure
    supervision.asked_to_stop(now)
    killed: set[str] = set()
    for _ in range(8):
        now += 15 * SECOND
        for action in supervision.clock(now):
            if isinstance(action, Kill):
                killed |= set(action.names)
    assert killed >= set(NAMES) - gone or supervision.stage is Stage.OVER
    for name in set(NAMES) - gone:
        supervision.exited(name, "was killed by SIGKILL", now)
    assert supervision.stage is Stage.OVER
