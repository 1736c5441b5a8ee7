"""The group: sole owner of the requests and KV pages of one DP group.

It takes requests from the router, agrees on each step with its peers through the barrier, sends the plan to its ranks,
and sends what they drew straight to the gateway. All decisions are ``decide.scheduling``'s; this file carries messages.
"""

from collections.abc import Callable, Iterator
from typing import Final, assert_never

from edgemesh.actors.group_desk import Desk, open_desk
from edgemesh.decide import barrier
from edgemesh.decide.owed import Owed, Word
from edgemesh.decide.scheduling import Scheduler
from edgemesh.decide.state import Config
from edgemesh.runtime.actor import main
from edgemesh.runtime.link import LinkError
from edgemesh.runtime.port import Port, supervisor_of
from edgemesh.topology import Mesh
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.ids import MAX_TEXT, Phase
from edgemesh.wire.messages import (
    Accepted,
    Arrive,
    Attached,
    Begin,
    Cancel,
    Capacity,
    Credit,
    Done,
    Drain,
    Drained,
    Emit,
    Failed,
    Fault,
    Health,
    IdleDone,
    Mark,
    Message,
    Place,
    Ready,
    Release,
    StepFault,
    Stop,
)

LOAD_EVERY_NS: Final = 10_000_000
"""Load reports are at least this far apart; the router counts its own placements in between."""

CHECK_AFTER_NS: Final = 200_000_000
"""How long a group is quiet before it counts its pages."""

GroupInbox = Place | Cancel | Credit | Release | Attached | Done | IdleDone | StepFault | Begin | Health | Drain | Stop


MakeDesk = Callable[[Capacity], Desk]
"""Who works grammars out for a model of this capacity."""


class GroupActor:
    """One DP group's event loop: take what came, let the scheduler decide, send what it wants."""

    def __init__(self, mesh: Mesh, name: str, epoch: int, port: Port, make_desk: MakeDesk) -> None:
        self.mesh = mesh
        self.name = name
        self.epoch = epoch
        self.port = port
        self.done = False
        group = mesh.actor(name).group
        assert group is not None, f"{name} has no group"
        self.group = group
        self.set = mesh.set_of(group)
        self.supervisor = supervisor_of(mesh, name)
        self.waiting_for = {(plane, rank) for plane in mesh.planes for rank in mesh.ranks_of(group)}
        self.scheduler: Scheduler | None = None
        self._make_desk = make_desk
        self._desk: Desk | None = None
        self.ready = False
        self._ranks = {plane: mesh.rank_names(group, plane) for plane in mesh.planes}
        self._rules = {plane: barrier.rule_for(mesh.topology, plane) for plane in mesh.planes}
        self._revision = 0
        self._load_due_ns: int | None = None
        self._load_sent_ns = 0
        self._check_due_ns: int | None = None
        self._audit: Iterator[None] | None = None
        self._drained = False
        self.owed = Owed()

    # --- events ---

    def receive(self, kind: LinkKind, message: Message) -> None:
        """Take one message of a link of this kind."""
        del kind  # its union has been checked already
        self._take(message)  # type: ignore[arg-type]  # the links' unions make up GroupInbox

    def _take(self, message: GroupInbox) -> None:
        if isinstance(message, Begin):
            self._begin(message.capacity)
            return
        if isinstance(message, Stop):
            self.done = True
            return
        if isinstance(message, Health):
            return
        if isinstance(message, StepFault):
            reason = f"rank {message.rank} ({message.plane}, tick {message.tick}): {message.reason}"
            self.port.send(LinkKind.REPORT, Fault(self.name, self.epoch, reason[:MAX_TEXT]), self.supervisor)
            return
        if isinstance(message, Attached):
            self.waiting_for.discard((message.plane, message.rank))
            return
        if self.scheduler is None:
            self.port.trace.event("message.early", type=type(message).__name__)
            return
        self._schedule(self.scheduler, message)

    def _schedule(
        self, scheduler: Scheduler, message: Place | Cancel | Credit | Release | Done | IdleDone | Drain
    ) -> None:
        now = self.port.now()
        match message:
            case Done() | IdleDone():
                scheduler.done(message, now)
            case Release():
                scheduler.release(message, now)
            case Place():
                scheduler.place(message, now)
            case Cancel():
                scheduler.cancel(message)
                self.owed.forgive(message.request, message.attempt)
            case Credit():
                scheduler.credit(message)
            case Drain():
                scheduler.state.draining = True
            case _:
                assert_never(message)
        if self._load_due_ns is None and not isinstance(message, Release | Credit):
            self._load_due_ns = max(now, self._load_sent_ns + LOAD_EVERY_NS)

    def _begin(self, capacity: Capacity) -> None:
        topology = self.mesh.topology
        self._desk = self._make_desk(capacity)
        self.scheduler = Scheduler(
            Config(
                group=self.group,
                member=self.set.groups.index(self.group),
                epoch=self.epoch,
                planes=self.mesh.planes,
                pages=capacity.pages,
                page_tokens=capacity.page_tokens,
                slots=topology.decode.slots,
                chunk_tokens=topology.prefill.chunk_tokens,
                reserve_tokens=topology.group.reserve_tokens,
                max_waiting=topology.group.max_waiting,
                quantum_tokens=topology.prefill.chunk_tokens,
                age_ns=int(topology.group.age_s * 1e9),
                pause_ns=int(topology.group.credit_deadline_s * 1e9),
                prefix_cache=topology.group.prefix_cache,
                graphs=any(rule.buckets for rule in self._rules.values()),
                eos_token_ids=capacity.eos_token_ids,
                pace_ns=int(topology.decode.pace_ms * 1e6),
            )
        )

    # --- what comes of them ---

    def settle(self) -> None:
        """Commit what can run next, and send all that the events since the last call led to."""
        scheduler, desk = self.scheduler, self._desk
        if scheduler is None or desk is None:
            return
        for answer in desk.answers():
            scheduler.answer(answer, self.port.now())
        if not self.ready:
            if self.waiting_for:
                return
            self.ready = True
            self._load_due_ns = self.port.now()
            self.port.send(LinkKind.REPORT, Ready(self.name, self.epoch), self.supervisor)
        self.owed.pay(self.port.now(), self._said)
        # Plans of released ticks go out before the next step is thought about: the ranks wait for them.
        going = True
        self._perform(scheduler, desk)
        while going:
            scheduler.advance(self.port.now())
            going = self._perform(scheduler, desk)
        self._report(scheduler, self.port.now())

    def _perform(self, scheduler: Scheduler, desk: Desk) -> bool:
        """Send everything; True if that itself led to more (a release of the barrier inside this group, a lost gateway)."""
        effects = scheduler.effects()
        for message in effects.plans:
            for rank in self._ranks[message.plane]:
                self.port.send(LinkKind.PLAN, message, rank)
        for reply in effects.replies:
            self._answer(scheduler, reply, reply.gateway)
        for gateway, items in effects.items.items():
            self._answer(scheduler, Emit(self.group, gateway, self.epoch, tuple(items)), gateway)
        desk.take(effects.asks, effects.dropped)
        for event, fields in effects.notes:
            self.port.trace.event(event, **fields)
        for arrive in effects.arrivals:
            if self.set.barrier is not None:
                self._arrive(arrive, self.set.barrier)
                continue
            release = barrier.alone(arrive, self._rules[arrive.plane])
            if release is not None:
                scheduler.release(release, self.port.now())
        return scheduler.busy

    def _arrive(self, arrive: Arrive, to: str) -> None:
        shape = arrive.shape
        if shape.tokens:
            self.port.trace.event(
                "tick.arrive",
                plane=arrive.plane.value,
                tick=arrive.tick,
                tokens=shape.tokens,
                sequences=shape.sequences,
            )
        self.port.send(LinkKind.ARRIVE, arrive, to)

    def _answer(self, scheduler: Scheduler, message: Accepted | Emit | Failed, gateway: int) -> None:
        """To the gateway that it addresses; one that takes nothing loses its requests, never this group's time.

        It hears of that as soon as it takes messages again, before anything else.
        """
        if gateway not in self.owed and self._said(message):
            return
        now = self.port.now()
        if isinstance(message, Failed):
            self.owed.add(message, now)
        elif isinstance(message, Emit):
            # Of requests that ended with these tokens, too.
            for item in message.items:
                self.owed.add(self._unheard(gateway, item.request, item.attempt), now)
        for request, attempt in scheduler.abort_gateway(gateway):
            self.owed.add(self._unheard(gateway, request, attempt), now)

    def _said(self, message: Accepted | Emit | Word) -> bool:
        try:
            self.port.send(LinkKind.EMIT, message, f"gateway-{message.gateway}")
        except LinkError as error:
            self.port.trace.event("gateway.lost", gateway=message.gateway, error=str(error))
            return False
        return True

    def _unheard(self, gateway: int, request: str, attempt: int) -> Failed:
        reason = f"group {self.group} could not send its tokens: the gateway was behind; try again in 1 s"
        return Failed(self.group, gateway, self.epoch, request, attempt, 503, "gateway_behind", reason)

    def _report(self, scheduler: Scheduler, now: int) -> None:
        if self._load_due_ns is not None and now >= self._load_due_ns:
            self._load_due_ns, self._load_sent_ns = None, now
            self._revision += 1
            self.port.send(LinkKind.LOAD, scheduler.load(self._revision), "router-0")
            self._check_due_ns = now + CHECK_AFTER_NS
        if not scheduler.quiet:
            self._audit = None
        else:
            self._count(scheduler, now)
            if scheduler.state.draining and self.owed.deadline is None and not self._drained:
                self._drained = True
                self.port.send(LinkKind.REPORT, Drained(self.name, self.epoch), self.supervisor)

    def _count(self, scheduler: Scheduler, now: int) -> None:
        """Count the pages, some in each turn: a request that comes meanwhile does not wait for the rest."""
        if self._check_due_ns is not None and now >= self._check_due_ns:
            self._check_due_ns, self._audit = None, scheduler.audit()
        if self._audit is None:
            return
        try:
            next(self._audit)
        except StopIteration:
            self._audit = None
            pages = scheduler.state.pages
            self.port.trace.event("group.quiet", free_pages=pages.free, total_pages=pages.usable)

    # --- what the loop asks ---

    def deadline(self) -> int | None:
        """When to settle though nothing came."""
        due = [self._load_due_ns, self.owed.deadline]
        if self._desk is not None:
            due.append(self._desk.deadline())
        if self.scheduler is not None:
            due.append(self.scheduler.deadline())
            due.append(self._check_due_ns if self.scheduler.quiet else None)
            due.append(None if self._audit is None else self.port.now())
        return min((each for each in due if each is not None), default=None)

    def marks(self) -> tuple[Mark, ...]:
        """Where each plane stands; read by the progress thread."""
        if self.scheduler is None:
            return ()
        return tuple(
            Mark(plane, pipe.tick, _phase(pipe.flying, pipe.committed), pipe.since_ns, 0)
            for plane, pipe in self.scheduler.state.pipelines.items()
        )


def _phase(flying: object, committed: object) -> Phase:
    if flying:
        return Phase.PLANNED
    return Phase.ARRIVED if committed else Phase.WAITING


def real(mesh: Mesh, name: str, epoch: int, port: Port) -> GroupActor:
    """A group whose grammars are worked out by a process of its own."""
    return GroupActor(mesh, name, epoch, port, lambda capacity: open_desk(mesh, name, port, capacity))


if __name__ == "__main__":
    main(real)
