"""The group as an actor on an in-memory net: what it passes on, and what it does before it has begun."""

import pytest

from edgemesh.actors.group import CHECK_AFTER_NS, GroupActor
from edgemesh.decide.owed import RETRY_NS
from edgemesh.runtime.clock import VirtualClock
from edgemesh.runtime.memory import MemoryNet
from edgemesh.topology import derive, parse
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.ids import MAX_TEXT, Plane
from edgemesh.wire.messages import (
    Accepted,
    Attached,
    Begin,
    Cancel,
    Capacity,
    Done,
    Emit,
    Failed,
    Fault,
    Place,
    Ready,
    Sampling,
    StepFault,
    Stop,
    Submit,
)

CAPACITY = Capacity(64, 16, 64, 100, (), None, 0, 0)
PLANES = (Plane.PREFILL, Plane.DECODE)


class Desk:
    """Keeps the questions about grammars; a test answers."""

    def __init__(self):
        self.asks, self.dropped, self.ready = [], [], []

    def take(self, asks, dropped):
        self.asks.extend(asks)
        self.dropped.extend(dropped)

    def answers(self):
        ready, self.ready = self.ready, []
        return ready

    def deadline(self):
        return None


class Bench:
    """One real group, and every other actor as a port that only collects."""

    def __init__(self):
        self.mesh = derive(parse("[mesh]\ntp = 2\n[engine]\nkind = 'null'\n"), "/run/bench")
        self.sent = []
        self.clock = VirtualClock()
        self.net = MemoryNet(self.mesh, self.clock.now, self.sent.append)
        self.ports = {actor.name: self.net.port(actor.name) for actor in self.mesh.actors}
        self.actor = GroupActor(self.mesh, "group-0", 0, self.ports["group-0"], lambda _capacity: Desk())
        self.trace = self.ports["group-0"].trace

    def tell(self, source, kind, message):
        """Deliver a message, and give back what the group sent in answer, as it arrives."""
        self.ports[source].send(kind, message, "group-0")
        self.actor.receive(kind, self.net.admit(self.sent.pop()))
        return self.settle()

    def settle(self):
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


@pytest.fixture
def begun(group):
    group.tell("supervisor-0", LinkKind.COMMAND, Begin(0, CAPACITY))
    for plane in PLANES:
        for rank in range(2):
            group.tell(f"rank-{rank}.{plane}", LinkKind.RESULT, Attached(0, plane, 0, rank))
    return group


def words(sent):
    return [(type(message), request) for to, message in sent if to == "gateway-0" for request in requests(message)]


def requests(message):
    return [item.request for item in message.items] if isinstance(message, Emit) else [message.request]


def place(name, tokens=4, output=2):
    return Place(0, Submit(name, 0, 0, TokenArray.of(range(tokens)), Sampling(), output))


def first_token(group):
    """The prefill of all that waits, answered; what the group sends then."""
    return group.tell("rank-0.prefill", LinkKind.RESULT, Done(0, Plane.PREFILL, 0, 0, firsts=(7,)))


@pytest.mark.parametrize("lost", ["accepted", "tokens", "last tokens", "refusal"])
@pytest.mark.parametrize("canceled", [False, True])
def test_a_gateway_that_was_behind_hears_of_every_request_that_it_lost(begun, lost, canceled):
    output = 1 if lost == "last tokens" else 2
    if "tokens" in lost:
        begun.tell("router-0", LinkKind.PLACE, place("r", output=output))
    begun.net.remove("gateway-0")
    if "tokens" in lost:
        first_token(begun)
    else:
        begun.tell("router-0", LinkKind.PLACE, place("r", tokens=9999 if lost == "refusal" else 4))
    # It is no word behind: what comes in the meantime is lost as well, and told in its order.
    begun.tell("router-0", LinkKind.PLACE, place("s"))
    assert begun.actor.scheduler.state.live == {}
    assert begun.trace.named("gateway.lost")
    begun.ports["gateway-0"] = begun.net.port("gateway-0")
    if canceled:
        begun.tell("gateway-0", LinkKind.STEER, Cancel(0, "r", 0))
    begun.clock.move_to(begun.clock.now() + RETRY_NS)
    said = words(begun.settle())
    assert said == [(Failed, name) for name in ("s" if canceled else "rs")]
    begun.clock.move_to(begun.clock.now() + RETRY_NS)
    assert words(begun.settle()) == []
    assert words(begun.tell("router-0", LinkKind.PLACE, place("t"))) == [(Accepted, "t")]


def test_pages_are_counted_in_turns_and_a_request_that_comes_meanwhile_goes_first(begun, monkeypatch):
    monkeypatch.setattr("edgemesh.decide.pages.AUDITED", 8)

    def quiet():
        return begun.trace.named("group.quiet")

    begun.clock.move_to(begun.clock.now() + CHECK_AFTER_NS)
    begun.settle()
    assert begun.actor.deadline() == begun.clock.now()
    assert words(begun.tell("router-0", LinkKind.PLACE, place("r"))) == [(Accepted, "r")]
    assert quiet() == []
    begun.tell("gateway-0", LinkKind.STEER, Cancel(0, "r", 0))
    begun.tell("rank-0.prefill", LinkKind.RESULT, Done(0, Plane.PREFILL, 0, 0, firsts=(7,)))
    begun.clock.move_to(begun.clock.now() + CHECK_AFTER_NS)
    begun.settle()
    begun.clock.move_to(begun.clock.now() + CHECK_AFTER_NS)
    turns = 0
    while not quiet():
        begun.settle()
        turns += 1
        assert turns < 100
    assert turns > 8
    assert quiet() == [{"free_pages": CAPACITY.pages - 1, "total_pages": CAPACITY.pages - 1}]
    assert begun.actor.deadline() is None
