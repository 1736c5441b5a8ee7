"""Router and barrier as actors on an in-memory net: what they answer, whom they reach, and what they trace."""

import subprocess
import sys

import pytest

from edgemesh.actors.barrier import LATE_NS, BarrierActor
from edgemesh.actors.router import RouterActor
from edgemesh.runtime.clock import VirtualClock
from edgemesh.runtime.link import LinkFull
from edgemesh.runtime.memory import MemoryNet
from edgemesh.topology import derive, parse, resolve
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.ids import Phase, Plane
from edgemesh.wire.messages import (
    Arrive,
    Begin,
    Capacity,
    Drain,
    Health,
    LoadReport,
    Place,
    Ready,
    Rejected,
    Release,
    Resume,
    Sampling,
    Shape,
    Stop,
    Submit,
)

TEXT = "[mesh]\ntp = {0}\ndp = {0}\n[engine]\nkind = 'null'\nkv_pages = 64\n[model]\nmax_model_len = 64\n[router]\npolicy = 'round_robin'\n"


class Bench:
    """One real actor, and every other one as a port that only collects."""

    def __init__(self, factory, name, groups=2):
        self.mesh = derive(resolve(parse(TEXT.format(groups))), "/run/bench")
        self.clock = VirtualClock()
        self.sent = []
        self.net = MemoryNet(self.mesh, self.clock.now, self.sent.append)
        self.ports = {actor.name: self.net.port(actor.name) for actor in self.mesh.actors}
        self.name, self.trace = name, self.ports[name].trace
        self.actor = factory(self.mesh, name, 0, self.ports[name])

    def tell(self, source, kind, message):
        """Deliver a message, and give back what the actor sent in answer as (receiver, message)."""
        self.ports[source].send(kind, message, self.name)
        sent = self.sent.pop()
        self.actor.receive(kind, self.net.admit(sent))
        self.actor.settle()
        return self.answers()

    def answers(self):
        answers = [(sent.to, self.net.admit(sent)) for sent in self.sent]
        self.sent.clear()
        return answers


CAPACITY = Capacity(64, 16, 64, 100, (), None, 0, 0)


def load(group, *, draining=False):
    return LoadReport(group, 0, 1, 0, 0, 0, 9, 9, 0, draining)


def submit(name="r", **fields):
    return Submit(name, 0, 0, TokenArray.of(range(9)), Sampling(), 4, **fields)


@pytest.fixture
def router():
    bench = Bench(RouterActor, "router-0")
    for group in range(2):
        bench.tell(f"group-{group}", LinkKind.LOAD, load(group))
    assert bench.tell("supervisor-0", LinkKind.COMMAND, Begin(0, CAPACITY)) == [("supervisor-0", Ready("router-0", 0))]
    bench.tell("supervisor-0", LinkKind.COMMAND, Health(0, serving=True))
    return bench


def ask(bench, **fields):
    return bench.tell("gateway-0", LinkKind.SUBMIT, submit(**fields))


def test_a_request_goes_whole_to_one_group_and_says_why(router):
    ((to, place),) = ask(router, pin=1)
    assert (to, place) == ("group-1", Place(1, submit(pin=1)))
    placed = {"request": "r", "group": 1, "policy": "round_robin", "why": "pinned by the client"}
    assert router.trace.named("request.placed") == [placed]


def test_requests_take_turns(router):
    assert [ask(router)[0][0] for _ in range(4)] == ["group-0", "group-1", "group-0", "group-1"]


def test_a_wrong_pin_is_the_clients_fault(router):
    ((to, rejected),) = ask(router, pin=7)
    assert (to, rejected.status, rejected.code) == ("gateway-0", 400, "invalid_group")
    assert router.trace.named("request.rejected")[0]["reason"] == "there is no group 7; groups are 0 to 1"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Health(0, serving=False, reason="rank-3.decode was stopped"), "rank-3.decode was stopped"),
        (Health(0, serving=True, draining=True), "shutting down"),
        (Drain(0), "shutting down"),
    ],
)
def test_nothing_is_placed_while_the_mesh_does_not_serve(router, message, reason):
    router.tell("supervisor-0", LinkKind.COMMAND, message)
    ((_, rejected),) = ask(router)
    assert rejected.status == 503
    assert reason in rejected.reason


def test_before_health_the_server_is_starting():
    ((_, rejected),) = ask(Bench(RouterActor, "router-0"))
    assert (rejected.status, "starting" in rejected.reason) == (503, True)


def test_a_group_that_drains_or_is_gone_is_not_asked(router):
    router.tell("group-0", LinkKind.LOAD, LoadReport(0, 0, 2, 0, 0, 0, 9, 9, 0, draining=True))
    assert {ask(router)[0][0] for _ in range(3)} == {"group-1"}
    router.net.remove("group-1")
    ((_, rejected),) = ask(router)
    assert (rejected.status, rejected.code) == (503, "no_group")
    assert router.actor.state.loads[1].placed == 3, "what was not sent is not counted"


def test_a_full_link_is_a_429(router, monkeypatch):
    send = router.ports["router-0"].send

    def full(kind, message, to):
        if kind is LinkKind.PLACE:
            text = "64 messages wait"
            raise LinkFull(text)
        send(kind, message, to)

    monkeypatch.setattr(router.ports["router-0"], "send", full)
    ((to, rejected),) = ask(router)
    assert isinstance(rejected, Rejected)
    assert (to, rejected.status, rejected.retry_after_s) == ("gateway-0", 429, 1)


def test_a_gateway_that_was_behind_hears_of_every_refusal(router):
    sent = [submit("r", pin=5), submit("s", pin=6)]
    router.net.remove("gateway-0")
    for each in sent:
        router.actor.receive(LinkKind.SUBMIT, each)
    assert router.trace.named("gateway.lost")[0]["gateway"] == 0
    assert not router.actor.done
    due = router.actor.deadline()
    assert due > router.clock.now()
    router.actor.settle()
    assert router.actor.deadline() == due, "not before it is due"
    router.clock.move_to(due)
    router.actor.settle()
    assert router.actor.deadline() > due
    router.ports["gateway-0"] = router.net.port("gateway-0")
    router.clock.move_to(router.actor.deadline())
    router.actor.settle()
    assert [message.request for _, message in router.answers()] == [each.request for each in sent]
    assert router.actor.deadline() is None
    router.actor.receive(LinkKind.COMMAND, Stop("the end"))
    assert router.actor.done


def arrive(group, tick=0, tokens=5, revision=1):
    return Arrive(Plane.DECODE, 0, tick, group, revision, Shape(tokens))


def test_the_barrier_releases_all_groups_with_one_verdict():
    bench = Bench(BarrierActor, "barrier-0", 3)
    assert bench.tell("group-2", LinkKind.ARRIVE, arrive(2)) == []
    bench.clock.move_to(500)
    assert bench.tell("group-0", LinkKind.ARRIVE, arrive(0, tokens=0)) == []
    bench.clock.move_to(800)
    answers = bench.tell("group-1", LinkKind.ARRIVE, arrive(1, tokens=3))
    assert [to for to, _ in answers] == ["group-0", "group-1", "group-2"]
    assert len({id(release) for _, release in answers}) == 3
    assert {release.verdict.tokens for _, release in answers} == {(0, 3, 5)}
    (noted,) = bench.trace.named("tick.release")
    assert (noted["wait_ns"], noted["last"], noted["bucket"], noted["layout"]) == (800, 1, 5, "even")


def test_the_barrier_names_a_late_group_once():
    bench = Bench(BarrierActor, "barrier-0", 3)
    bench.clock.move_to(1000)
    bench.tell("group-0", LinkKind.ARRIVE, arrive(0))
    bench.tell("group-1", LinkKind.ARRIVE, arrive(1))
    assert bench.actor.deadline() == 1000 + LATE_NS
    assert {mark.phase for mark in bench.actor.marks() if mark.plane is Plane.DECODE} == {Phase.ARRIVED}
    for _ in range(2):
        bench.clock.move_to(1000 + LATE_NS)
        bench.actor.settle()
    (late,) = bench.trace.named("tick.late")
    assert (late["groups"], late["plane"], late["tick"], late["since_ns"]) == ((2,), "decode", 0, 1000)
    assert bench.actor.deadline() is None


def test_a_group_that_is_gone_gets_its_release_when_it_resumes():
    bench = Bench(BarrierActor, "barrier-0")
    bench.tell("group-0", LinkKind.ARRIVE, arrive(0))
    bench.ports["group-1"].send(LinkKind.ARRIVE, arrive(1), "barrier-0")
    last = bench.sent.pop()
    bench.net.remove("group-1")
    bench.actor.receive(LinkKind.ARRIVE, bench.net.admit(last))
    ((_, release),) = bench.answers()
    assert bench.trace.named("release.undelivered")[0]["group"] == "group-1"
    bench.ports["group-1"] = bench.net.port("group-1")
    resume = Resume(1, Plane.DECODE, 0, arrive(1), None)
    answers = bench.tell("group-1", LinkKind.ARRIVE, resume)
    assert ("group-1", release) in answers
    assert isinstance(release, Release)


@pytest.mark.parametrize("name", ["router", "barrier", "group"])
def test_they_start_light(name):
    code = (
        f"import sys, edgemesh.actors.{name}; print(*sorted({{'torch', 'numpy', 'transformers'}} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
