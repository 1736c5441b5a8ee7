"""Links without sockets: the same ports, checks and codec, and whoever owns the net decides when a message arrives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgemesh.runtime.link import Inlet, LinkRefused, PeerAbsent, StaleEpoch, inlets, no_outlet, outlets
from edgemesh.runtime.trace import ListTrace, Trace
from edgemesh.topology import Mesh
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.codec import Buffer, WireError, encode
from edgemesh.wire.messages import Message


@dataclass(frozen=True, slots=True)
class Sent:
    """A message on its way; ``frames`` is what a socket would carry."""

    source: str
    to: str
    kind: LinkKind
    message: Message
    frames: tuple[Buffer, ...]


class MemoryNet:
    """All ports of one mesh.

    ``on_send`` is called with every message that a sending end lets pass: it schedules, delays, repeats or drops it.
    ``admit`` is the receiving end. With ``codec`` every message is encoded and decoded on its way; without, it travels
    as the object it is (quicker, the checks stay).
    """

    def __init__(
        self, mesh: Mesh, now: Callable[[], int], on_send: Callable[[Sent], None], *, codec: bool = True
    ) -> None:
        self.mesh, self.now, self.on_send, self.codec = mesh, now, on_send, codec
        self._ports: dict[str, MemoryPort] = {}

    def port(self, name: str, epoch: int = 0, trace: Trace | None = None) -> "MemoryPort":
        """The port of an actor, anew (an earlier one of that name is cut off)."""
        port = self._ports[name] = MemoryPort(self, name, epoch, trace or ListTrace())
        return port

    def remove(self, name: str) -> None:
        """The actor is gone: sends to it raise ``PeerAbsent`` where a socket would know."""
        self._ports.pop(name, None)

    def is_present(self, name: str) -> bool:
        """Whether the actor has a port."""
        return name in self._ports

    def admit(self, sent: Sent) -> Message | None:
        """What arrives at the receiver: the message, or None where its end refuses it (traced) or it is gone."""
        port = self._ports.get(sent.to)
        return port.admit(sent) if port is not None else None


class MemoryPort:
    """One actor's end of the net; implements ``Port``."""

    def __init__(self, net: MemoryNet, name: str, epoch: int, trace: Trace) -> None:
        self.name, self.epoch, self.trace = name, epoch, trace
        self._net = net
        self._out = outlets(net.mesh, name)
        self._in: dict[LinkKind, list[Inlet]] = {}
        for inlet in inlets(net.mesh, name):
            self._in.setdefault(inlet.kind, []).append(inlet)

    def now(self) -> int:
        """The net's time."""
        return self._net.now()

    def send(self, kind: LinkKind, message: Message, to: str) -> None:
        """Check and hand over; raises ``LinkRefused``, or ``PeerAbsent`` for an actor that has no port."""
        permit = self._out.get((kind, to))
        try:
            if permit is None:
                raise no_outlet(self.name, kind, to)
            permit.check(message)
        except LinkRefused as error:
            self.trace.event("link.refused", kind=kind, message_type=type(message).__name__, error=str(error))
            raise
        if not self._net.is_present(to):
            text = f"{to} is gone"
            raise PeerAbsent(text)
        frames: Sequence[Buffer] = encode(message) if self._net.codec else ()
        self._net.on_send(Sent(self.name, to, kind, message, tuple(frames)))

    def admit(self, sent: Sent) -> Message | None:
        """The receiving end's checks; None if the message may not come in."""
        inlet = next((each for each in self._in.get(sent.kind, ()) if sent.source in each.link.senders), None)
        message: Message | None = None
        try:
            if inlet is None:
                raise no_outlet(sent.source, sent.kind, sent.to)
            message = inlet.decode(sent.frames) if sent.frames else sent.message
            inlet.check(message, sent.source, self.epoch)
        except WireError as error:
            self.trace.event("link.undecodable", kind=sent.kind, sender=sent.source, error=str(error))
            return None
        except LinkRefused as error:
            kind = type(message or sent.message).__name__
            self.trace.event("link.refused", kind=sent.kind, message_type=kind, error=str(error))
            return None
        except StaleEpoch:
            stamp, kind = getattr(message, "epoch", None), type(message).__name__
            self.trace.event("epoch.stale", kind=sent.kind, message_type=kind, message_epoch=stamp)
            return None
        return message
