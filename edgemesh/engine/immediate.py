"""An engine that runs one step at a time, behind the interface of one that runs ahead."""

from typing import Protocol

from edgemesh.wire.messages import Done, IdleDone, IdlePlan, Plan


class Steps(Protocol):
    """What executes a plan while its caller waits."""

    @property
    def collective_ns(self) -> int:
        """Time spent in collectives since the start."""

    def allow(self, wait_ns: int) -> None:
        """Collectives from now on end ``wait_ns`` from now."""

    def execute(self, plan: Plan | IdlePlan) -> Done | IdleDone:
        """Run one step; ``StepRefusedError`` before anything is changed or exchanged."""


class Immediate:
    """A step is through when ``submit`` returns; the caller takes its answer before it submits the next."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._answer: Done | IdleDone | None = None

    @property
    def collective_ns(self) -> int:
        """Time spent in collectives since the start."""
        return self._steps.collective_ns

    def allow(self, wait_ns: int) -> None:
        """Collectives from now on end ``wait_ns`` from now."""
        self._steps.allow(wait_ns)

    def submit(self, plan: Plan | IdlePlan) -> None:
        """Run one step to its end."""
        assert self._answer is None, f"tick {plan.tick} before the answer to the one before it was taken"
        self._answer = self._steps.execute(plan)

    def finished(self) -> Done | IdleDone | None:
        """The answer, once."""
        answer, self._answer = self._answer, None
        return answer
