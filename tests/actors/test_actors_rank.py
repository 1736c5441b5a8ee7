import subprocess
import sys

import pytest
from msgspec import convert

from edgemesh.actors.rank import PATIENCE_NS, SLOWDOWN, Pace, RankActor
from edgemesh.engine.faults import CollectiveTimeoutError
from edgemesh.runtime.memory import MemoryNet
from edgemesh.topology import derive
from edgemesh.topology.config import Topology
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.ids import Layout, Phase, Plane
from edgemesh.wire.messages import (
    Attached,
    Begin,
    Capacity,
    Chunk,
    Done,
    Health,
    IdleDone,
    IdlePlan,
    Plan,
    Prefill,
    Ready,
    Sampling,
    StepFault,
    Stop,
    Verdict,
)

CAPACITY = Capacity(50, 16, 512, 300, (2,), 1, 0, 0)


class Rank:
    """One rank actor with a null engine, and what it sent."""

    def __init__(self, rank=1, plane="decode"):
        file = {"mesh": {"tp": 4, "dp": 2}, "engine": {"kind": "null"}, "model": {"path": "none"}}
        self.mesh = derive(convert(file, Topology), "/run/none")
        self.clock = 1_000
        self.sent = []
        net = MemoryNet(
            self.mesh, lambda: self.clock, lambda sent: self.sent.append((sent.kind, sent.message, sent.to))
        )
        for actor in self.mesh.actors:
            net.port(actor.name)
        self.plane = Plane(plane)
        self.port = net.port(f"rank-{rank}.{plane}")
        self.actor = RankActor(self.mesh, self.port.name, 0, self.port)

    def give(self, message, kind=LinkKind.PLAN):
        self.actor.receive(kind, message)
        self.actor.settle()

    def begin(self):
        self.give(Begin(0, CAPACITY), LinkKind.COMMAND)
        self.sent.clear()
        return self

    def plan(self, tick=0, group=None):
        verdict = Verdict((3, 0) if self.actor.group == 0 else (0, 3), Layout.RAGGED, 0)
        chunk = Chunk("r", 0, 3, (1,), final=True, sampling=Sampling())
        where = self.actor.group if group is None else group
        return Plan(where, self.plane, 0, tick, verdict, Prefill((chunk,), TokenArray.of([1, 2, 3])))

    def idle(self, tick=0):
        verdict = Verdict((0, 3) if self.actor.group == 0 else (3, 0), Layout.RAGGED, 0)
        return IdlePlan(self.actor.group, self.plane, 0, tick, verdict)

    @property
    def mark(self):
        (mark,) = self.actor.marks()
        return mark


def test_a_rank_attaches_to_its_group_once_it_may_begin():
    rank = Rank(3)
    rank.actor.settle()
    assert (rank.sent, rank.mark.phase) == ([], Phase.STARTING)
    rank.give(Health(0, serving=False), LinkKind.COMMAND)
    rank.give(Begin(0, CAPACITY), LinkKind.COMMAND)
    assert rank.sent == [
        (LinkKind.RESULT, Attached(1, Plane.DECODE, 0, 3), "group-1"),
        (LinkKind.REPORT, Ready("rank-3.decode", 0), "supervisor-0"),
    ]
    assert rank.mark.phase is Phase.WAITING
    assert rank.actor.deadline() is None


@pytest.mark.parametrize(("rank", "answers"), [(0, True), (1, False), (2, True), (3, False)])
def test_only_the_leader_answers_for_its_group(rank, answers):
    rank = Rank(rank).begin()
    rank.give(rank.plan())
    rank.give(rank.idle(1))
    kinds = [(type(message), message.tick, to) for _, message, to in rank.sent]
    to = f"group-{rank.actor.group}"
    assert kinds == ([(Done, 0, to), (IdleDone, 1, to)] if answers else [])
    steps = [fields for event, fields in rank.port.trace.events if event == "tick.step"]
    assert [(step["tick"], step["idle"], step["tokens"], step["group"]) for step in steps] == [
        (0, False, 3, rank.actor.group),
        (1, True, 0, rank.actor.group),
    ]


def test_plans_that_came_together_run_one_at_a_time():
    rank = Rank(0).begin()
    rank.actor.receive(LinkKind.PLAN, rank.plan(0))
    rank.actor.receive(LinkKind.PLAN, rank.idle(1))
    rank.actor.settle()
    assert len(rank.sent) == 1
    assert rank.actor.deadline() == rank.clock
    rank.actor.settle()
    assert len(rank.sent) == 2
    assert rank.actor.deadline() is None
    assert rank.mark.tick == 2


def test_whoever_refuses_a_plan_says_so_and_goes_on():
    rank = Rank(1).begin()
    rank.give(rank.plan(5))
    ((kind, fault, to),) = rank.sent
    assert (kind, to) == (LinkKind.RESULT, "group-0")
    assert fault == StepFault(0, Plane.DECODE, 0, 5, 1, "tick: 5; this rank's next is 0")
    rank.give(rank.plan(0))
    assert len(rank.sent) == 1
    assert rank.mark.tick == 1


class Failing:
    collective_ns = 0

    def __init__(self, error, seen=lambda: None):
        self.error, self.seen = error, seen

    def allow(self, wait_ns):
        self.allowed = wait_ns

    def submit(self, plan):
        self.seen()
        raise self.error

    execute = submit


def test_a_failed_collective_names_the_ranks_that_did_not_come_and_ends_the_rank():
    rank = Rank(3).begin()
    for error, names in (
        (CollectiveTimeoutError("attn", [0]), "rank-2.decode"),
        (CollectiveTimeoutError("world", [0, 1]), "rank-0.decode, rank-1.decode"),
    ):
        rank.actor._engine = Failing(error)
        with pytest.raises(CollectiveTimeoutError):
            rank.give(rank.plan())
        assert rank.sent.pop()[1].reason.endswith(f"waited in vain for {names}")


def test_while_a_step_runs_the_mark_says_since_when_and_how_long_it_may():
    rank = Rank(2).begin()
    seen = []
    rank.actor._engine = Failing(RuntimeError("no kernel"), lambda: seen.append(rank.mark))
    rank.clock = 77_000
    with pytest.raises(RuntimeError):
        rank.give(rank.plan(4))
    (mark,) = seen
    assert (mark.phase, mark.tick, mark.since_ns) == (Phase.RUNNING, 4, 77_000)
    assert mark.bound_ns == int(rank.mesh.topology.supervisor.step_bound_s * 1e9)
    assert rank.actor._engine.allowed > mark.bound_ns
    assert rank.sent[0][1].reason == "RuntimeError: no kernel"


def test_a_bound_follows_recent_steps_and_the_size_of_the_next():
    pace = Pace(60_000_000_000)
    for took in (4, 3, 5, 4):
        assert pace.bound_ns(10) == 60_000_000_000
        pace.ran(10, took * 100_000_000)
    assert pace.bound_ns(10) == max(PATIENCE_NS, SLOWDOWN * 500_000_000)
    assert pace.bound_ns(30) == SLOWDOWN * 1_500_000_000
    assert pace.bound_ns(1) == PATIENCE_NS
    assert pace.bound_ns(1 << 20) == 60_000_000_000


def test_stop_ends_the_loop():
    rank = Rank().begin()
    rank.give(Stop("enough"), LinkKind.COMMAND)
    assert rank.actor.done


def test_a_null_rank_never_loads_torch():
    code = "import sys, edgemesh.actors.rank; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Ahead:
    """An engine whose steps are through when the test says so."""

    collective_ns = 0

    def __init__(self):
        self.begun, self.through = [], []

    def allow(self, wait_ns):
        pass

    def submit(self, plan):
        self.begun.append(plan.tick)

    def finished(self):
        return self.through.pop(0) if self.through else None


def test_a_plan_is_begun_while_the_one_before_it_runs():
    rank = Rank(2).begin()
    engine = rank.actor._engine = Ahead()
    rank.clock = 5_000
    rank.give(rank.plan(0))
    rank.clock = 6_000
    rank.give(rank.plan(1))
    assert engine.begun == [0, 1]
    assert rank.sent == []
    assert rank.actor.deadline() == 6_000
    assert (rank.mark.phase, rank.mark.tick, rank.mark.since_ns) == (Phase.RUNNING, 0, 5_000)
    rank.clock = 9_000
    engine.through = [Done(1, Plane.DECODE, 0, 0, (0,), (4,), step_ns=3)]
    rank.actor.settle()
    assert [message.tick for _, message, _ in rank.sent] == [0]
    assert (rank.mark.phase, rank.mark.tick, rank.mark.since_ns) == (Phase.RUNNING, 1, 9_000)
    engine.through = [Done(1, Plane.DECODE, 0, 1, (0,), (5,), step_ns=3)]
    rank.actor.settle()
    assert [message.tick for _, message, _ in rank.sent] == [0, 1]
    assert (rank.mark.phase, rank.mark.tick) == (Phase.WAITING, 2)
    assert rank.actor.deadline() is None
