"""The life of a mesh as one state machine: start, serve, drain, fail, end.

Events come in as method calls with the time; each returns what the supervisor's process shall do. The first
failure is the one that is named; whatever follows from it is only noted.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from edgemesh.decide.stalls import describe, holders, over_bound, whereabouts
from edgemesh.decide.watched import Watched, late
from edgemesh.topology import Mesh
from edgemesh.wire.ids import Phase, Role
from edgemesh.wire.messages import (
    Begin,
    Capacity,
    Drain,
    Drained,
    Fault,
    Health,
    Hello,
    Loading,
    Message,
    Progress,
    Ready,
    Stop,
    VaultReady,
)

SECOND: Final = 1_000_000_000
GRACE_NS: Final = 2 * SECOND
"""After a failure, time for running requests to be told why."""

STOP_NS: Final = 3 * SECOND
"""Between the word to stop and the kill: a gateway's last answers may take two, and a busy machine more."""

KILLED_NS: Final = 10 * SECOND
"""How long killed processes may take to be gone; one that hangs in a driver stays, and is named."""

GAP_NS: Final = SECOND
"""A supervisor that was itself away for so long does not count that time as anybody's silence."""

NAMED: Final = 4
"""Actors that one sentence names; the trace has them all."""

TOLD: Final = (Role.GATEWAY, Role.ROUTER)
"""Who hears whether the mesh serves."""

DRAINING: Final = (Role.GATEWAY, Role.GROUP)
"""Who says when nothing is left to finish."""


class Stage(enum.StrEnum):
    """Where the mesh stands."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    FAILING = "failing"
    ENDING = "ending"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to an actor, if it still listens."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class Note:
    """Trace an event."""

    event: str
    fields: dict[str, object]


@dataclass(frozen=True, slots=True)
class Kill:
    """End these actors' processes now."""

    names: tuple[str, ...]


Action = Send | Note | Kill


@dataclass(slots=True)
class Supervision:
    """The actors of one host from their spawning to the end of the last of them."""

    mesh: Mesh
    epoch: int
    started_ns: int
    stage: Stage = Stage.STARTING
    failure: str = ""
    culprit: str = ""
    capacity: Capacity | None = None
    first_tick: bool = False
    killed: bool = False
    watched: dict[str, Watched] = field(default_factory=dict)
    _due_ns: int = 0
    _served_ns: int = 0
    _clock_ns: int = 0

    def __post_init__(self) -> None:
        settings = self.mesh.topology.supervisor
        self._due_ns = self.started_ns + int(settings.start_deadline_s * SECOND)
        self._clock_ns = self.started_ns
        for actor in self.mesh.actors:
            if actor.role is not Role.SUPERVISOR:
                self.watched[actor.name] = Watched(actor)

    # --- what is heard ---------------------------------------------------------------------------------

    def heard(self, message: Message, now: int) -> list[Action]:
        """A report of an actor."""
        each = self.watched[message.actor]  # type: ignore[attr-defined]  # every message of the REPORT union has it
        each.heard_ns = now
        actions: list[Action] = []
        match message:
            case Hello():
                each.hello = True
                actions = self._begin([each])
            case Loading():
                each.loading = message
            case VaultReady():
                self.capacity = message.capacity
                budget = [Note("vault.budget", {"name": each.actor.name, "budget": message.budget})]
                actions = [
                    *(budget if message.budget else ()),
                    *self._ready(each, now),
                    *self._begin(self.watched.values()),
                ]
            case Ready():
                actions = self._ready(each, now)
            case Progress():
                each.marks = message.marks
                actions = [*self._note_first_tick(now), *self._check_bounds(each, now)]
            case Fault():
                actions = self._fail(each.actor.name, f"{describe(each.actor)} cannot go on: {message.reason}", now)
            case Drained():
                each.drained = True
                actions = self._end_when_drained(now)
            case _:
                pass  # the link's union holds nothing else
        return actions

    def _begin(self, actors: Iterable[Watched]) -> list[Action]:
        """Tell actors to begin, once the vault has said what by."""
        if self.capacity is None:
            return []
        begin = Begin(self.epoch, self.capacity)
        return [Send(each.actor.name, begin) for each in actors if each.hello and each.actor.role is not Role.VAULT]

    def _ready(self, each: Watched, now: int) -> list[Action]:
        if each.ready:
            return []
        each.ready = True
        note = Note("actor.ready", {"name": each.actor.name, "after_ns": now - self.started_ns})
        if self.stage is not Stage.STARTING or not all(other.ready for other in self.watched.values()):
            return [note]
        self.stage, self._served_ns = Stage.SERVING, now
        return [note, *self._tell(Health(self.epoch, serving=True))]

    def _note_first_tick(self, now: int) -> list[Action]:
        if self.first_tick or not any(
            mark.tick or mark.phase is Phase.RUNNING
            for each in self.watched.values()
            if each.actor.role is Role.RANK
            for mark in each.marks
        ):
            return []
        self.first_tick = True
        return [Note("mesh.first_tick", {"after_ns": now - self.started_ns})]

    def _check_bounds(self, each: Watched, now: int) -> list[Action]:
        served = self.stage in {Stage.SERVING, Stage.DRAINING}
        # A report from before the mesh served may come after it: the start has a deadline of its own.
        mark = over_bound(each.marks, now, self._served_ns) if served else None
        if mark is None:
            return []
        standing = {name: other.marks for name, other in self.watched.items()}
        names = holders(self.mesh, each.actor.name, mark, standing)
        what = "its loop" if mark.phase is Phase.BUSY else f"{mark.plane} tick {mark.tick}"
        bound = f"{what} is {mark.phase} for {(now - mark.since_ns) / 1e9:.1f} s"
        held = "; ".join(
            f"{describe(self.mesh.actor(name))} at {whereabouts(standing.get(name, ()), now)}" for name in names[:NAMED]
        )
        held += f"; and {len(names) - NAMED} more" if len(names) > NAMED else ""
        notes = [
            Note("actor.hung", {"name": name, "plane": mark.plane, "tick": mark.tick, "reason": bound})
            for name in names
        ]
        text = f"hung: {bound} at {describe(each.actor)}, over its bound of {mark.bound_ns / 1e9:.1f} s. It waits for: {held}"
        return [*notes, *self._fail(names[0], text, now)]

    # --- what the system says ---------------------------------------------------------------------------

    def spawned(self, name: str, pid: int) -> list[Action]:
        """An actor's process runs."""
        self.watched[name].alive = True
        return [Note("actor.spawned", {"name": name, "pid": pid})]

    def exited(self, name: str, how: str, now: int, *, clean: bool = False) -> list[Action]:
        """An actor's process is over; ``how`` completes the sentence, ``clean``: with code 0."""
        each = self.watched[name]
        each.alive = False
        note = Note("actor.exited", {"name": name, "reason": how})
        if self.stage is Stage.ENDING:
            if not any(other.alive for other in self.watched.values()):
                self.stage = Stage.OVER
            return [note]
        if self.stage is Stage.FAILING or (self.stage is Stage.DRAINING and each.drained and clean):
            return [note]
        where = f" at {whereabouts(each.marks, now)}" if each.marks else " before its first report"
        return [note, *self._fail(each.actor.name, f"{describe(each.actor)} {how}{where}", now)]

    def stopped(self, name: str, how: str, now: int) -> list[Action]:
        """An actor's process was stopped by a signal."""
        each = self.watched[name]
        each.stopped = True
        note = Note("actor.stopped", {"name": name, "reason": how})
        if self.stage in {Stage.FAILING, Stage.ENDING}:
            return [note]
        return [
            note,
            *self._fail(each.actor.name, f"{describe(each.actor)} was {how} at {whereabouts(each.marks, now)}", now),
        ]

    def continued(self, name: str) -> list[Action]:
        """A stopped process runs again."""
        self.watched[name].stopped = False
        return [Note("actor.continued", {"name": name})]

    def asked_to_stop(self, now: int) -> list[Action]:
        """SIGTERM: the first drains a mesh that serves, any other ends it now."""
        if self.stage is Stage.SERVING:
            self.stage = Stage.DRAINING
            self._due_ns = now + int(self.mesh.topology.supervisor.drain_s * SECOND)
            drain = Drain(self._due_ns)
            actions: list[Action] = [Note("mesh.draining", {"deadline_ns": self._due_ns})]
            actions += self._tell(
                Health(self.epoch, serving=False, draining=True, reason="the server is shutting down")
            )
            return actions + [Send(each.actor.name, drain) for each in self._alive(*DRAINING, Role.ROUTER)]
        note = Note("mesh.stopping", {"stage": self.stage})
        return [note, *(self._kill_all(now) if self.stage is Stage.ENDING else self._end("stopped by a signal", now))]

    # --- time -------------------------------------------------------------------------------------------

    def clock(self, now: int) -> list[Action]:
        """Look at deadlines and silences; called several times a second, after all reports were heard."""
        gap, self._clock_ns = now - self._clock_ns, now
        if gap > GAP_NS:
            for each in self.watched.values():
                each.heard_ns += gap
        match self.stage:
            case Stage.STARTING if now > self._due_ns:
                name, text = late(self.watched.values(), self.started_ns, now)
                return self._fail(name, text, now)
            case Stage.SERVING:
                return self._check_silence(now)
            case Stage.DRAINING:
                return self._end("drain deadline", now) if now > self._due_ns else self._check_silence(now)
            case Stage.FAILING if now > self._due_ns:
                return self._end(self.failure, now)
            case Stage.ENDING if now > self._due_ns:
                return self._give_up() if self.killed else self._kill_all(now)
            case _:
                return []

    def _check_silence(self, now: int) -> list[Action]:
        bound = int(self.mesh.topology.supervisor.silence_s * SECOND)
        silent = [each for each in self.watched.values() if each.alive and now - each.heard_ns > bound]
        if not silent:
            return []
        each = min(silent, key=lambda other: other.heard_ns)
        lasted = f"{(now - each.heard_ns) / 1e9:.1f} s"
        note = Note("actor.silent", {"name": each.actor.name, "reason": f"no report for {lasted}"})
        where = whereabouts(each.marks, each.heard_ns)
        return [
            note,
            *self._fail(each.actor.name, f"{describe(each.actor)} has not reported for {lasted}; last at {where}", now),
        ]

    # --- the end ----------------------------------------------------------------------------------------

    def _end_when_drained(self, now: int) -> list[Action]:
        if self.stage is Stage.DRAINING and all(each.drained for each in self._alive(*DRAINING)):
            return self._end("drained", now)
        return []

    def _fail(self, culprit: str, reason: str, now: int) -> list[Action]:
        """Name the first failure and tell those who answer clients; a start that fails has none to tell."""
        if self.stage not in {Stage.STARTING, Stage.SERVING, Stage.DRAINING}:
            return []
        served, self.culprit, self.failure = self.stage is not Stage.STARTING, culprit, reason
        self.stage, self._due_ns = Stage.FAILING, now + (GRACE_NS if served else 0)
        note = Note("mesh.failed", {"reason": reason})
        return [note, *self._tell(Health(self.epoch, serving=False, reason=reason[:4000]))]

    def _end(self, why: str, now: int) -> list[Action]:
        self.stage, self._due_ns = Stage.ENDING, now + STOP_NS
        alive = self._alive(*Role)
        if not alive:
            self.stage = Stage.OVER
        stop = Stop(why[:4000])
        return [*(Send(each.actor.name, stop) for each in alive), *self._kill(stopped_only=True)]

    def _kill_all(self, now: int) -> list[Action]:
        self.killed, self._due_ns = True, now + KILLED_NS
        return self._kill()

    def _give_up(self) -> list[Action]:
        self.stage = Stage.OVER
        return [
            Note("actor.left", {"name": each.actor.name, "reason": "killed, and not gone"})
            for each in self._alive(*Role)
        ]

    def _kill(self, *, stopped_only: bool = False) -> list[Action]:
        names = [each.actor.name for each in self._alive(*Role) if each.stopped or not stopped_only]
        return [Kill(tuple(names))] if names else []

    def _tell(self, health: Health) -> list[Action]:
        return [Send(each.actor.name, health) for each in self._alive(*TOLD)]

    def _alive(self, *roles: Role) -> list[Watched]:
        return [each for each in self.watched.values() if each.alive and each.actor.role in roles]
