"""What a trace says, as values: events, ticks, and the timeline of one request made of them."""

import enum
from typing import Final

import msgspec


class Category(enum.StrEnum):
    """Where a nanosecond of a request went, in the order in which a request meets them."""

    RECEIVE = "receive"
    """Gateway: the body is read and decoded."""

    TOKENISE = "tokenise"
    """Gateway: validated, template rendered, tokenised."""

    SUBMIT = "submit"
    """Gateway: tokenised, not yet on the way to the router."""

    ROUTE = "route"
    """On the way to the router, and in it."""

    PLACE = "place"
    """On the way from the router to the group, or being refused."""

    QUEUE = "queue"
    """In the group, waiting for admission (pages)."""

    PREFILL_WAIT = "prefill wait"
    """Admitted, but no step holds a chunk of it: other prompts are computed."""

    PREFILL_BARRIER = "prefill barrier"
    """Its chunk is planned, another group has not arrived at the tick."""

    HOLD = "hold"
    """Its chunk is planned, and the barrier held the tick on purpose."""

    PREFILL = "prefill"
    """A step with its chunk runs on the ranks."""

    SLOT = "decode slot"
    """Prefilled, waiting for a row in the decode batch."""

    DECODE_WAIT = "decode wait"
    """In the batch, no step planned: the group is busy with results, or the client's credit is used up."""

    PACE = "decode pace"
    """In the batch, whose next step left the cards to prompts that wait (``decode.pace_ms``); before it is in, that is part of ``decode slot``."""

    DECODE_BARRIER = "decode barrier"
    """A decode step is planned, another group has not arrived at the tick."""

    DECODE = "decode"
    """A decode step runs on the ranks."""

    PREEMPTED = "preempted"
    """Put back into the queue because the pages ran out."""

    SIBLINGS = "other choices"
    """Ended in the group, while another choice of the same request was still on its way."""

    DELIVER = "deliver"
    """Ended in the group; the last tokens are detokenised and written to the socket."""


DECODING: Final = frozenset({Category.DECODE, Category.DECODE_BARRIER, Category.DECODE_WAIT, Category.PACE})
"""What the time with a row in the decode batch is made of."""


class Event(msgspec.Struct, frozen=True):
    """One line of a trace; ``at`` is in wall nanoseconds on the common axis."""

    at: int
    actor: str
    event: str
    epoch: int = 0
    group: int | None = None
    tick: int | None = None
    detail: dict[str, object] = {}

    @property
    def role(self) -> str:
        """The kind of actor that wrote it."""
        return self.actor.partition("-")[0]


class Step(msgspec.Struct, frozen=True):
    """One rank's part of a tick: its whole step, and how much of it was spent in collectives."""

    rank: str
    group: int | None
    step_ns: int
    collective_ns: int

    @property
    def own_ns(self) -> int:
        """Work of its own: what the others waited for, when it is the largest."""
        return max(self.step_ns - self.collective_ns, 0)


class Tick(msgspec.Struct, frozen=True):
    """One tick as one group lived it: arrived at the barrier, released and planned, done; None where not (yet) seen.

    ``previous`` is when the plane's tick before was done: up to then this one, planned ahead, waited for no one.
    ``step_ns`` is the leading rank's own measure of the step; its plan was held for ``paced_ns`` until it was ``made``.
    """

    group: int
    plane: str
    tick: int
    epoch: int = 0
    arrive: int | None = None
    plan: int | None = None
    done: int | None = None
    tokens: int = 0
    sequences: int = 0
    idle: bool = False
    hold: str = ""
    requests: tuple[str, ...] = ()
    last: int | None = None
    previous: int | None = None
    step_ns: int | None = None
    paced_ns: int = 0
    made: int | None = None
    run: int = 1
    steps: tuple[Step, ...] = ()

    @property
    def barrier_ns(self) -> int:
        """What the barrier cost: from the group's arrival to the release, less what the step before hid."""
        if self.plan is None or self.arrive is None:
            return 0
        return max(self.plan - max(self.arrive, self.previous or 0), 0)

    @property
    def run_ns(self) -> int:
        """The step: as the leading rank measured it, else from the release (or the step before) to the result."""
        if self.step_ns:
            return self.step_ns
        if self.done is None or self.plan is None:
            return 0
        return max(self.done - max(self.plan, self.previous or 0), 0)

    @property
    def slowest(self) -> Step | None:
        """The rank with the most work of its own."""
        return max(self.steps, key=lambda step: step.own_ns, default=None)


class Span(msgspec.Struct, frozen=True):
    """A stretch of one category, ``[start, end)``."""

    category: Category
    start: int
    end: int

    @property
    def ns(self) -> int:
        """How long it is."""
        return self.end - self.start


class Decode(msgspec.Struct, frozen=True):
    """The decode ticks of a request in summary; nanoseconds from arrival to the result."""

    count: int
    mean_ns: int
    worst: tuple[Tick, ...]


class Timeline(msgspec.Struct, frozen=True):
    """What ``show`` shows: spans without gap or overlap from ``start`` to ``end``, and their sums."""

    request: str
    group: int | None
    finish: str
    start: int
    end: int
    spans: tuple[Span, ...]
    totals: dict[Category, int]
    events: tuple[Event, ...]
    prefill: tuple[Tick, ...]
    decode: Decode
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    ttft_ns: int | None
    sent_ns: int | None
    preemptions: int
    attempts: int
    choices: int

    @property
    def e2e_ns(self) -> int:
        """From the first event to the last, or to the trace's end while it runs."""
        return self.end - self.start
