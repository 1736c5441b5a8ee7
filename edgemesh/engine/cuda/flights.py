"""Steps under way: what the host keeps of each until its tokens are here."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from edgemesh.engine.cuda.staging import Inbox
from edgemesh.engine.sampler import Row
from edgemesh.engine.scores import packed
from edgemesh.engine.slots import Seat
from edgemesh.wire.messages import Done, IdleDone, IdlePlan, Logprob, Plan, Scoring


@dataclass(frozen=True, slots=True)
class Drawing:
    """A row of a step that draws: its place among them, its request, and its slot and seat (-1, None: a prompt's end)."""

    number: int
    request: str
    row: Row
    slot: int = -1
    seat: Seat | None = None


@dataclass(slots=True)
class Flight:
    """One step: its plan, the slots that ran, and how many ends of prompts draw before them.

    ``cuts`` are rows that may yield no token, which nobody knows before it comes; ``patch`` and ``logprobs`` are of rows that the
    sampler drew. ``scores`` are on the host when the tokens are, and answer ``scoring``.
    """

    plan: Plan | IdlePlan
    began_ns: int
    inbox: Inbox
    ran: tuple[int, ...] = ()
    firsts: int = 0
    cuts: list[Drawing] = field(default_factory=list)
    patch: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, Logprob] = field(default_factory=dict)
    scoring: Sequence[Scoring] = ()
    scores: Tensor | None = None

    def answer(self, tokens: Sequence[int], step_ns: int) -> Done | IdleDone:
        """What the group is told, once the device's ``tokens`` are here."""
        plan = self.plan
        head = (plan.group, plan.plane, plan.epoch, plan.tick)
        if isinstance(plan, IdlePlan):
            return IdleDone(*head, step_ns)
        drawn = [self.patch.get(number, token) for number, token in enumerate(tokens)]
        logprobs = [self.logprobs.get(number) for number in range(len(drawn))]
        cut = self.firsts
        return Done(
            *head,
            self.ran,
            tuple(drawn[cut:]),
            tuple(drawn[:cut]),
            _asked(logprobs[cut:]),
            _asked(logprobs[:cut]),
            step_ns,
            () if self.scores is None else packed(self.scores, self.scoring),
        )


def _asked(logprobs: Sequence[Logprob | None]) -> tuple[Logprob | None, ...]:
    """No entries at all where nobody asked."""
    return tuple(logprobs) if any(each is not None for each in logprobs) else ()
