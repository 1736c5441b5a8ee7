"""What runs in a step: prompt chunks and decode rows."""

from array import array
from heapq import heappop
from itertools import chain
from typing import Final

from edgemesh.decide.admission import admit, grow, prefilling
from edgemesh.decide.grammar import packed
from edgemesh.decide.request import Event, Sequence
from edgemesh.decide.scoring import MAX_SCORED, cut, scoring
from edgemesh.decide.state import GroupState
from edgemesh.decide.steps import Run, Step
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.ids import Plane
from edgemesh.wire.messages import Chunk, Decode, Grow, Join, Prefill, Shape

MAX_CHUNKS: Final = 64
"""Prompts that may share a step."""

MAX_JOINS: Final = 512
"""Rows that may enter the batch in a step: each may bring its history in a frame of its own, and a message has a bound on those."""

MAX_MASK_BYTES: Final = 16 << 20
"""Masks of one kind (prompts, rows, rows that join) in a step: they share a frame, which has a bound; the others wait for the next."""

PRESSED_CHUNKS: Final = 4
"""Full chunks of prompts that wait, from which decode keeps its whole pace."""

MIN_CHUNK: Final = 16
"""Prompt tokens that a mixed step offers at least, however many rows decode beside them."""


def plan(state: GroupState, plane: Plane, now_ns: int) -> Step | None:
    """Commit what this plane runs next, or nothing."""
    if not (state.prefilling or state.queue if plane is Plane.PREFILL else state.admitted or state.queue):
        return None
    step = Step(Shape(), made_ns=now_ns)
    rows = longest = 0
    if plane is not Plane.PREFILL:
        rows, longest = _decode(state, step, now_ns)
    computed = 0
    if plane is not Plane.DECODE:
        admit(state, now_ns)
        budget = max(state.config.chunk_tokens - rows, MIN_CHUNK)
        computed = _prefill(state, step, budget, now_ns)
        longest = max([longest, *(run.upto for run in step.chunks)])
    if not rows + computed:
        return None
    graph = state.config.graphs and not computed
    step.shape = Shape(rows + computed, rows + len(step.chunks), longest, graph)
    return step


def pace(state: GroupState, now_ns: int) -> int | None:
    """Until when decode leaves the cards to prompts that wait for them (a time of the group's clock), or None: its next step may begin.

    The more prompt tokens wait, the longer, up to ``pace_ns`` from one step's end to the next one's, if that takes as long as steps took
    of late. Rows then gather for fewer and fuller steps, which take less of the cards than many with few; where hardly anything waits,
    nothing is held. A group that holds its step does not arrive for its tick: peers of its coupled set wait, and decode beside it.
    """
    config, pipeline = state.config, state.pipelines.get(Plane.DECODE)
    if not config.pace_ns or pipeline is None or not pipeline.open:
        return None
    if not any(row.drawable and row.credited for row in chain(state.rows.values(), state.ready)):
        return None
    waiting = sum(_computable(state, sequence) for sequence in prefilling(state))
    pressed = min(waiting / (PRESSED_CHUNKS * config.chunk_tokens), 1.0)
    target = int(config.pace_ns * pressed)
    if target <= pipeline.typical_ns:
        return None
    until = pipeline.done_ns + target - pipeline.typical_ns if pipeline.quiet else pipeline.worked_ns + target
    return until if now_ns < until else None


def _computable(state: GroupState, sequence: Sequence) -> int:
    """Prompt tokens that prefill steps could compute: the last chunk under a grammar waits for the grammar's word."""
    left = sequence.ahead
    return left if sequence.drawable or sequence.prompt_only or left > state.config.chunk_tokens else 0


def _prefill(state: GroupState, step: Step, budget: int, now_ns: int) -> int:
    """Chunks of the admitted prompts, shortest remaining first, so that a short prompt is not stuck behind a long one.

    A prompt that is older than the ageing bound goes before all younger ones.
    """

    def urgency(sequence: Sequence) -> tuple[int, int, int]:
        if now_ns - sequence.arrived_ns > state.config.age_ns:
            return 0, sequence.order, 0
        return 1, sequence.target - sequence.planned, sequence.order

    chunks: list[Chunk] = []
    masks: dict[int, bytes] = {}
    masked = 0
    tokens = array("i")
    scores = MAX_SCORED
    for sequence in sorted(prefilling(state), key=urgency):
        room = budget - len(tokens)
        if room <= 0 or len(chunks) >= MAX_CHUNKS:
            break
        start = sequence.planned
        upto = cut(sequence, min(sequence.target, start + room), scores)
        if upto == start:
            continue  # it waits for a step that scores fewer positions of others
        final = upto == sequence.target and not sequence.prompt_only
        masked += len(sequence.mask) if final else 0
        if final and (not sequence.drawable or masked > MAX_MASK_BYTES):
            continue
        sampling = sequence.submit.sampling
        history = TokenArray(sequence.tokens.tobytes()) if final and sampling.needs_history else TokenArray()
        wanted = scoring(sequence, upto)
        scores -= len(wanted.targets) if wanted else 0
        chunks.append(
            Chunk(
                sequence.submit.request,
                start,
                upto - start,
                tuple(sequence.pages[: state.pages_for(upto)]),
                final,
                sampling if final else None,
                sequence.out,
                history,
                wanted,
            )
        )
        if final and sequence.mask:
            masks[len(chunks) - 1] = sequence.mask
        tokens.extend(sequence.tokens[start:upto])
        sequence.planned = upto
        step.chunks.append(Run(sequence, sequence.life, upto, final, scoring=wanted))
    if chunks:
        step.prefill = Prefill(tuple(chunks), TokenArray(tokens), tuple(masks), packed(masks.values()))
    return len(tokens)


def _decode(state: GroupState, step: Step, now_ns: int) -> tuple[int, int]:
    """One step for every row that may take it: (rows that run, longest context)."""
    sits, grown = _room(state, now_ns)
    joins = _join(state, now_ns)
    longest = 0
    masks: dict[int, bytes] = {}
    for slot, sequence in state.rows.items():
        if slot in sits:
            continue
        if sequence.mask:
            masks[slot] = sequence.mask
        step.rows.append(Run(sequence, sequence.life, slot=slot))
        sequence.flying += 1
        longest = max(longest, len(sequence.tokens) + sequence.flying)
    if not step.rows:
        return 0, 0
    grows = tuple(Grow(each.slot, tuple(each.pages[had:])) for each, had in grown.items() if each.slot >= 0)
    leaves, sitting = tuple(state.leaves), tuple(sorted(sits))
    step.decode = Decode(leaves, tuple(map(_entry, joins)), grows, sitting, tuple(masks), packed(masks.values()))
    state.leaves = []
    for run in step.rows:
        if run.sequence.left <= run.sequence.flying:
            state.leave(run.sequence)
    return len(step.rows), longest


def _room(state: GroupState, now_ns: int) -> tuple[set[int], dict[Sequence, int]]:
    """Pages for the next position of every row: (slots that must sit out, rows that grew and the pages they had)."""
    grown: dict[Sequence, int] = {}
    short: list[Sequence] = []
    masked = 0
    for sequence in list(state.rows.values()):
        if sequence.slot < 0:
            continue  # preempted for one before it
        masked += len(sequence.mask)
        if not sequence.drawable or masked > MAX_MASK_BYTES:
            short.append(sequence)
            continue
        if not sequence.credited:
            state.paused.setdefault(sequence)
            sequence.paused_ns = sequence.paused_ns or now_ns
            short.append(sequence)
            continue
        had = len(sequence.pages)
        if not grow(state, sequence, len(sequence.tokens) - 1 + sequence.flying):
            short.append(sequence)
        elif len(sequence.pages) > had:
            grown[sequence] = had
    return {each.slot for each in short if each.slot >= 0}, grown


def _join(state: GroupState, now_ns: int) -> list[Sequence]:
    """Rows that enter the batch; the page of their next position is theirs since their admission."""
    joins: list[Sequence] = []
    masked = 0
    for sequence in list(state.ready):
        if not state.free_slots or len(joins) >= MAX_JOINS:
            break
        masked += len(sequence.mask)
        if not sequence.drawable or masked > MAX_MASK_BYTES:
            continue
        if not sequence.credited:
            state.paused.setdefault(sequence)
            sequence.paused_ns = sequence.paused_ns or now_ns
            continue
        del state.ready[sequence]
        sequence.move(Event.JOINED)
        sequence.slot = heappop(state.free_slots)
        state.rows[sequence.slot] = sequence
        joins.append(sequence)
        state.effects.note("request.joined", request=sequence.submit.request, slot=sequence.slot)
    return joins


def _entry(sequence: Sequence) -> Join:
    """The row as its ranks get to know it."""
    sampling = sequence.submit.sampling
    history = TokenArray(sequence.tokens.tobytes()) if sampling.needs_history else TokenArray()
    position = len(sequence.tokens) - 1
    return Join(
        sequence.slot,
        sequence.submit.request,
        sequence.tokens[position],
        position,
        tuple(sequence.pages),
        sampling,
        sequence.out,
        history,
    )
