"""What a group knows: its requests, its KV pages, the decode rows, and what it wants to be done."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappush
from typing import Final

from edgemesh.decide.asks import Ask
from edgemesh.decide.grammar import Constraint
from edgemesh.decide.pages import Pages
from edgemesh.decide.prefix import Prefix
from edgemesh.decide.queue import FairQueue
from edgemesh.decide.request import Event, Sequence, State
from edgemesh.decide.steps import Pipeline, Waste
from edgemesh.wire.ids import Finish, Plane
from edgemesh.wire.messages import Accepted, Arrive, Failed, IdlePlan, Item, Logprob, Plan, PromptLogprobs

MAX_TOMBSTONES: Final = 4096
"""Cancels remembered for requests that have not come yet; the oldest is forgotten first."""


@dataclass(frozen=True, slots=True)
class Config:
    """The numbers a group plans by.

    ``pages`` counts scratch page 0; ``slots`` bounds admitted requests and decode rows; ``chunk_tokens`` one step's prompt
    tokens; ``reserve_tokens`` is what each running row may still grow by before anyone new is admitted. A request whose
    client does not read keeps its pages from those that wait for ``park_ns``, and ends after ``pause_ns``. What a grammar allows
    must be worked out in ``grammar_ns``; it may end with one of ``eos_token_ids``. While prompts wait for the cards, a decode
    step ends up to ``pace_ns`` after the one before (0: nothing is held).
    """

    group: int
    member: int
    epoch: int
    planes: tuple[Plane, ...]
    pages: int
    page_tokens: int
    slots: int
    chunk_tokens: int
    reserve_tokens: int
    max_waiting: int
    quantum_tokens: int
    age_ns: int
    pause_ns: int
    park_ns: int = 1_000_000_000
    prefix_cache: bool = True
    depth: int = 2
    graphs: bool = False
    grammar_ns: int = 60_000_000_000
    eos_token_ids: tuple[int, ...] = ()
    pace_ns: int = 0


Note = tuple[str, dict[str, object]]


@dataclass(slots=True)
class Effects:
    """What is to be done: messages in the order of their making, notes for the trace, and questions about grammars.

    Of the ``dropped`` requests nothing will be asked any more.
    """

    arrivals: list[Arrive] = field(default_factory=list)
    plans: list[Plan | IdlePlan] = field(default_factory=list)
    items: dict[int, list[Item]] = field(default_factory=dict)
    replies: list[Accepted | Failed] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    dropped: list[Sequence] = field(default_factory=list)

    def note(self, event: str, **fields: object) -> None:
        """Leave a line in the trace."""
        self.notes.append((event, fields))


@dataclass(frozen=True, slots=True)
class Blocked:
    """The next request, which did not fit with so many pages ``free`` and requests ``admitted``.

    It cannot fit before there is ``room``: free pages beyond what is reserved, and all that ever entered the prefix index.
    """

    sequence: Sequence
    free: int
    admitted: int
    room: int


class GroupState:
    """The sole owner of one group's requests and pages.

    ``live`` are all requests not ended, ``admitted`` those that hold pages (oldest first), ``prefilling`` those of them whose
    prompt is being computed, ``ready`` those that wait to join the batch, ``rows`` the batch by slot, ``paused`` those whose client must read first: a preempted one of them stays out
    of the queue until then. ``held_until_ns`` is when decode goes on that leaves the cards to prompts. ``asking`` are those whose grammar is being asked about, and since when, the longest first. ``wasted`` pages belong to no one until the steps that name them are done.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.pages = Pages(config.pages)
        self.prefix = Prefix(self.pages, config.page_tokens, enabled=config.prefix_cache)
        self.queue = FairQueue(config.quantum_tokens, config.age_ns)
        self.live: dict[str, Sequence] = {}
        self.admitted: dict[Sequence, None] = {}
        self.prefilling: dict[Sequence, None] = {}
        self.ready: dict[Sequence, None] = {}
        self.rows: dict[int, Sequence] = {}
        self.paused: dict[Sequence, None] = {}
        self.asking: dict[Sequence, int] = {}
        self.free_slots = list(range(config.slots))
        self.leaves: list[int] = []
        self.wasted = 0
        self.tombstones: OrderedDict[tuple[str, int], None] = OrderedDict()
        self.pipelines: Mapping[Plane, Pipeline] = {
            plane: Pipeline(config.group, config.member, plane, config.epoch, config.depth) for plane in config.planes
        }
        self.order = 0
        self.admissions = 0
        self.placed = 0
        self.draining = False
        self.blocked: Blocked | None = None
        self.now_ns = 0
        self.held_until_ns: int | None = None
        self.effects = Effects()

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.config.page_tokens)

    # --- the end of a request's stay, whatever ended it ---

    def vacate(self, sequence: Sequence) -> None:
        """Take a request's row and pages; what is still in flight for it belongs to an earlier life from now on."""
        self.leave(sequence)
        self.prefilling.pop(sequence, None)
        self.ready.pop(sequence, None)
        self.paused.pop(sequence, None)
        self.admitted.pop(sequence, None)
        self.prefix.insert(sequence.cursor, sequence.tokens, sequence.pages, sequence.written)
        self.waste(sequence.pages)
        sequence.pages = []
        sequence.flying = sequence.planned = sequence.written = 0
        sequence.life += 1
        self.blocked = None

    def leave(self, sequence: Sequence) -> None:
        """Take a row out of the batch with the next plan; its slot may be joined by the same plan."""
        if sequence.slot >= 0:
            del self.rows[sequence.slot]
            self.leaves.append(sequence.slot)
            heappush(self.free_slots, sequence.slot)
            sequence.slot = -1

    def waste(self, pages: list[int]) -> None:
        """Drop pages once no step of either plane that may touch them is under way."""
        last = [step for step in (pipe.outstanding() for pipe in self.pipelines.values()) if step is not None]
        if not last:
            self.pages.drop(pages)
        elif pages:
            waste = Waste(pages, len(last))
            self.wasted += len(pages)
            for step in last:
                step.waste.append(waste)

    def reclaim(self, wastes: list[Waste]) -> None:
        """A step is done: pages that waited for it alone go back."""
        for waste in wastes:
            waste.steps -= 1
            if not waste.steps:
                self.wasted -= len(waste.pages)
                self.pages.drop(waste.pages)
                self.blocked = None

    def preempt(self, sequence: Sequence) -> None:
        """Send an admitted request back to the head of the queue; its tokens will be computed again."""
        paused = sequence in self.paused
        self.vacate(sequence)
        sequence.move(Event.PREEMPTED)
        if paused:
            self.paused[sequence] = None
        else:
            self.queue.give_back(sequence)
        self.effects.note("request.preempted", request=sequence.submit.request, tokens=len(sequence.tokens))

    def resume(self, sequence: Sequence) -> None:
        """The client of a paused request reads on."""
        if sequence in self.paused:
            del self.paused[sequence]
            sequence.paused_ns = 0
            if sequence.state is State.WAITING:
                self.queue.give_back(sequence)

    def end(self, sequence: Sequence) -> None:
        """Forget a request, in whatever state it is."""
        if sequence.state is State.WAITING and sequence not in self.paused:
            self.queue.remove(sequence)
        self.vacate(sequence)
        self.asking.pop(sequence, None)
        sequence.move(Event.ENDED)
        if (grammar := sequence.grammar) is not None:
            costs = {"masks": grammar.masks, "mask_ns": grammar.mask_ns, "waited_ns": grammar.waited_ns}
            self.effects.note("request.masked", request=sequence.submit.request, **costs)
            sequence.grammar = None
            self.effects.dropped.append(sequence)
        if self.live.get(sequence.submit.request) is sequence:
            del self.live[sequence.submit.request]

    # --- what a grammar allows ---

    def ask(self, sequence: Sequence, grammar: Constraint, tokens: tuple[int, ...]) -> None:
        """The stream has come further by ``tokens``: no step draws for it until it is known what may follow them."""
        grammar.mask = None
        grammar.asked_ns = self.now_ns
        self.asking[sequence] = self.now_ns
        self.effects.asks.append(Ask(sequence, tokens))

    # --- words to the gateway ---

    def emit(
        self,
        sequence: Sequence,
        index: int,
        tokens: tuple[int, ...],
        finish: Finish,
        logprob: Logprob | None = None,
        stop_token: int = -1,
    ) -> None:
        """Tokens for the client, the first of them the stream's ``index``-th; ``stop_token`` ended it (-1: none did)."""
        submit = sequence.submit
        logprobs = () if logprob is None else (logprob,)
        item = Item(
            submit.request, submit.attempt, index, tokens, finish, logprobs, sequence.cached, stop_token=stop_token
        )
        self.effects.items.setdefault(submit.gateway, []).append(item)

    def emit_scores(self, sequence: Sequence, found: PromptLogprobs) -> None:
        """Log-probabilities of the prompt for the client, which come before any token."""
        submit = sequence.submit
        item = Item(submit.request, submit.attempt, sequence.out, (), prompt_logprobs=found)
        self.effects.items.setdefault(submit.gateway, []).append(item)

    def fail(self, sequence: Sequence, status: int, code: str, reason: str) -> None:
        """End a request with an error that its client reads."""
        self.end(sequence)
        self.refuse(sequence, status, code, reason)

    def refuse(self, sequence: Sequence, status: int, code: str, reason: str) -> None:
        """An error for a request that the group never took."""
        submit, config = sequence.submit, self.config
        failed = Failed(
            config.group, submit.gateway, config.epoch, submit.request, submit.attempt, status, code, reason
        )
        self.effects.replies.append(failed)
        self.effects.note("request.failed", request=submit.request, status=status, code=code, reason=reason)
