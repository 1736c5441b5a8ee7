"""Links over ZeroMQ sockets, for actors that are one synchronous poller in one thread.

Where two opposite links share an endpoint, its binder has a ROUTER and the others DEALERs named ``actor:epoch``;
elsewhere the binder has a PULL and the others PUSHes. Sends never block; receives drain a bounded batch.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

import zmq
from zmq.backend import zmq_poll

from edgemesh.runtime.clock import monotonic_ns
from edgemesh.runtime.curve import Curve
from edgemesh.runtime.link import (
    Inlet,
    LinkFull,
    LinkRefused,
    PeerAbsent,
    Permit,
    StaleEpoch,
    inlets,
    no_outlet,
    outlets,
)
from edgemesh.runtime.trace import Trace
from edgemesh.topology import Link, Mesh
from edgemesh.wire.catalogue import REPLY, LinkKind
from edgemesh.wire.codec import MAX_FRAME_BYTES, Buffer, WireError, encode
from edgemesh.wire.messages import Message

HWM: Final = 8192
"""Messages that may wait on each side of a connection.

Their bytes have bounds elsewhere: of prompts by what a gateway lets be under way, of a group's plans and answers by the few steps
that may be; all others are small.
"""

LINGER_MS: Final = 500
"""How long a closing socket tries to deliver what it holds."""

BATCH: Final = 256
"""Messages taken from one socket before the actor acts on them."""

BATCH_BYTES: Final = 1 << 21
"""Once so many bytes were decoded, the actor acts first: a message may take a millisecond."""

ZERO_COPY_BYTES: Final = 1 << 15
"""Larger frames are handed to the socket, and taken from it, without a copy."""

PAIRED: Final = frozenset(REPLY) | frozenset(REPLY.values())
OTHERWISE_CARRIED: Final = frozenset({LinkKind.LEASE, LinkKind.GRANT})
"""Kinds that pass file descriptors, over a socket of their own."""

_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.SNDMORE | zmq.NOBLOCK)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)

Socket = zmq.Socket[bytes]
Received = tuple[LinkKind, Message]


class Channel:
    """One socket: the links that share an endpoint, seen from one actor."""

    __slots__ = ("identities", "inlet", "routed", "socket", "speakers")

    def __init__(self, socket: Socket, inlet: Inlet | None, *, routed: bool) -> None:
        self.socket = socket
        self.inlet = inlet
        self.routed = routed
        # On a ROUTER: who has spoken so far, and the identity of each one's main socket in its latest epoch.
        self.speakers: dict[bytes, str] = {}
        self.identities: dict[str, tuple[int, bytes]] = {}

    def transmit(self, frames: list[Buffer], to: str) -> None:
        """Hand frames to the socket; raises ``LinkFull`` or ``PeerAbsent``."""
        send = self.socket.send
        try:
            if self.routed:
                known = self.identities.get(to)
                if known is None:
                    text = f"{to} has not connected"
                    raise PeerAbsent(text)
                send(known[1], _MORE)
            last = len(frames) - 1
            for index, frame in enumerate(frames):
                send(frame, _MORE if index < last else _NOBLOCK, copy=len(frame) < ZERO_COPY_BYTES)
        except zmq.Again as error:
            text = f"{to} is behind by as many messages as the link holds"
            raise LinkFull(text) from error
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            text = f"{to} is gone"
            raise PeerAbsent(text) from error

    def fetch(self) -> list[zmq.Frame]:
        """The frames of one message that is there."""
        receive = self.socket.recv
        frames = [receive(_NOBLOCK, copy=False)]
        while frames[-1].more:
            frames.append(receive(_NOBLOCK, copy=False))
        return frames

    def meet(self, identity: bytes, sender: str) -> None:
        """Remember a peer whose message was let in."""
        self.speakers[identity] = sender
        _, epoch, *alias = identity.split(b":")
        if not alias and epoch.isdigit() and int(epoch) >= self.identities.get(sender, (0, b""))[0]:
            self.identities[sender] = (int(epoch), identity)

    def readable(self) -> bool:
        """Whether a message is there."""
        return bool(self.socket.getsockopt(_EVENTS) & _POLLIN)  # type: ignore[operator]  # this option is a number


class ZmqPort:
    """Every socket of one actor. Not thread-safe: a second thread opens a port of its own.

    ``only`` limits it to one kind of link (and its reply); ``alias`` then tells its sockets from the main port's, whose
    ``context`` it may share.
    """

    def __init__(
        self,
        mesh: Mesh,
        name: str,
        epoch: int,
        trace: Trace,
        *,
        only: LinkKind | None = None,
        alias: str = "",
        context: zmq.Context[Socket] | None = None,
        hwm: int = HWM,
    ) -> None:
        self.name = name
        self.epoch = epoch
        self.trace = trace
        self._identity = f"{name}:{epoch}{alias}".encode()
        self._hwm = hwm
        self._shared = context is not None
        self.context: zmq.Context[Socket] = context or zmq.Context(io_threads=1)
        self._curve = Curve(mesh, mesh.actor(name).host, self.context)
        self._sockets: list[Socket] = []
        self._out: dict[tuple[LinkKind, str], tuple[Permit, Channel]] = {}
        self._encoded: Message | None = None
        self._frames: list[Buffer] = []
        try:
            self.channels = tuple(self._open(mesh, only))
        except BaseException:
            self.close()
            raise
        inbound = {channel.socket: channel for channel in self.channels if channel.inlet is not None}
        self._inbound: dict[Any, Channel] = dict(inbound)
        self._polled: list[tuple[Any, int]] = [(socket, _POLLIN) for socket in inbound]
        self.also: Callable[[], int | None] = _nothing
        """A descriptor that ends every wait when it becomes readable, or None; asked before each."""

    def now(self) -> int:
        """Monotonic nanoseconds."""
        return monotonic_ns()

    def send(self, kind: LinkKind, message: Message, to: str) -> None:
        """Check and send; raises ``LinkRefused``, ``LinkFull`` or ``PeerAbsent``."""
        end = self._out.get((kind, to))
        try:
            if end is None:
                raise no_outlet(self.name, kind, to)
            end[0].check(message)
        except LinkRefused as error:
            self.trace.event("link.refused", kind=kind, message_type=type(message).__name__, error=str(error))
            raise
        if message is not self._encoded:
            # A plan goes to every rank of the group and a release to every group of the set: frozen, so one encoding serves.
            self._encoded, self._frames = message, encode(message)
        end[1].transmit(self._frames, to)

    def channel(self, kind: LinkKind, to: str) -> Channel:
        """The socket on which a kind of message leaves for an actor; raises ``KeyError`` where there is no such link."""
        return self._out[kind, to][1]

    def receive(self, timeout_ms: int = -1, also: int | None = None) -> list[Received]:
        """Wait for messages and take a bounded batch of them; empty after ``timeout_ms`` (-1: never).

        A descriptor ``also`` that becomes readable ends the wait too.
        """
        also = self.also() if also is None else also
        polled = self._polled if also is None else [*self._polled, (also, _POLLIN)]
        batch: list[Received] = []
        for socket, _ in zmq_poll(polled, timeout_ms):
            channel = self._inbound.get(socket)
            if channel is not None:
                self.drain(channel, batch)
        return batch

    def drain(self, channel: Channel, batch: list[Received], most: int = BATCH) -> bool:
        """Take up to ``most`` messages, or a few that are large, of a channel that has some; whether more may be left."""
        nbytes = 0
        for _ in range(most):
            nbytes += self._take(channel, batch)
            if not channel.readable():
                return False
            if nbytes > BATCH_BYTES:
                break
        return True

    def close(self) -> None:
        """Close every socket, delivering what is queued for a bounded time."""
        for socket in self._sockets:
            socket.close(LINGER_MS)
        self._curve.close()
        if not self._shared:
            self.context.term()

    def _take(self, channel: Channel, batch: list[Received]) -> int:
        """Append one message, or trace why it is none; how many bytes were decoded."""
        inlet = channel.inlet
        assert inlet is not None
        frames = channel.fetch()
        sender, identity = None, b""
        if channel.routed:
            identity = frames.pop(0).bytes
            sender = channel.speakers.get(identity) or _speaker(identity)
        try:
            message = inlet.decode([_buffer(frame) for frame in frames])
            inlet.check(message, sender, self.epoch)
        except WireError as error:
            self.trace.event("link.undecodable", kind=inlet.kind, sender=sender, error=str(error))
        except LinkRefused as error:
            self.trace.event("link.refused", kind=inlet.kind, message_type=_type(message), error=str(error))
        except StaleEpoch:
            stamp = getattr(message, "epoch", None)
            self.trace.event("epoch.stale", kind=inlet.kind, message_type=_type(message), message_epoch=stamp)
        else:
            if sender is not None and identity not in channel.speakers:
                channel.meet(identity, sender)
            batch.append((inlet.kind, message))
        return len(frames[0]) if frames else 0

    def _open(self, mesh: Mesh, only: LinkKind | None) -> list[Channel]:
        kinds = set(LinkKind) - OTHERWISE_CARRIED if only is None else {only, REPLY.get(only, only)}
        shared: defaultdict[str, list[Link]] = defaultdict(list)
        for link in mesh.links_of(self.name):
            if link.kind in kinds:
                shared[link.endpoint].append(link)
        ways, ends = outlets(mesh, self.name), {inlet.link.name: inlet for inlet in inlets(mesh, self.name)}
        channels = []
        for links in shared.values():
            inlet = next((ends[link.name] for link in links if link.name in ends), None)
            channel = Channel(self._socket(links[0]), inlet, routed=self._binds(links[0]) and links[0].kind in PAIRED)
            channels.append(channel)
            for link in links:
                if self.name in link.senders:
                    for receiver in link.receivers:
                        self._out[link.kind, receiver] = (ways[link.kind, receiver], channel)
        return channels

    def _binds(self, link: Link) -> bool:
        return link.binder == self.name

    def _socket(self, link: Link) -> Socket:
        binds, paired = self._binds(link), link.kind in PAIRED
        kind = (zmq.ROUTER if binds else zmq.DEALER) if paired else (zmq.PULL if binds else zmq.PUSH)
        socket = self.context.socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, self._hwm)
        socket.setsockopt(zmq.RCVHWM, self._hwm)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.IDENTITY, self._identity)
        if not link.endpoint.startswith("ipc://"):
            socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
            self._curve.protect(socket, link, bind=binds)
        (socket.bind if binds else socket.connect)(link.endpoint)
        return socket


def _nothing() -> None:
    """No descriptor beside the sockets."""


def _speaker(identity: bytes) -> str:
    """The actor's name in ``name:epoch``; where there is none, what is no sender of any link either."""
    name, colon, _ = identity.partition(b":")
    return name.decode("ascii", "replace") if colon else "nobody"


def _buffer(frame: zmq.Frame) -> Buffer:
    return frame.bytes if len(frame) < ZERO_COPY_BYTES else frame.buffer


def _type(message: Message) -> str:
    return type(message).__name__
