"""The checks of links, over sockets and in memory alike: both ends, both transports, one set of cases."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import zmq

from edgemesh.runtime.link import LinkRefused
from edgemesh.runtime.memory import MemoryNet, Sent
from edgemesh.runtime.trace import ListTrace
from edgemesh.runtime.zmq import ZmqPort
from edgemesh.topology import Mesh
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.codec import encode
from edgemesh.wire.ids import Layout, Plane
from edgemesh.wire.messages import (
    Accepted,
    Arrive,
    Attached,
    Cancel,
    Emit,
    Hello,
    IdleDone,
    IdlePlan,
    Message,
    Place,
    Progress,
    Rejected,
    Release,
    Sampling,
    Shape,
    Submit,
    Verdict,
)

PATIENCE_MS = 60_000
"""How long to wait for what must come, however busy the machine is."""

VERDICT = Verdict((0, 0), Layout.EVEN, 0)
SUBMIT = Submit("r", 0, 0, TokenArray.of(range(1000)), Sampling(), 5)


def plan(group: int = 0, plane: Plane = Plane.MIXED, epoch: int = 0) -> IdlePlan:
    return IdlePlan(group, plane, epoch, 3, VERDICT)


LEGAL = [
    ("gateway-0", LinkKind.SUBMIT, SUBMIT, "router-0"),
    ("router-0", LinkKind.PLACE, Place(1, SUBMIT), "group-1"),
    ("gateway-1", LinkKind.STEER, Cancel(1, "r", 0), "group-1"),
    ("rank-2.mixed", LinkKind.RESULT, Attached(1, Plane.MIXED, 0, 2), "group-1"),
    ("group-1", LinkKind.PLAN, plan(1), "rank-2.mixed"),
    ("group-0", LinkKind.EMIT, Accepted(0, 1, 0, "r", 0), "gateway-1"),
    ("group-0", LinkKind.ARRIVE, Arrive(Plane.MIXED, 0, 0, 0, 0, Shape()), "barrier-0"),
    ("barrier-0", LinkKind.RELEASE, Release(Plane.MIXED, 0, 0, VERDICT), "group-0"),
    ("router-0", LinkKind.REJECT, Rejected("r", 0, 0, 429, "full", "full"), "gateway-0"),
    ("router-0", LinkKind.REPORT, Hello("router-0", 0, 1), "supervisor-0"),
]

REFUSED = {
    "a type outside the union": ("gateway-0", LinkKind.SUBMIT, Cancel(0, "r", 0), "router-0"),
    "another group's plan": ("group-0", LinkKind.PLAN, plan(1), "rank-0.mixed"),
    "another plane's plan": ("group-0", LinkKind.PLAN, plan(0, Plane.DECODE), "rank-0.mixed"),
    "a rank of another group": ("group-0", LinkKind.PLAN, plan(0), "rank-2.mixed"),
    "a placement of another group": ("router-0", LinkKind.PLACE, Place(0, SUBMIT), "group-1"),
    "a request sent past the router": ("gateway-0", LinkKind.PLACE, Place(1, SUBMIT), "group-1"),
    "steering another group": ("gateway-0", LinkKind.STEER, Cancel(0, "r", 0), "group-1"),
    "tokens in another group's name": ("group-0", LinkKind.EMIT, Emit(1, 0, 0, ()), "gateway-0"),
    "tokens of another gateway": ("group-0", LinkKind.EMIT, Emit(0, 1, 0, ()), "gateway-0"),
    "a rejection of another gateway's": ("router-0", LinkKind.REJECT, Rejected("r", 0, 1, 429, "", ""), "gateway-0"),
    "a submission in another gateway's name": ("gateway-1", LinkKind.SUBMIT, SUBMIT, "router-0"),
    "an arrival in another group's name": (
        "group-0",
        LinkKind.ARRIVE,
        Arrive(Plane.MIXED, 0, 0, 1, 0, Shape()),
        "barrier-0",
    ),
    "a report in another's name": ("router-0", LinkKind.REPORT, Hello("group-0", 0, 1), "supervisor-0"),
    "attaching as another rank": ("rank-0.mixed", LinkKind.RESULT, Attached(0, Plane.MIXED, 0, 1), "group-0"),
    "a link that there is not": ("rank-0.mixed", LinkKind.EMIT, Emit(0, 0, 0, ()), "gateway-0"),
    "an actor that there is not": ("router-0", LinkKind.PLACE, Place(7, SUBMIT), "group-7"),
    "backwards": ("rank-0.mixed", LinkKind.PLAN, plan(0), "group-0"),
}
"""What a sending end refuses, whatever the transport."""


class Memory:
    """The in-memory transport."""

    def __init__(self, mesh: Mesh) -> None:
        self.sent: list[Sent] = []
        self.net = MemoryNet(mesh, lambda: 0, self.sent.append)
        self.ports = {actor.name: self.net.port(actor.name) for actor in mesh.actors}

    def send(self, source: str, kind: LinkKind, message: Message, to: str) -> None:
        self.ports[source].send(kind, message, to)

    def arrived(self, to: str) -> list[tuple[LinkKind, Message]]:
        sent, self.sent = self.sent, []
        admitted = [(each.kind, self.net.admit(each)) for each in sent if each.to == to]
        return [(kind, message) for kind, message in admitted if message is not None]

    def inject(self, source: str, kind: LinkKind, frames: list[bytes], to: str) -> None:
        self.sent.append(Sent(source, to, kind, SUBMIT, tuple(frames)))

    def trace(self, name: str) -> ListTrace:
        return self.ports[name].trace


class Lazy(dict[str, ZmqPort]):
    """Ports by name, each opened when it is first needed: a stranger may then take the place of one that is not."""

    def __init__(self, port_of: Callable[..., ZmqPort]) -> None:
        super().__init__()
        self.port_of = port_of

    def __missing__(self, name: str) -> ZmqPort:
        port = self[name] = self.port_of(name)
        return port


class Sockets:
    """ZeroMQ in one process."""

    def __init__(self, mesh: Mesh, port_of: Callable[..., ZmqPort]) -> None:
        self.mesh = mesh
        self.ports = Lazy(port_of)
        self.context = zmq.Context()

    def send(self, source: str, kind: LinkKind, message: Message, to: str) -> None:
        self.introduce(source, kind, to)
        self.ports[source].send(kind, message, to)

    def introduce(self, source: str, kind: LinkKind, to: str) -> None:
        """Both ends are there; a ROUTER knows only who has spoken to it."""
        assert self.ports[to] is not self.ports[source]
        hello = {
            LinkKind.PLAN: lambda: (LinkKind.RESULT, Attached(int(source[-1]), Plane.MIXED, 0, int(to[5]))),
            LinkKind.RELEASE: lambda: (LinkKind.ARRIVE, Arrive(Plane.MIXED, 0, 0, int(to[-1]), 0, Shape())),
            LinkKind.REJECT: lambda: (LinkKind.SUBMIT, replace_gateway(int(to[-1]))),
        }
        if kind in hello and (kind, to) in self.ports[source]._out:
            reply, message = hello[kind]()
            self.ports[to].send(reply, message, source)
            assert self.ports[source].receive(PATIENCE_MS)

    def arrived(self, to: str) -> list[tuple[LinkKind, Message]]:
        # Returns when something came, be it refused.
        return self.ports[to].receive(PATIENCE_MS)

    def inject(self, source: str, kind: LinkKind, frames: list[bytes], to: str) -> None:
        link = next(each for each in self.mesh.links_of(to) if each.kind is kind and to in each.receivers)
        assert link.binder == to, "frames from a stranger come over a socket that it can connect to"
        socket = self.context.socket(
            zmq.DEALER if kind in {LinkKind.SUBMIT, LinkKind.RESULT, LinkKind.ARRIVE} else zmq.PUSH
        )
        socket.setsockopt(zmq.IDENTITY, f"{source}:0".encode())
        socket.connect(link.endpoint)
        socket.send_multipart(frames)
        socket.close(PATIENCE_MS)

    def trace(self, name: str) -> ListTrace:
        trace = self.ports[name].trace
        assert isinstance(trace, ListTrace)
        return trace


def replace_gateway(index: int) -> Submit:
    return Submit("hello", 0, index, TokenArray(), Sampling(), 1)


@pytest.fixture(params=["memory", "sockets"])
def wire(request, mesh, port_of):
    if request.param == "memory":
        yield Memory(mesh)
        return
    sockets = Sockets(mesh, port_of)
    yield sockets
    sockets.context.destroy(0)


@pytest.mark.parametrize(("source", "kind", "message", "to"), LEGAL, ids=lambda value: str(value)[:20])
def test_what_is_legal_arrives_as_it_was(wire, source, kind, message, to):
    wire.send(source, kind, message, to)
    assert (kind, message) in wire.arrived(to)
    assert wire.trace(source).events == []


@pytest.mark.parametrize("case", REFUSED)
def test_a_sending_end_refuses_and_traces(wire, case):
    source, kind, message, to = REFUSED[case]
    with pytest.raises(LinkRefused):
        wire.ports[source].send(kind, message, to)
    (event,) = wire.trace(source).named("link.refused")
    assert event["message_type"] == type(message).__name__
    assert event["kind"] == kind
    if isinstance(wire, Memory):
        assert wire.sent == []


STRANGE = {
    "another group's result": ("rank-0.mixed", LinkKind.RESULT, IdleDone(1, Plane.MIXED, 0, 0), "group-0"),
    "another plane's result": ("rank-0.mixed", LinkKind.RESULT, IdleDone(0, Plane.DECODE, 0, 0), "group-0"),
    "another rank's name": ("rank-0.mixed", LinkKind.RESULT, Attached(0, Plane.MIXED, 0, 1), "group-0"),
    "a rank of another group": ("rank-2.mixed", LinkKind.RESULT, IdleDone(0, Plane.MIXED, 0, 0), "group-0"),
    "another group's placement": ("router-0", LinkKind.PLACE, Place(0, SUBMIT), "group-1"),
    "another gateway's tokens": ("group-0", LinkKind.EMIT, Emit(0, 1, 0, ()), "gateway-0"),
    "another group's arrival": ("group-0", LinkKind.ARRIVE, Arrive(Plane.MIXED, 0, 0, 1, 0, Shape()), "barrier-0"),
    "another gateway's submission": ("gateway-1", LinkKind.SUBMIT, SUBMIT, "router-0"),
    "nobody's submission": ("nobody", LinkKind.SUBMIT, SUBMIT, "router-0"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_a_receiving_end_refuses_and_traces(wire, case):
    source, kind, message, to = STRANGE[case]
    wire.inject(source, kind, [bytes(frame) for frame in encode(message)], to)
    assert wire.arrived(to) == []
    (event,) = wire.trace(to).named("link.refused")
    assert event["kind"] == kind


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xc1"],
        [b"\x91\xa5hello"],
        [bytes(frame) for frame in encode(Cancel(0, "r", 0))],
        [bytes(encode(SUBMIT)[0])],
        [bytes(frame) for frame in encode(SUBMIT)] + [b"more"],
    ],
    ids=["empty", "no msgpack", "no message", "another union", "a frame missing", "a frame too many"],
)
def test_frames_that_are_no_message_of_the_link_are_traced(wire, frames):
    wire.inject("gateway-0", LinkKind.SUBMIT, frames, "router-0")
    assert wire.arrived("router-0") == []
    (event,) = wire.trace("router-0").named("link.undecodable")
    assert event["error"]


def test_an_older_epoch_is_dropped_and_traced(mesh, port_of):
    sent: list[Sent] = []
    net = MemoryNet(mesh, lambda: 0, sent.append)
    group = net.port("group-0", 1)
    net.port("rank-0.mixed", 0).send(LinkKind.RESULT, Attached(0, Plane.MIXED, 0, 0), "group-0")
    net.port("rank-0.mixed", 1).send(LinkKind.RESULT, Attached(0, Plane.MIXED, 1, 0), "group-0")
    assert [net.admit(each) for each in sent] == [None, Attached(0, Plane.MIXED, 1, 0)]
    stale = {"kind": LinkKind.RESULT, "message_type": "Attached", "message_epoch": 0}
    assert group.trace.named("epoch.stale") == [stale]

    bound = port_of("group-0", 1)
    port_of("rank-0.mixed", 0).send(LinkKind.RESULT, Attached(0, Plane.MIXED, 0, 0), "group-0")
    assert bound.receive(PATIENCE_MS) == []
    port_of("rank-0.mixed", 1).send(LinkKind.RESULT, Attached(0, Plane.MIXED, 1, 0), "group-0")
    assert bound.receive(PATIENCE_MS) == [(LinkKind.RESULT, Attached(0, Plane.MIXED, 1, 0))]
    assert bound.trace.named("epoch.stale") == [stale]


def test_memory_without_the_codec_checks_the_same(mesh):
    sent: list[Sent] = []
    net = MemoryNet(mesh, lambda: 0, sent.append, codec=False)
    net.port("group-0")
    net.port("rank-0.mixed").send(LinkKind.RESULT, Attached(0, Plane.MIXED, 0, 0), "group-0")
    assert net.admit(sent[0]) is sent[0].message
    assert net.admit(replace(sent[0], message=Attached(1, Plane.MIXED, 0, 0))) is None
    assert net.admit(replace(sent[0], message=Progress("rank-0.mixed", 0, ()))) is None
