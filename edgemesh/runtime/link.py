"""What a link lets pass, as pure checks that every transport shares.

The sending end checks before a message leaves, the receiving end checks again what came: the type is in the link's
union, both ends are the link's, and whatever the message says about group, plane, gateway, rank or actor is what
the link and its ends say.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final

from edgemesh.topology import Actor, Link, Mesh
from edgemesh.wire.catalogue import CARRIES, LinkKind
from edgemesh.wire.codec import Buffer, Decoder
from edgemesh.wire.ids import Role
from edgemesh.wire.messages import Message

_NO_FIELDS: Final = ()


class LinkError(Exception):
    """A message did not pass a link."""


class LinkRefused(LinkError):  # noqa: N818 - says what happened, as its family does
    """It may not: no such link, a type outside its union, another group's, or ends that do not match."""


class LinkFull(LinkError):  # noqa: N818 - says what happened, as its family does
    """The receiver is behind by as many messages as the link holds."""


class PeerAbsent(LinkError):  # noqa: N818 - says what happened, as its family does
    """The receiver has not connected, or is gone."""


class StaleEpoch(LinkError):  # noqa: N818 - says what happened, as its family does
    """The message belongs to an epoch that is over."""


class Permit:
    """What one link lets pass from ``sender`` to ``receiver``.

    ``sender`` is None where the socket does not tell it (a PULL end): then only the link and the receiver are checked.
    """

    __slots__ = ("_rules", "link", "receiver", "sender")

    def __init__(self, link: Link, sender: Actor | None, receiver: Actor) -> None:
        self.link = link
        self.sender = sender
        self.receiver = receiver
        self._rules = {kind: _rule(kind, link, sender, receiver) for kind in CARRIES[link.kind]}

    def check(self, message: Message) -> None:
        """Raise ``LinkRefused`` unless the message may pass."""
        rule = self._rules.get(type(message))
        if rule is None:
            allowed = ", ".join(kind.__name__ for kind in CARRIES[self.link.kind])
            text = f"{self.link.name} carries {allowed}; {type(message).__name__} is none of them"
            raise LinkRefused(text)
        fields, read, expected = rule
        if fields and read(message) != expected:
            raise LinkRefused(self._mismatch(message, fields, expected))

    def _mismatch(self, message: Message, fields: tuple[str, ...], expected: Any) -> str:  # noqa: ANN401 - one value or several
        wanted = (expected,) if len(fields) == 1 else expected
        for field, want in zip(fields, wanted, strict=True):
            have = getattr(message, field)
            if have != want:
                return f"{type(message).__name__}.{field} is {have!r}; on {self.link.name} it must be {want!r}"
        return f"{type(message).__name__} does not belong on {self.link.name}"


Rule = tuple[tuple[str, ...], Any, Any]


def _rule(kind: type[Message], link: Link, sender: Actor | None, receiver: Actor) -> Rule:
    """The fields of a message type whose values the link fixes: (names, a getter of them all, their values)."""
    known: dict[str, object] = {}
    if link.group is not None:
        known["group"] = link.group
    elif sender is not None and sender.group is not None:
        known["group"] = sender.group
    if link.plane is not None:
        known["plane"] = link.plane
    elif sender is not None and sender.plane is not None:
        known["plane"] = sender.plane
    if sender is not None:
        known["actor"] = sender.name
    for end in (sender, receiver):
        if end is not None and end.role in {Role.GATEWAY, Role.RANK}:
            known[str(end.role)] = end.index
    fields = tuple(field for field in kind.__struct_fields__ if field in known)
    if not fields:
        return _NO_FIELDS, None, None
    values = tuple(known[field] for field in fields)
    return fields, attrgetter(*fields), values if len(values) > 1 else values[0]


class Inlet:
    """The receiving end of one link at one actor: frames in, a checked message out."""

    __slots__ = ("_actors", "_anyone", "_decoder", "_permits", "kind", "link", "receiver")

    def __init__(self, mesh: Mesh, link: Link, receiver: str) -> None:
        self.link = link
        self.kind: LinkKind = link.kind
        self.receiver = mesh.actor(receiver)
        self._decoder: Decoder[Message] = Decoder(*CARRIES[link.kind])
        self._actors = mesh.actor
        self._permits: dict[str, Permit] = {}
        # One sender only: the link itself says who it is.
        alone = mesh.actor(link.senders[0]) if len(link.senders) == 1 else None
        self._anyone = Permit(link, alone, self.receiver)

    def decode(self, frames: Sequence[Buffer]) -> Message:
        """Frames to a message of the link's union; raises ``WireError``."""
        return self._decoder.decode(frames)

    def check(self, message: Message, sender: str | None, epoch: int) -> None:
        """Raise ``LinkRefused`` or ``StaleEpoch`` unless the message may come in; ``epoch`` is the receiver's."""
        permit = self._anyone if sender is None else self._permits.get(sender) or self._permit(sender)
        permit.check(message)
        stamp = getattr(message, "epoch", epoch)
        if stamp < epoch:
            text = f"{type(message).__name__} of epoch {stamp}; this is epoch {epoch}"
            raise StaleEpoch(text)

    def _permit(self, sender: str) -> Permit:
        if sender not in self.link.senders:
            text = f"{sender!r} is no sender of {self.link.name}"
            raise LinkRefused(text)
        permit = self._permits[sender] = Permit(self.link, self._actors(sender), self.receiver)
        return permit


def outlets(mesh: Mesh, sender: str) -> dict[tuple[LinkKind, str], Permit]:
    """Every (kind, receiver) that an actor may send to, with what may pass."""
    actor = mesh.actor(sender)
    return {
        (link.kind, receiver): Permit(link, actor, mesh.actor(receiver))
        for link in mesh.links_of(sender)
        if sender in link.senders
        for receiver in link.receivers
    }


def inlets(mesh: Mesh, receiver: str) -> tuple[Inlet, ...]:
    """The receiving ends of an actor."""
    return tuple(Inlet(mesh, link, receiver) for link in mesh.links_of(receiver) if receiver in link.receivers)


def no_outlet(sender: str, kind: LinkKind, to: str) -> LinkRefused:
    """The error for a send where there is no link at all."""
    return LinkRefused(f"there is no {kind} link from {sender} to {to}")
