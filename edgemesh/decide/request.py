"""One request's life in its group, as a table."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field
from typing import Final

from edgemesh.decide.grammar import Constraint
from edgemesh.decide.prefix import Cursor, root_of
from edgemesh.wire.messages import Submit


class State(enum.StrEnum):
    """Where a request stands."""

    WAITING = "waiting"
    """In the queue; it holds no page."""

    PREFILL = "prefill"
    """Admitted: it holds pages for all its tokens, whose KV is being computed."""

    READY = "ready"
    """Its last token is known and all KV before it written; it waits to join the decode batch."""

    DECODE = "decode"
    """A row of the decode batch."""

    ENDED = "ended"


class Event(enum.StrEnum):
    """What moves a request on."""

    ADMITTED = "admitted"
    PREFILLED = "prefilled"
    JOINED = "joined"
    LEFT = "left"
    """Its row left the batch though it is not finished; it may join again."""

    PREEMPTED = "preempted"
    ENDED = "ended"


LIFE: Final[dict[tuple[State, Event], State]] = {
    (State.WAITING, Event.ADMITTED): State.PREFILL,
    (State.PREFILL, Event.PREFILLED): State.READY,
    (State.READY, Event.JOINED): State.DECODE,
    (State.DECODE, Event.LEFT): State.READY,
    (State.PREFILL, Event.PREEMPTED): State.WAITING,
    (State.READY, Event.PREEMPTED): State.WAITING,
    (State.DECODE, Event.PREEMPTED): State.WAITING,
    (State.WAITING, Event.ENDED): State.ENDED,
    (State.PREFILL, Event.ENDED): State.ENDED,
    (State.READY, Event.ENDED): State.ENDED,
    (State.DECODE, Event.ENDED): State.ENDED,
}
"""Every legal move; any other is a fault of the caller."""


class IllegalMoveError(RuntimeError):
    """A move that the table does not have."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request as its group holds it.

    ``tokens`` are the prompt's and then all that the client has; ``planned`` of them have had the computing of their KV
    planned, ``written`` acknowledged; of the first ``scored`` the client has the log-probability of the token after each, where it asked
    for those. ``flying`` decode steps are planned and not acknowledged. ``life`` grows with each
    preemption, so that a result planned for an earlier life is told apart and dropped.
    """

    submit: Submit
    order: int
    arrived_ns: int
    cursor: Cursor = field(init=False)
    tokens: array[int] = field(init=False)
    prompt_tokens: int = field(init=False)
    credit: int = field(init=False)
    stops: frozenset[int] = field(init=False)
    state: State = State.WAITING
    pages: list[int] = field(default_factory=list)
    target: int = 0
    planned: int = 0
    written: int = 0
    scored: int = 0
    cached: int = 0
    flying: int = 0
    slot: int = -1
    life: int = 0
    admission: int = 0
    paused_ns: int = 0
    grammar: Constraint | None = None

    def __post_init__(self) -> None:
        self.cursor = Cursor(root_of(self.submit.tenant))
        self.prompt_tokens = len(self.submit.prompt)
        self.tokens = array("i", self.submit.prompt.buffer.tobytes())
        self.tokens.frombytes(self.submit.emitted.buffer.tobytes())
        self.credit = self.submit.credit
        self.stops = frozenset(self.submit.sampling.stop_token_ids)
        self.scored = self.submit.scored

    @property
    def out(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def left(self) -> int:
        """Tokens that may still be generated."""
        return self.submit.max_tokens - self.out

    @property
    def ahead(self) -> int:
        """Tokens, of the prompt or computed once more, whose computing is not planned yet; those that a decode step adds are not."""
        return len(self.tokens) if self.state is State.WAITING else max(0, self.target - self.planned)

    @property
    def whole(self) -> int:
        """Tokens that it may ever be: of the last one no KV is needed."""
        return self.prompt_tokens + self.submit.max_tokens

    @property
    def prompt_only(self) -> bool:
        """Whether it ends when its prompt is computed: no token is asked for."""
        return not self.submit.max_tokens

    @property
    def to_score(self) -> int:
        """Positions whose log-probabilities are asked for: all of the prompt's but the last, which no prompt token follows."""
        return self.prompt_tokens - 1 if self.submit.prompt_logprobs >= 0 else 0

    @property
    def mask(self) -> bytes:
        """What its next token may be; empty where there is no grammar, or its answer is not in."""
        return b"" if self.grammar is None or self.grammar.mask is None else self.grammar.mask

    @property
    def drawable(self) -> bool:
        """Whether a step may draw its next token: under a grammar, once what that may be is known."""
        return self.grammar is None or (bool(self.mask) and not self.flying)

    @property
    def credited(self) -> bool:
        """Whether its client takes a token more than those that are out or under way."""
        return self.out + self.flying < self.credit

    def move(self, event: Event) -> None:
        """Take one step of the table."""
        after = LIFE.get((self.state, event))
        if after is None:
            message = f"request {self.submit.request}: {event} is no move from {self.state}"
            raise IllegalMoveError(message)
        self.state = after
