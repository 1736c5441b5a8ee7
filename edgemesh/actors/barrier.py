"""The barrier of one coupled set: groups arrive for a tick, and are released together with one verdict.

All decisions are ``decide.barrier``'s, one state machine per plane; this file carries messages.
"""

from typing import Final, assert_never

from edgemesh.decide import barrier
from edgemesh.decide.barrier import BarrierState
from edgemesh.runtime.actor import main
from edgemesh.runtime.link import LinkError
from edgemesh.runtime.port import Port, supervisor_of
from edgemesh.topology import Mesh
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.ids import Phase, Plane
from edgemesh.wire.messages import (
    Arrive,
    Begin,
    Drain,
    Health,
    Mark,
    Message,
    Ready,
    Release,
    Resume,
    Stop,
)

LATE_NS: Final = 1_000_000_000
"""A group that owes an arrival for so long, while others have work, is named in the trace."""

BarrierInbox = Arrive | Resume | Begin | Health | Drain | Stop


class BarrierActor:
    """One coupled set's ticks, plane by plane."""

    def __init__(self, mesh: Mesh, name: str, epoch: int, port: Port) -> None:
        self.mesh = mesh
        self.name = name
        self.epoch = epoch
        self.port = port
        self.done = False
        self.set = next(each for each in mesh.sets if each.barrier == name)
        self.names = [f"group-{group}" for group in self.set.groups]
        self.states: dict[Plane, BarrierState] = {
            plane: barrier.start(plane, epoch, self.set.groups, barrier.rule_for(mesh.topology, plane))
            for plane in mesh.planes
        }
        self._changed: set[Plane] = set()
        self._due: dict[Plane, int | None] = dict.fromkeys(mesh.planes)
        self._named: dict[Plane, int] = dict.fromkeys(mesh.planes, -1)

    def receive(self, kind: LinkKind, message: Message) -> None:
        """Decide at once: every group of the set waits for this."""
        del kind  # its union has been checked already
        self._take(message)  # type: ignore[arg-type]  # the links' unions make up BarrierInbox

    def _take(self, message: BarrierInbox) -> None:
        now = self.port.now()
        match message:
            case Arrive():
                before = self.states[message.plane]
                state, releases = barrier.arrive(before, message, now)
                self._release(before, state, releases, message.group)
            case Resume():
                before = self.states[message.plane]
                state, releases = barrier.resume(before, message, now)
                self._release(before, state, releases, message.group)
            case Begin():
                self.port.send(LinkKind.REPORT, Ready(self.name, self.epoch), supervisor_of(self.mesh, self.name))
            case Stop():
                self.done = True
            case Health() | Drain():
                pass  # groups that drain bring their last work here like any other
            case _:
                assert_never(message)

    def _release(self, before: BarrierState, state: BarrierState, releases: list[Release], last: int | None) -> None:
        self.states[state.plane] = state
        if releases or state.rule.hold_ns or self._due[state.plane] is None:
            # Otherwise what is due stays: it counts from the first work for the tick.
            self._changed.add(state.plane)
        for release in releases:
            for name in self.names:
                try:
                    self.port.send(LinkKind.RELEASE, release, name)
                except LinkError as error:
                    # The group is gone, and the supervisor sees that itself; once it is back it resumes here.
                    self.port.trace.event("release.undelivered", group=name, tick=release.tick, error=str(error))
            self._note(before, release, last)

    def _note(self, before: BarrierState, release: Release, last: int | None) -> None:
        since, now = barrier.work_since(before), self.port.now()
        self.port.trace.event(
            "tick.release",
            plane=release.plane.value,
            tick=release.tick,
            set=self.set.index,
            wait_ns=0 if since is None else now - since,
            last=last,
            tokens=release.verdict.tokens,
            layout=release.verdict.layout.value,
            bucket=release.verdict.bucket,
            hold=release.verdict.hold,
        )

    def settle(self) -> None:
        """Release what was held for long enough, and name who is late."""
        now = self.port.now()
        for plane, due in self._due.items():
            if plane in self._changed or (due is not None and now >= due):
                self._look(plane, now)
        self._changed.clear()

    def _look(self, plane: Plane, now: int) -> None:
        before = self.states[plane]
        state, releases = barrier.tick(before, now)
        if releases:
            self._release(before, state, releases, None)
        due = barrier.deadline(state)
        held = barrier.holding(state)
        if held is not None and self._named[plane] != held.tick:
            late = held.since_ns + LATE_NS
            if now >= late:
                self._name(plane, held)
            else:
                due = late if due is None else min(due, late)
        self._due[plane] = due

    def _name(self, plane: Plane, held: barrier.Holding) -> None:
        self._named[plane] = held.tick
        self.port.trace.event(
            "tick.late",
            plane=plane.value,
            tick=held.tick,
            set=self.set.index,
            groups=held.groups,
            since_ns=held.since_ns,
        )

    def deadline(self) -> int | None:
        """The end of a hold, or when the next late group is to be named."""
        return min((due for due in self._due.values() if due is not None), default=None)

    def marks(self) -> tuple[Mark, ...]:
        """Each plane's open tick; ``arrived`` while a group's work waits for others."""
        return tuple(map(_mark, self.states.values()))


def _mark(state: BarrierState) -> Mark:
    since = barrier.work_since(state)
    phase = Phase.WAITING if since is None else Phase.ARRIVED
    return Mark(state.plane, state.tick, phase, since or 0, 0)


if __name__ == "__main__":
    main(BarrierActor)
