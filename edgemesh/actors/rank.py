"""The rank: one GPU's (or CPU's) execution of plans of one plane, in order. It decides nothing.

Every rank of a group gets the same plans; all run them, and the group's first rank answers for all: the last collective of a step
had every rank's part. A plan that is refused is answered by whoever refuses it.
"""

import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol

from edgemesh.decide import barrier
from edgemesh.engine.faults import CollectiveTimeoutError
from edgemesh.engine.immediate import Immediate
from edgemesh.engine.null import NullEngine
from edgemesh.engine.turns import Limits, Station, StepRefusedError
from edgemesh.runtime.actor import main
from edgemesh.runtime.port import Port, supervisor_of
from edgemesh.topology import Mesh
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.ids import Phase
from edgemesh.wire.messages import (
    Attached,
    Begin,
    Capacity,
    Done,
    IdleDone,
    IdlePlan,
    Mark,
    Message,
    Plan,
    Ready,
    StepFault,
    Stop,
)

PATIENCE_NS: Final = 10_000_000_000
"""No step counts as hung before this."""

SLOWDOWN: Final = 20
"""A step counts as hung when it takes this many times what the slowest of late would suggest for its size."""

GRACE_NS: Final = 5_000_000_000
"""Collectives wait this much longer than a step's bound: the supervisor names the rank that hangs before its peers do."""


class Engine(Protocol):
    """What executes plans."""

    @property
    def collective_ns(self) -> int:
        """Time spent waiting for and exchanging with other ranks, since the start."""

    def allow(self, wait_ns: int) -> None:
        """Collectives from now on end ``wait_ns`` from now."""

    def submit(self, plan: Plan | IdlePlan) -> None:
        """Begin one step. Raises ``StepRefusedError`` before anything is changed or exchanged."""

    def finished(self) -> Done | IdleDone | None:
        """The answer of the oldest step begun, once it is through; None until then."""


class RankActor:
    """One rank's loop: begin once, then plan after plan."""

    def __init__(self, mesh: Mesh, name: str, epoch: int, port: Port) -> None:
        me = mesh.actor(name)
        assert me.group is not None, f"{name} has no group"
        assert me.plane is not None, f"{name} has no plane"
        self.mesh = mesh
        self.name = name
        self.epoch = epoch
        self.port = port
        self.done = False
        self.rank, self.group, self.plane = me.index, me.group, me.plane
        self.set = mesh.set_of(self.group)
        self.leads = mesh.leader(self.group) == self.rank
        self._supervisor = supervisor_of(mesh, name)
        self._engine: Engine | None = None
        self._begin: Capacity | None = None
        self._plans: deque[Plan | IdlePlan] = deque()
        self._flying: deque[tuple[Plan | IdlePlan, int]] = deque()
        self._waited_ns = 0
        self._pace = Pace(int(mesh.topology.supervisor.step_bound_s * 1e9))
        self._marks: tuple[Mark, ...] = ()
        self._mark(Phase.STARTING, 0, 0)
        if mesh.topology.engine.kind != "null":
            # The engine's libraries load while the vault reads the weights. A null rank never loads them.
            import_module("edgemesh.engine.boot")

    def receive(self, kind: LinkKind, message: Message) -> None:
        """Keep a plan for its turn."""
        del kind  # its union has been checked already
        match message:
            case Plan() | IdlePlan():
                self._plans.append(message)
            case Begin():
                self._begin = message.capacity
            case Stop():
                self.done = True
            case _:
                pass  # what the supervisor tells everyone changes nothing here

    def settle(self) -> None:
        """Start the engine, or begin one plan and send what is through; the loop comes back at once if more is to come."""
        if self._begin is not None and self._engine is None:
            self._engine = self._started(self._begin)
            self._mark(Phase.WAITING, 0, 0)
            attached = Attached(self.group, self.plane, self.epoch, self.rank)
            self.port.send(LinkKind.RESULT, attached, f"group-{self.group}")
            self.port.send(LinkKind.REPORT, Ready(self.name, self.epoch), self._supervisor)
        if self._engine is not None and self._plans:
            self._submit(self._engine, self._plans.popleft())
        while self._engine is not None and self._flying and self._answer(self._engine):
            pass

    def deadline(self) -> int | None:
        """Now, while a plan waits or a step runs: a device tells nobody when it is through."""
        return self.port.now() if self._flying or (self._plans and self._engine is not None) else None

    def marks(self) -> tuple[Mark, ...]:
        """The step that runs, since when, and how long it may."""
        return self._marks

    def _mark(self, phase: Phase, tick: int, bound_ns: int) -> None:
        self._marks = (Mark(self.plane, tick, phase, self.port.now(), bound_ns),)

    def _started(self, capacity: Capacity) -> Engine:
        self._mark(Phase.CONNECTING, 0, 0)
        station = Station(self.group, self.plane, self.epoch, self.set.groups.index(self.group), len(self.set.groups))
        if self.mesh.topology.engine.kind == "null":
            slots = self.mesh.topology.decode.slots
            limits = Limits(capacity.pages, capacity.page_tokens, slots, capacity.max_model_len, capacity.vocab_size)
            return Immediate(NullEngine(station, limits, capacity.eos_token_ids))
        from edgemesh.engine.boot import Member, boot  # noqa: PLC0415 - a null rank never loads torch

        lease = next(link for link in self.mesh.links_of(self.name) if link.kind is LinkKind.LEASE)
        vault = Path(lease.endpoint.removeprefix("ipc://"))
        member = Member(self.mesh, self.name, self.rank, self.plane, self.epoch, vault)
        sizes = barrier.graph_sizes(barrier.rule_for(self.mesh.topology, self.plane))
        engine = boot(member, station, sizes, lambda step: self.port.trace.event("rank.step", step=step))
        gc.collect()
        gc.freeze()
        return engine

    def _submit(self, engine: Engine, plan: Plan | IdlePlan) -> None:
        bound = self._pace.bound_ns(sum(plan.verdict.tokens))
        if not self._flying:
            self._mark(Phase.RUNNING, plan.tick, bound)
        engine.allow(bound + GRACE_NS)
        try:
            with self._told(plan):
                engine.submit(plan)
        except StepRefusedError as error:
            self._fault(plan, str(error))
            self._mark(Phase.WAITING, plan.tick, 0)
            return
        self._flying.append((plan, bound))

    def _answer(self, engine: Engine) -> bool:
        """Send the oldest step's answer; False if it still runs."""
        plan, _ = self._flying[0]
        with self._told(plan):
            answer = engine.finished()
        if answer is None:
            return False
        self._flying.popleft()
        if self.leads:
            self.port.send(LinkKind.RESULT, answer, f"group-{self.group}")
        self._pace.ran(sum(plan.verdict.tokens), answer.step_ns)
        if self._flying:
            after, bound = self._flying[0]
            self._mark(Phase.RUNNING, after.tick, bound)
        else:
            self._mark(Phase.WAITING, plan.tick + 1, 0)
        waited, self._waited_ns = self._waited_ns, engine.collective_ns
        self.port.trace.event(
            "tick.step",
            plane=self.plane.value,
            tick=plan.tick,
            step_ns=answer.step_ns,
            collective_ns=self._waited_ns - waited,
            tokens=plan.verdict.tokens[self.set.groups.index(self.group)],
            idle=isinstance(plan, IdlePlan),
            group=self.group,
        )
        return True

    @contextmanager
    def _told(self, plan: Plan | IdlePlan) -> Iterator[None]:
        """What ends a step ends this rank too, but first its group hears why; a refusal is no such end."""
        try:
            yield
        except StepRefusedError:
            raise
        except CollectiveTimeoutError as error:
            ranks = self.mesh.ranks_of(self.group) if error.group == "attn" else self.mesh.world_of(self.set.index)
            absent = ", ".join(f"rank-{ranks[each]}.{self.plane}" for each in error.missing)
            self._fault(plan, f"a collective of group {error.group!r} waited in vain for {absent}")
            raise
        except Exception as error:
            self._fault(plan, f"{type(error).__name__}: {error}")
            raise

    def _fault(self, plan: Plan | IdlePlan, reason: str) -> None:
        self.port.trace.event("step.fault", plane=self.plane.value, tick=plan.tick, group=self.group, reason=reason)
        fault = StepFault(self.group, self.plane, self.epoch, plan.tick, self.rank, reason[:4096])
        self.port.send(LinkKind.RESULT, fault, f"group-{self.group}")


class Pace:
    """How long a step may take: from its tokens and the slowest of the last steps, within fixed limits."""

    def __init__(self, longest_ns: int) -> None:
        self._longest_ns = longest_ns
        self._recent: deque[tuple[int, int]] = deque(maxlen=16)

    def ran(self, tokens: int, took_ns: int) -> None:
        """A step of so many tokens took so long."""
        self._recent.append((tokens, took_ns))

    def bound_ns(self, tokens: int) -> int:
        """The bound of a step of so many tokens; the fixed one until a few steps have run."""
        if len(self._recent) < 4:
            return self._longest_ns
        expected = max(took * max(1, tokens / max(1, ran)) for ran, took in self._recent)
        return min(self._longest_ns, max(PATIENCE_NS, int(SLOWDOWN * expected)))


if __name__ == "__main__":
    main(RankActor)
