"""The group as an actor on an in-memory net: what it passes on, and what it does before it has begun."""

import pytest

from edgemesh.actors.group import GroupActor
from edgemesh.runtime.clock import VirtualClock
from edgemesh.runtime.memory import MemoryNet
from edgemesh.topology import derive, parse
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.ids import MAX_TEXT, Plane
from edgemesh.wire.messages import Attached, Begin, Cancel, Capacity, Fault, Ready, StepFault, Stop

CAPACITY = Capacity(64, 16, 64, 100, (), None, 0, 0)
PLANES = (Plane.PREFILL, Plane.DECODE)


class Bench:
    """One real group, and every other actor as a port that only collects."""

    def __init__(self):
        self.mesh = derive(parse("[mesh]\ntp = 2\n[engine]\nkind = 'null'\n"), "/run/bench")
        self.sent = []
        self.net = MemoryNet(self.mesh, VirtualClock().now, self.sent.append)
        self.ports = {actor.name: self.net.port(actor.name) for actor in self.mesh.actors}
        self.actor = GroupActor(self.mesh, "group-0", 0, self.ports["group-0"])
        self.trace = self.ports["group-0"].trace

    def tell(self, source, kind, message):
        """Deliver a message, and give back what the group sent in answer, as it arrives."""
        self.ports[source].send(kind, message, "group-0")
        self.actor.receive(kind, self.net.admit(self.sent.pop()))
        self.actor.settle()
        sent, self.sent[:] = list(self.sent), []
        return [(each.to, self.net.admit(each)) for each in sent]


@pytest.fixture
def group():
    return Bench()


@pytest.mark.parametrize("length", [0, 100, MAX_TEXT])
def test_what_a_rank_cannot_do_reaches_the_supervisor_however_long_it_says_it(group, length):
    fault = StepFault(0, Plane.DECODE, 0, 7, 1, "x" * length)
    ((to, told),) = group.tell("rank-1.decode", LinkKind.RESULT, fault)
    assert to == "supervisor-0"
    assert isinstance(told, Fault)
    assert told.reason == f"rank 1 (decode, tick 7): {'x' * length}"[:MAX_TEXT]


def test_it_is_ready_once_it_has_begun_and_every_rank_is_there(group):
    ranks = [(plane, rank) for plane in PLANES for rank in range(2)]
    for plane, rank in ranks[:-1]:
        assert group.tell(f"rank-{rank}.{plane}", LinkKind.RESULT, Attached(0, plane, 0, rank)) == []
    assert group.tell("supervisor-0", LinkKind.COMMAND, Begin(0, CAPACITY)) == []
    plane, rank = ranks[-1]
    ready, (router, load) = group.tell(f"rank-{rank}.{plane}", LinkKind.RESULT, Attached(0, plane, 0, rank))
    assert ready == ("supervisor-0", Ready("group-0", 0))
    assert (router, load.total_pages, load.seen) == ("router-0", CAPACITY.pages - 1, 0)


def test_what_comes_before_it_has_begun_is_traced_and_dropped(group):
    assert group.tell("gateway-0", LinkKind.STEER, Cancel(0, "r", 0)) == []
    assert group.trace.named("message.early") == [{"type": "Cancel"}]


def test_it_ends_when_it_is_told_to(group):
    assert group.tell("supervisor-0", LinkKind.COMMAND, Stop("over")) == []
    assert group.actor.done
