"""The pipeline of ticks of one plane, as its group sees it.

A step is *committed* when its plan is made and its arrival sent, *flying* from its release until its result is in. Ticks are
released one after the other; a step may be committed while the one before it flies, up to a depth. A committed step whose
tick was released as idle (the barrier had decided before the arrival came) keeps its plan for the next tick.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from edgemesh.decide.request import Sequence
from edgemesh.wire.ids import Plane
from edgemesh.wire.messages import Arrive, Decode, Done, IdleDone, IdlePlan, Plan, Prefill, Release, Scoring, Shape


@dataclass(slots=True, eq=False)
class Run:
    """What one sequence has in a step: a chunk up to position ``upto`` with its ``scoring``, or (``upto`` 0) a decode row."""

    sequence: Sequence
    life: int
    upto: int = 0
    final: bool = False
    slot: int = -1
    scoring: Scoring | None = None


@dataclass(slots=True, eq=False)
class Waste:
    """Pages that no request holds any more, though ``steps`` unacknowledged steps may still touch them."""

    pages: list[int]
    steps: int


@dataclass(slots=True, eq=False)
class Step:
    """A committed plan and what it owes on its result; it was made at ``made_ns``, after decode had been held for ``paced_ns``."""

    shape: Shape
    prefill: Prefill | None = None
    decode: Decode | None = None
    chunks: list[Run] = field(default_factory=list)
    rows: list[Run] = field(default_factory=list)
    waste: list[Waste] = field(default_factory=list)
    tick: int = -1
    sent_ns: int = 0
    made_ns: int = 0
    paced_ns: int = 0


IDLE = Shape()

_OF_LATE: Final = 8
"""Steps over which their usual duration is followed."""


class OutOfStepError(RuntimeError):
    """A release or result that does not follow the one before it."""


@dataclass(slots=True, eq=False)
class Pipeline:
    """One plane's ticks in one group; ``member`` is the group's place in its coupled set.

    ``worked_ns`` is when the last step with work was released, ``done_ns`` when the last one that is over was done; of late one took ``typical_ns``.
    The next step is held since ``held_since_ns`` (0: it is not).
    """

    group: int
    member: int
    plane: Plane
    epoch: int
    depth: int
    tick: int = 0
    revision: int = 0
    arrived: Shape | None = None
    committed: Step | None = None
    flying: deque[Step] = field(default_factory=deque)
    since_ns: int = 0
    worked_ns: int = 0
    done_ns: int = 0
    typical_ns: int = 0
    held_since_ns: int = 0

    @property
    def open(self) -> bool:
        """Whether a new step may be committed."""
        return self.committed is None and len(self.flying) < self.depth

    @property
    def quiet(self) -> bool:
        """Whether nothing real is under way."""
        return self.committed is None and not any(step.shape.tokens for step in self.flying)

    def arrive(self, now_ns: int) -> Arrive | None:
        """The arrival that is owed: for the committed step, else an idle one; a repeated one is not."""
        if len(self.flying) >= self.depth:
            return None
        shape = self.committed.shape if self.committed else IDLE
        if self.arrived is not None and (self.arrived.tokens or not shape.tokens):
            return None
        self.arrived = shape
        self.revision += 1
        self.since_ns = now_ns
        return Arrive(self.plane, self.epoch, self.tick, self.group, self.revision, shape)

    def release(self, release: Release, now_ns: int) -> Plan | IdlePlan:
        """The plan for the released tick, real or idle, as the verdict says."""
        if release.tick != self.tick or self.arrived is None:
            message = f"{self.plane} tick {release.tick} released, but {self.tick} is next"
            raise OutOfStepError(message)
        tokens = release.verdict.tokens[self.member]
        if tokens:
            step = self.committed
            if step is None or step.shape.tokens != tokens:
                message = (
                    f"{self.plane} tick {release.tick} released with {tokens} tokens, which this group never offered"
                )
                raise OutOfStepError(message)
            self.committed = None
            self.worked_ns = now_ns
        else:
            step = Step(IDLE)
        step.tick, step.sent_ns = self.tick, now_ns
        self.flying.append(step)
        self.tick += 1
        self.revision, self.arrived, self.since_ns = 0, None, now_ns
        head = (self.group, self.plane, self.epoch, step.tick, release.verdict)
        return Plan(*head, step.prefill, step.decode) if tokens else IdlePlan(*head)

    def acknowledge(self, done: Done | IdleDone, now_ns: int) -> Step:
        """The step that this result belongs to."""
        tick, idle = done.tick, isinstance(done, IdleDone)
        if not self.flying or self.flying[0].tick != tick or idle == bool(self.flying[0].shape.tokens):
            waiting = self.flying[0].tick if self.flying else "none"
            message = (
                f"{'idle' if idle else 'real'} result of {self.plane} tick {tick}, but the next to come is {waiting}"
            )
            raise OutOfStepError(message)
        if not idle:
            self.done_ns = now_ns
            self.typical_ns += (done.step_ns - self.typical_ns) // _OF_LATE if self.typical_ns else done.step_ns
        return self.flying.popleft()

    def outstanding(self) -> Step | None:
        """The last step that may still touch a page that was in use until now."""
        if self.committed is not None:
            return self.committed
        return next((step for step in reversed(self.flying) if step.shape.tokens), None)
