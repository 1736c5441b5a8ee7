"""Hostile bytes at real ends of links: nothing crashes, all of it is traced, and the next true message arrives."""

import random
import tempfile
import time
from pathlib import Path

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from test_wire_fuzz import mutated
from wire_strategies import least

from edgemesh.runtime.memory import MemoryNet, Sent
from edgemesh.runtime.trace import ListTrace
from edgemesh.runtime.zmq import OTHERWISE_CARRIED, ZmqPort
from edgemesh.topology import Gateway, MeshShape, Topology, derive
from edgemesh.wire.catalogue import CARRIES, REPLY, LinkKind
from edgemesh.wire.codec import encode
from edgemesh.wire.messages import Stop

TOPOLOGY = Topology(mesh=MeshShape(tp=4, dp=2), gateway=Gateway(processes=2))
REFUSALS = {"link.undecodable", "link.refused", "epoch.stale"}


@pytest.mark.parametrize("kind", LinkKind)
def test_every_inbox_lets_mutated_messages_in_or_traces_why_not(kind):
    mesh = derive(TOPOLOGY, "/run/edgemesh")
    link = next(link for link in mesh.links if link.kind is kind)
    net = MemoryNet(mesh, lambda: 0, lambda _: None)
    source, to = link.senders[-1], link.receivers[-1]
    trace = ListTrace()
    net.port(to, epoch=1, trace=trace)

    @given(st.one_of(mutated(kind), st.lists(st.binary(max_size=40), min_size=1, max_size=3)))
    @settings(max_examples=60, deadline=None)
    def arrive(frames):
        trace.events.clear()
        message = net.admit(Sent(source, to, kind, Stop(""), tuple(bytes(frame) for frame in frames)))
        if message is None:
            assert {name for name, _ in trace.events} <= REFUSALS
            assert len(trace.events) == 1
        else:
            assert type(message) in CARRIES[kind]
            assert not trace.events

    arrive()


def hostile(rng, kind):
    """Frames that nobody meant: noise, a wrong tag, a true message cut, doubled or with a byte changed."""
    head = bytearray(encode(least(rng.choice(CARRIES[kind])))[0])
    match rng.randrange(5):
        case 0:
            return [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(1, 5))]
        case 1:
            return [head[: rng.randrange(len(head))]]
        case 2:
            return [head, head]
        case 3:
            head[rng.randrange(2, len(head))] ^= rng.randrange(1, 256)
            return [head]
        case _:
            return [b"\x92\xa4stop\xa1x"] if kind is not LinkKind.COMMAND else [b""]


@pytest.fixture
def run_dir():
    with tempfile.TemporaryDirectory(prefix="mesh-", dir="/tmp") as name:  # a socket's path must be short
        (Path(name) / "sock").mkdir()
        yield Path(name)


@pytest.mark.parametrize("kind", [kind for kind in LinkKind if kind not in {*REPLY.values(), *OTHERWISE_CARRIED}])
def test_a_bound_socket_outlives_a_stranger(kind, run_dir):
    mesh = derive(TOPOLOGY, str(run_dir))
    link = next(link for link in mesh.links if link.kind is kind)
    trace = ListTrace()
    port = ZmqPort(mesh, link.binder, 0, trace)
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER if kind in REPLY else zmq.PUSH)
    stranger.setsockopt(zmq.LINGER, 0)
    try:
        if kind in REPLY:
            stranger.setsockopt(zmq.IDENTITY, b"\xff\xfe:")
        stranger.connect(link.endpoint)
        rng = random.Random(f"{kind}")
        sent = [hostile(rng, kind) for _ in range(100)]
        for frames in sent:
            stranger.send_multipart([bytes(frame) for frame in frames])
        received, deadline = [], time.monotonic() + 60
        while len(received) + len(trace.events) < len(sent) and time.monotonic() < deadline:
            received += port.receive(100)
        assert len(received) + len(trace.events) == len(sent)
        assert {name for name, _ in trace.events} <= REFUSALS
        assert len(trace.events) > len(sent) // 2
        if kind in REPLY:
            assert not received
        assert all(type(message) in CARRIES[kind] for _, message in received)
    finally:
        stranger.close()
        context.term()
        port.close()
