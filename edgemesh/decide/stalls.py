"""Who holds a step that takes too long, told from where everybody stands.

A hung rank keeps its peers inside a collective and its group waiting for a result, so the first mark over its bound
need not be the culprit's: whoever is furthest behind in that plane is. A rank that waits at tick t has not begun it.
"""

from collections.abc import Mapping

from edgemesh.topology import Actor, Mesh
from edgemesh.wire.ids import Phase, Role
from edgemesh.wire.messages import Mark

Standing = Mapping[str, tuple[Mark, ...]]
"""The latest marks of each actor, by name."""


def over_bound(marks: tuple[Mark, ...], now: int, begun_ns: int = 0) -> Mark | None:
    """The first mark whose phase lasts longer than it may; what went before ``begun_ns`` does not count."""
    return next((mark for mark in marks if 0 < mark.bound_ns < now - max(mark.since_ns, begun_ns)), None)


def holders(mesh: Mesh, name: str, mark: Mark, standing: Standing) -> tuple[str, ...]:
    """The actors that the tick of an overdue ``mark`` waits for; at least ``name``, whose mark it is."""
    actor = mesh.actor(name)
    if actor.group is None or mark.phase is Phase.BUSY:
        return (name,)
    groups = mesh.set_of(actor.group).groups
    if mark.phase is Phase.ARRIVED:
        waiting = [each.name for each in mesh.actors_of(Role.GROUP) if each.group in groups]
        return _absent(waiting, mark, standing) or (mesh.set_of(actor.group).barrier or name,)
    held = [
        holder
        for group in groups
        for holder in _held_by(f"{Role.GROUP}-{group}", mesh.rank_names(group, mark.plane), mark, standing)
    ]
    lowest = min((tick for tick, _, _ in held), default=0)
    behind = [(waits, holder) for tick, waits, holder in held if tick == lowest]
    # Who has not begun the step holds those who are inside it.
    first = [holder for waits, holder in behind if waits] or [holder for _, holder in behind]
    return tuple(first) or (name,)


def _absent(groups: list[str], mark: Mark, standing: Standing) -> tuple[str, ...]:
    """The groups that have not arrived for the mark's tick."""
    return tuple(
        name
        for name in groups
        if (at := _at(name, mark, standing)) is None or at.tick < mark.tick or at.phase is not Phase.ARRIVED
    )


def _held_by(group: str, ranks: tuple[str, ...], mark: Mark, standing: Standing) -> list[tuple[int, bool, str]]:
    """(tick, waits for a plan, who) of each rank of a group; where none of them has its plan, the group owes it."""
    at = [(found.tick, found.phase is Phase.WAITING, rank) for rank in ranks if (found := _at(rank, mark, standing))]
    if at and all(waits for _, waits, _ in at):
        return [(min(tick for tick, _, _ in at), True, group)]
    return at


def _at(name: str, mark: Mark, standing: Standing) -> Mark | None:
    return next((each for each in standing.get(name, ()) if each.plane is mark.plane), None)


def describe(actor: Actor) -> str:
    """``rank-3.decode (rank 3 of group 0, decode plane)``."""
    if actor.role is Role.RANK:
        return f"{actor.name} (rank {actor.index} of group {actor.group}, {actor.plane} plane)"
    return actor.name


def whereabouts(marks: tuple[Mark, ...], now: int) -> str:
    """``decode tick 17, running for 2.1 s``, of the plane that has been busy for longest; an idle actor just waits."""
    if not marks:
        return "no report yet"
    busy = [mark for mark in marks if mark.phase is not Phase.WAITING]
    if not busy:
        return ", ".join(f"{mark.plane} tick {mark.tick}" for mark in marks) + ", waiting"
    mark = min(busy, key=lambda each: each.since_ns)
    lasted = f" for {(now - mark.since_ns) / 1e9:.1f} s" if mark.since_ns else ""
    if mark.phase is Phase.BUSY:
        return f"one turn of its loop, busy{lasted}"
    return f"{mark.plane} tick {mark.tick}, {mark.phase}{lasted}"
