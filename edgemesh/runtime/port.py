"""An actor's whole world, and what an actor is to the loop that runs it."""

from typing import Protocol

from edgemesh.runtime.trace import Trace
from edgemesh.topology import Mesh
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.ids import Plane, Role
from edgemesh.wire.messages import Mark, Message


class Port(Protocol):
    """Sockets in a real mesh, a queue in the simulator."""

    name: str
    trace: Trace

    def send(self, kind: LinkKind, message: Message, to: str) -> None:
        """Send to the actor named ``to``; never blocks.

        Raises ``LinkRefused`` (not permitted), ``LinkFull`` (the receiver is behind) or ``PeerAbsent``.
        """
        ...

    def now(self) -> int:
        """Monotonic nanoseconds (virtual in the simulator)."""
        ...


class SyncActor(Protocol):
    """A synchronous actor: router, group, barrier, rank."""

    @property
    def done(self) -> bool:
        """Whether the loop shall end."""
        ...

    def receive(self, kind: LinkKind, message: Message) -> None:
        """One message, decoded and checked."""
        ...

    def settle(self) -> None:
        """Act on what came together; called after a batch of receives, and at the deadline."""
        ...

    def deadline(self) -> int | None:
        """Monotonic nanoseconds at which to settle though nothing came."""
        ...

    def marks(self) -> tuple[Mark, ...]:
        """Where the actor stands; called from another thread."""
        ...


class ActorFactory(Protocol):
    """Usually the actor's class itself."""

    def __call__(self, mesh: Mesh, name: str, epoch: int, port: Port, /) -> SyncActor:
        """Make the actor; it may already send."""
        ...


def supervisor_of(mesh: Mesh, name: str) -> str:
    """The supervisor of an actor's host."""
    host = mesh.actor(name).host
    return next(actor.name for actor in mesh.actors_of(Role.SUPERVISOR) if actor.host == host)


def default_plane(mesh: Mesh, name: str) -> Plane:
    """The plane under which an actor reports before it has steps of its own."""
    return mesh.actor(name).plane or mesh.planes[0]
