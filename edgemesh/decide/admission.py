"""Who gets pages: admission, and its reverse, preemption.

Prefill admits only what decode can carry: a slot for each admitted request, and after the new one's pages there must be room for
every running row to grow. Otherwise prefill would fill the pool, decode would preempt, and both would look busy while
nothing is finished. A preempted request comes back only when all that it may ever need fits, so none is preempted for ever.
One that waits for its own client makes way for those that wait for pages or a slot.
"""

from edgemesh.decide.request import Event, Sequence, State
from edgemesh.decide.scoring import reach
from edgemesh.decide.state import Blocked, GroupState


def admit(state: GroupState, now_ns: int) -> None:
    """Admit from the queue, in its order, as long as the next one fits."""
    reserved: int | None = None
    while len(state.admitted) < state.config.slots:
        sequence, blocked = state.queue.peek(now_ns), state.blocked
        free, admitted = state.pages.free, len(state.admitted)
        if sequence is None:
            return
        if blocked is not None and blocked.sequence is not sequence:
            blocked = None
        if blocked is not None and (blocked.free, blocked.admitted) == (free, admitted):
            return  # nothing changed since it did not fit
        reserved = growth(state) if reserved is None else reserved
        room = free - reserved + state.prefix.inserted
        if blocked is not None and room < blocked.room:
            # Not enough changed: its prefix, which may be long, is not looked up again.
            state.blocked = Blocked(sequence, free, admitted, blocked.room)
            return
        lacking = _fit(state, sequence, reserved)
        if lacking:
            state.blocked = Blocked(sequence, free, admitted, room + lacking)
            return
        state.blocked = None
        state.queue.remove(sequence)
        sequence.move(Event.ADMITTED)
        state.admissions += 1
        sequence.admission = state.admissions
        state.admitted[sequence] = None
        state.prefilling[sequence] = None
        reserved += _reserve(state, sequence)
        state.effects.note(
            "request.admitted",
            request=sequence.submit.request,
            cached_tokens=sequence.planned,
            pages=len(sequence.pages),
        )


def _fit(state: GroupState, sequence: Sequence, reserved: int) -> int:
    """Give the sequence its pages, those of a known prefix first, and leave ``reserved`` ones.

    Or leave all as it was: how many pages are lacking.
    """
    tokens = len(sequence.tokens)
    hit = state.prefix.match(sequence.cursor, sequence.tokens, reach(sequence))
    wanted = sequence.whole if sequence.life else min(tokens + 1, sequence.whole)
    missing = state.pages_for(wanted) - len(hit)
    lacking = missing + reserved - state.pages.free
    if lacking > 0:
        state.pages.drop(hit)
        return lacking
    sequence.pages = [*hit, *state.pages.take(missing)]
    sequence.planned = sequence.written = len(hit) * state.config.page_tokens
    sequence.target = tokens
    if not sequence.life:
        sequence.cached = sequence.planned
    return 0


def parkable(state: GroupState) -> list[Sequence]:
    """Paused requests that hold what the next one in the queue waits for; none while pages are on their way back."""
    full = len(state.admitted) >= state.config.slots
    blocked = state.blocked
    short = blocked is not None and (blocked.free, blocked.admitted) == (state.pages.free, len(state.admitted))
    if state.wasted or not state.queue or not (full or short):
        return []
    return [each for each in state.paused if each.state is not State.WAITING]


def make_way(state: GroupState, now_ns: int) -> None:
    """Preempt the request whose client has not read for longest, if it is long enough and someone waits for its place."""
    longest = min(parkable(state), key=lambda each: each.paused_ns, default=None)
    if longest is not None and now_ns - longest.paused_ns >= state.config.park_ns:
        state.preempt(longest)


def growth(state: GroupState) -> int:
    """Pages that the admitted requests may still ask for within their reserve."""
    return sum(_reserve(state, sequence) for sequence in state.admitted)


def _reserve(state: GroupState, sequence: Sequence) -> int:
    """Pages that it may still ask for within its reserve."""
    bound = state.config.reserve_tokens
    wanted = state.pages_for(min(len(sequence.tokens) + min(bound, sequence.left), sequence.whole))
    return max(0, wanted - len(sequence.pages))


def grow(state: GroupState, sequence: Sequence, position: int) -> bool:
    """Make room for the KV of ``position``; the youngest gives way. False: not in this step.

    The oldest running request is never preempted, so at least one always reaches its end.
    """
    if position < len(sequence.pages) * state.config.page_tokens:
        return True
    while not state.pages.free:
        youngest = next(reversed(state.admitted))
        if state.wasted or youngest is next(iter(state.admitted)):
            return False
        state.preempt(youngest)
        if youngest is sequence:
            return False
    sequence.pages.extend(state.pages.take(1))
    return True


def prefilling(state: GroupState) -> list[Sequence]:
    """Admitted requests with prompt tokens that no step computes yet."""
    return [each for each in state.prefilling if each.planned < each.target]
