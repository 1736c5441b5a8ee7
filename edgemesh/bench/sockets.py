"""The step barrier's exchange on bare blocking sockets: what the real actors are measured beside.

``python -m edgemesh.bench.sockets serve ENDPOINT GROUPS`` releases when all have arrived, without any check;
``... arrive ENDPOINT GROUP TICKS`` prints how long each tick took, in nanoseconds.
``... echo ENDPOINT`` and ``... hop ENDPOINT COUNT`` time one message from process to process.
"""

from __future__ import annotations

import sys
import time

import msgspec
import zmq

from edgemesh.wire.ids import Layout, Plane
from edgemesh.wire.messages import Arrive, IdleDone, IdlePlan, Release, Shape, Verdict

VERDICT = Verdict((1,), Layout.EVEN, 1)


def serve(endpoint: str, groups: int) -> None:
    """The barrier: one ROUTER, until killed."""
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(endpoint)
    decode, encode = msgspec.msgpack.Decoder(Arrive).decode, msgspec.msgpack.Encoder().encode
    arrived: dict[bytes, Arrive] = {}
    while True:
        identity, frame = socket.recv_multipart()
        arrived[identity] = arrive = decode(frame)
        if len(arrived) == groups:
            tokens = tuple(each.shape.tokens for each in arrived.values())
            release = encode(Release(arrive.plane, arrive.epoch, arrive.tick, Verdict(tokens, Layout.EVEN, 1)))
            for each in arrived:
                socket.send_multipart([each, release])
            arrived.clear()


def arrive(endpoint: str, group: int, ticks: int) -> list[int]:
    """A group: arrive, wait for the release, again."""
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(endpoint)
    decode, encode = msgspec.msgpack.Decoder(Release).decode, msgspec.msgpack.Encoder().encode
    samples = []
    for tick in range(ticks):
        start = time.monotonic_ns()
        socket.send(encode(Arrive(Plane.MIXED, 0, tick, group, 0, Shape(1, 1, 1))))
        release = decode(socket.recv())
        samples.append(time.monotonic_ns() - start)
        assert release.tick == tick
    return samples


def echo(endpoint: str) -> None:
    """The far end of a hop: it answers each message with the time at which it did, until killed."""
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(endpoint)
    decode, encode = msgspec.msgpack.Decoder(IdlePlan).decode, msgspec.msgpack.Encoder().encode
    socket.send(b"")
    while True:
        plan = decode(socket.recv())
        socket.send(encode(IdleDone(plan.group, plan.plane, plan.epoch, plan.tick, step_ns=time.monotonic_ns())))


def hop(endpoint: str, count: int) -> list[int]:
    """The near end: how old each answer is when it has been read."""
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(endpoint)
    decode, encode = msgspec.msgpack.Decoder(IdleDone).decode, msgspec.msgpack.Encoder().encode
    identity, _ = socket.recv_multipart()
    samples = []
    for tick in range(count):
        socket.send_multipart([identity, encode(IdlePlan(0, Plane.MIXED, 0, tick, VERDICT))])
        done = decode(socket.recv_multipart()[1])
        samples.append(time.monotonic_ns() - done.step_ns)
    return samples


def main(words: list[str]) -> None:
    """Play the part that the words name."""
    match words:
        case ["serve", endpoint, groups]:
            serve(endpoint, int(groups))
        case ["echo", endpoint]:
            echo(endpoint)
        case ["arrive", endpoint, group, ticks]:
            sys.stdout.buffer.write(msgspec.json.encode(arrive(endpoint, int(group), int(ticks))))
        case ["hop", endpoint, count]:
            sys.stdout.buffer.write(msgspec.json.encode(hop(endpoint, int(count))))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
