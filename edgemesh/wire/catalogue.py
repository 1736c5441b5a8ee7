"""Which messages may travel on which kind of link: the whole permission table of the mesh.

A link is one-directional. ``CARRIES`` is the union that its sender may send and its receivers decode; there is no
kind whose union holds request or step data and whose receivers span groups (``SCOPE`` says what bounds each).
"""

from typing import Final

from edgemesh.wire.ids import Role, Word
from edgemesh.wire.messages import (
    Accepted,
    Arrive,
    Attached,
    Begin,
    Cancel,
    Credit,
    Done,
    Drain,
    Drained,
    Emit,
    Failed,
    Fault,
    Grant,
    Health,
    Hello,
    IdleDone,
    IdlePlan,
    Lease,
    Loading,
    LoadReport,
    Message,
    Place,
    Plan,
    Progress,
    Ready,
    Rejected,
    Release,
    Resume,
    StepFault,
    Stop,
    Submit,
    VaultReady,
)


class Scope(Word):
    """What bounds the receivers of a link."""

    INGRESS = "ingress"
    """Requests not yet placed; the router is the only receiver."""

    GROUP = "group"
    """Request and step data of one group; every end but the router is in it."""

    PLACED = "placed"
    """A gateway steers a request that one group holds; that group is the only receiver."""

    EGRESS = "egress"
    """To the one gateway that the message addresses."""

    CONTROL = "control"
    """Only control messages, which hold no request data."""


class LinkKind(Word):
    """The kinds of links, in the order in which a request meets them."""

    SUBMIT = "submit"
    REJECT = "reject"
    PLACE = "place"
    STEER = "steer"
    PLAN = "plan"
    RESULT = "result"
    EMIT = "emit"
    ARRIVE = "arrive"
    RELEASE = "release"
    LOAD = "load"
    LEASE = "lease"
    GRANT = "grant"
    REPORT = "report"
    COMMAND = "command"


CARRIES: Final[dict[LinkKind, tuple[type[Message], ...]]] = {
    LinkKind.SUBMIT: (Submit,),
    LinkKind.REJECT: (Rejected,),
    LinkKind.PLACE: (Place,),
    LinkKind.STEER: (Cancel, Credit),
    LinkKind.PLAN: (Plan, IdlePlan),
    LinkKind.RESULT: (Attached, Done, IdleDone, StepFault),
    LinkKind.EMIT: (Accepted, Emit, Failed),
    LinkKind.ARRIVE: (Arrive, Resume),
    LinkKind.RELEASE: (Release,),
    LinkKind.LOAD: (LoadReport,),
    LinkKind.LEASE: (Lease,),
    LinkKind.GRANT: (Grant,),
    LinkKind.REPORT: (Hello, Loading, Ready, VaultReady, Progress, Fault, Drained),
    LinkKind.COMMAND: (Begin, Health, Drain, Stop),
}

SCOPE: Final[dict[LinkKind, Scope]] = {
    LinkKind.SUBMIT: Scope.INGRESS,
    LinkKind.REJECT: Scope.EGRESS,
    LinkKind.PLACE: Scope.GROUP,
    LinkKind.STEER: Scope.PLACED,
    LinkKind.PLAN: Scope.GROUP,
    LinkKind.RESULT: Scope.GROUP,
    LinkKind.EMIT: Scope.EGRESS,
    LinkKind.ARRIVE: Scope.CONTROL,
    LinkKind.RELEASE: Scope.CONTROL,
    LinkKind.LOAD: Scope.CONTROL,
    LinkKind.LEASE: Scope.CONTROL,
    LinkKind.GRANT: Scope.CONTROL,
    LinkKind.REPORT: Scope.CONTROL,
    LinkKind.COMMAND: Scope.CONTROL,
}

REPLY: Final[dict[LinkKind, LinkKind]] = {
    LinkKind.SUBMIT: LinkKind.REJECT,
    LinkKind.PLAN: LinkKind.RESULT,
    LinkKind.ARRIVE: LinkKind.RELEASE,
    LinkKind.LEASE: LinkKind.GRANT,
    LinkKind.REPORT: LinkKind.COMMAND,
}
"""Pairs of opposite links that share one connection (and so one endpoint)."""

ENDS: Final[dict[LinkKind, tuple[frozenset[Role], frozenset[Role]]]] = {
    LinkKind.SUBMIT: (frozenset({Role.GATEWAY}), frozenset({Role.ROUTER})),
    LinkKind.REJECT: (frozenset({Role.ROUTER}), frozenset({Role.GATEWAY})),
    LinkKind.PLACE: (frozenset({Role.ROUTER}), frozenset({Role.GROUP})),
    LinkKind.STEER: (frozenset({Role.GATEWAY}), frozenset({Role.GROUP})),
    LinkKind.PLAN: (frozenset({Role.GROUP}), frozenset({Role.RANK})),
    LinkKind.RESULT: (frozenset({Role.RANK}), frozenset({Role.GROUP})),
    LinkKind.EMIT: (frozenset({Role.GROUP}), frozenset({Role.GATEWAY})),
    LinkKind.ARRIVE: (frozenset({Role.GROUP}), frozenset({Role.BARRIER})),
    LinkKind.RELEASE: (frozenset({Role.BARRIER}), frozenset({Role.GROUP})),
    LinkKind.LOAD: (frozenset({Role.GROUP}), frozenset({Role.ROUTER})),
    LinkKind.LEASE: (frozenset({Role.RANK}), frozenset({Role.VAULT})),
    LinkKind.GRANT: (frozenset({Role.VAULT}), frozenset({Role.RANK})),
    LinkKind.REPORT: (frozenset(Role) - {Role.SUPERVISOR}, frozenset({Role.SUPERVISOR})),
    LinkKind.COMMAND: (frozenset({Role.SUPERVISOR}), frozenset(Role) - {Role.SUPERVISOR}),
}
"""(senders, receivers) of each kind, by role."""


def inbox(role: Role) -> tuple[type[Message], ...]:
    """Every message that an actor of this role can receive, over all its links."""
    kinds = [kind for kind in LinkKind if role in ENDS[kind][1]]
    return tuple(message for kind in kinds for message in CARRIES[kind])
