"""One request's causal timeline, from the events of all the actors that it met. Pure.

The request's life is a walk through phases, each entered by one event; while the request is in prefill or decode,
the group's ticks say whether a step ran, the barrier was awaited, or neither. Every nanosecond from the first
event to the last belongs to exactly one category, so the categories add up to the end-to-end time.
"""

import bisect
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from edgemesh.inspect.facts import Category, Decode, Event, Span, Tick, Timeline

RUNNING: Final = "running"
"""The finish of a request whose end the trace does not hold."""

_ENTERS: Final[dict[tuple[str, str], Category]] = {
    ("gateway", "request.received"): Category.TOKENISE,
    ("gateway", "request.tokenised"): Category.SUBMIT,
    ("gateway", "request.submitted"): Category.ROUTE,
    ("router", "request.placed"): Category.PLACE,
    ("router", "request.rejected"): Category.PLACE,
    ("group", "request.queued"): Category.QUEUE,
    ("group", "request.admitted"): Category.PREFILL,
    ("group", "request.prefilled"): Category.SLOT,
    ("group", "request.joined"): Category.DECODE,
    ("group", "request.preempted"): Category.PREEMPTED,
    ("group", "request.finished"): Category.DELIVER,
    ("group", "request.failed"): Category.DELIVER,
    ("group", "request.aborted"): Category.DELIVER,
}
_ENDS: Final = {
    "request.finished": "finished",
    "request.failed": "failed",
    "request.aborted": "abort",
}
_LEAVES: Final = frozenset({"request.preempted", "request.finished", "request.failed", "request.aborted"})
"""How a group's event takes a row out of the batch."""

_WORST: Final = 3
_first: Final = operator.itemgetter(0)


class TickIndex:
    """Ticks, found by the request that they name or by the time that they touch."""

    def __init__(self, ticks: Iterable[Tick]) -> None:
        self._naming: dict[str, list[Tick]] = defaultdict(list)
        self._rows: dict[int, list[Tick]] = defaultdict(list)
        self.groups: set[int] = set()
        for tick in sorted(ticks, key=begun_at):
            self.groups.add(tick.group)
            for request in tick.requests:
                self._naming[request].append(tick)
            if tick.plane != "prefill" and not tick.idle:
                self._rows[tick.group].append(tick)
        self._starts = {group: [begun_at(tick) for tick in rows] for group, rows in self._rows.items()}
        # The latest end so far: nothing before the first place that reaches an instant touches it.
        self._ends = {
            group: list(itertools.accumulate((tick.done or _UNENDED for tick in rows), max))
            for group, rows in self._rows.items()
        }

    def naming(self, request: str) -> list[Tick]:
        """The ticks that compute a chunk of the request's prompt."""
        return self._naming.get(request, [])

    def decoding(self, group: int, start: int, end: int) -> list[Tick]:
        """The real ticks with decode rows of a group that touch ``[start, end)``."""
        rows = self._rows.get(group, [])
        first = bisect.bisect_right(self._ends.get(group, []), start)
        return rows[first : bisect.bisect_left(self._starts.get(group, []), end)]


_UNENDED: Final = 1 << 63


def begun_at(tick: Tick) -> int:
    """When the tick is first heard of."""
    return next((at for at in (tick.arrive, tick.plan, tick.done) if at is not None), 0)


def build(
    request: str,
    events: Iterable[Event],
    ticks: TickIndex,
    now: int | None = None,
    *,
    choices: int = 1,
    together: int | None = None,
) -> Timeline:
    """The timeline of one request.

    ``events`` are all that name it, ``ticks`` those of its groups; ``now`` is the end of the trace, to which
    a request that has not ended is charged. ``together`` is when the last of its ``choices`` ended in its group.
    Raises ``ValueError`` without events.
    """
    ordered = sorted(events, key=lambda event: event.at)
    if not ordered:
        message = f"no event names request {request!r}"
        raise ValueError(message)
    final = next((event for event in ordered if event.role == "gateway" and event.event in _ENDS), None)
    start = _start(ordered[0].at, final)
    end = final.at if final else max(ordered[-1].at, now or 0)
    phases = _phases(ordered, start, end)
    mine = ticks.naming(request)
    rows = _decode_ticks(ordered, ticks, end)
    ticked = bool(ticks.groups & {event.group for event in ordered})
    spans = tuple(_spans(_shared(phases, together), mine, rows, ticked=ticked))
    totals: Counter[Category] = Counter()
    for span in spans:
        totals[span.category] += span.ns
    return Timeline(
        request=request,
        group=_newest(ordered, "group"),
        finish=_finish(final),
        start=start,
        end=end,
        spans=spans,
        totals={category: totals[category] for category in Category if totals[category]},
        events=tuple(ordered),
        prefill=tuple(mine),
        decode=_summary(rows),
        prompt_tokens=_newest(ordered, "prompt_tokens"),
        cached_tokens=_newest(ordered, "cached_tokens"),
        output_tokens=_newest(ordered, "output_tokens"),
        ttft_ns=_newest(ordered, "ttft_ns") or None,
        sent_ns=next((_whole(event.detail.get("ns")) for event in ordered if event.event == "request.sent"), None),
        preemptions=sum(event.event == "request.preempted" for event in ordered),
        attempts=max(sum(event.event == "request.submitted" for event in ordered), 1),
        choices=choices,
    )


def _start(first: int, final: Event | None) -> int:
    """When the client's request came: before its first event, which needs the decoded body."""
    whole = _whole(final.detail.get("e2e_ns")) if final else None
    return min(first, final.at - whole) if final and whole is not None and whole >= 0 else first


def _finish(final: Event | None) -> str:
    if final is None:
        return RUNNING
    if final.event == "request.failed":
        code = final.detail.get("code") or final.detail.get("status")
        return f"failed ({code})" if code else "failed"
    return str(final.detail.get("finish") or _ENDS[final.event])


def _newest(events: Sequence[Event], field: str) -> int | None:
    for event in reversed(events):
        value = event.group if field == "group" else _whole(event.detail.get(field))
        if value is not None:
            return value
    return None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _phases(events: Sequence[Event], start: int, end: int) -> list[Span]:
    """The walk through the phases, clipped to the request's life."""
    phases: list[Span] = []
    category, since = Category.RECEIVE, start
    for event in events:
        entered = _ENTERS.get((event.role, event.event))
        if entered is None or entered is category:
            continue
        at = min(event.at, end)
        if at > since:
            phases.append(Span(category, since, at))
        category, since = entered, at
    if end > since:
        phases.append(Span(category, since, end))
    return phases


def _shared(phases: Iterable[Span], together: int | None) -> Iterator[Span]:
    """A choice that ended before the others waits for them."""
    for phase in phases:
        if phase.category is not Category.DELIVER or together is None or together <= phase.start:
            yield phase
            continue
        yield Span(Category.SIBLINGS, phase.start, min(together, phase.end))
        if together < phase.end:
            yield Span(Category.DELIVER, together, phase.end)


def _decode_ticks(events: Sequence[Event], ticks: TickIndex, end: int) -> list[Tick]:
    """The ticks in which the request had a row: from each join to the preemption or end that follows."""
    rows: dict[tuple[int, str, int], Tick] = {}
    joined: Event | None = None
    for event in events:
        if event.role != "group" or (event.event != "request.joined" and event.event not in _LEAVES):
            continue
        if joined:
            rows |= _rows(joined, event, min(event.at, end), ticks)
        joined = event if event.event == "request.joined" else None
    if joined:
        rows |= _rows(joined, None, end, ticks)
    return list(rows.values())


def _rows(joined: Event, left: Event | None, until: int, ticks: TickIndex) -> dict[tuple[int, str, int], Tick]:
    """The ticks of one stay in the batch. A step planned ahead of the token that ends the request is not counted."""
    if joined.group is None:
        return {}
    found = {}
    last = left.tick if left else None
    ends = left is not None and left.event == "request.finished"
    for tick in ticks.decoding(joined.group, joined.at, until):
        begun = tick.tick >= joined.tick if joined.tick is not None else begun_at(tick) >= joined.at
        ahead = tick.tick > last if last is not None else ends and (tick.done is None or tick.done > until)
        if tick.epoch == joined.epoch and begun and not ahead:
            found[tick.epoch, tick.plane, tick.tick] = tick
    return found


def _spans(phases: Iterable[Span], mine: Sequence[Tick], rows: Sequence[Tick], *, ticked: bool) -> Iterator[Span]:
    for phase in phases:
        if phase.category is Category.PREFILL and ticked:
            yield from _overlay(phase, mine, Category.PREFILL_WAIT, Category.PREFILL_BARRIER)
        elif phase.category is Category.DECODE and ticked:
            yield from _overlay(phase, rows, Category.DECODE_WAIT, Category.DECODE_BARRIER)
        else:
            yield phase


def _overlay(phase: Span, ticks: Sequence[Tick], waiting: Category, barrier: Category) -> Iterator[Span]:
    """Split a phase by its ticks: what runs counts before what is held, that before the barrier, that before a pace, that before waiting."""
    order = (phase.category, Category.HOLD, barrier, Category.PACE)
    active = [0] * len(order)
    category, since = waiting, phase.start
    for at, changes in itertools.groupby(_changes(phase, ticks), key=_first):
        for _, place, by in changes:
            active[place] += by
        current = next((each for each, ticking in zip(order, active, strict=True) if ticking), waiting)
        if current is not category:
            if at > since:
                yield Span(category, since, at)
            category, since = current, at
    if phase.end > since:
        yield Span(category, since, phase.end)


def _changes(phase: Span, ticks: Sequence[Tick]) -> list[tuple[int, int, int]]:
    """(when, which, +1 or -1) in order: ticks of the phase that begin or end to run (0), be held (1), await the barrier (2), be paced (3)."""
    changes = []
    for tick in ticks:
        covers = [(0, tick.plan, tick.done)] if tick.plan is not None else []
        if tick.arrive is not None:
            covers.append((1 if tick.hold else 2, tick.arrive, tick.plan))
        if tick.paced_ns and tick.made is not None:
            covers.append((3, tick.made - tick.paced_ns, tick.made))
        for place, start, end in covers:
            begin = max(start, phase.start)
            stop = phase.end if end is None else min(end, phase.end)
            if stop > begin:
                changes += [(begin, place, 1), (stop, place, -1)]
    changes.sort()
    return changes


def _length(tick: Tick) -> int:
    return tick.barrier_ns + tick.run_ns


def _summary(rows: Sequence[Tick]) -> Decode:
    done = [tick for tick in rows if tick.done is not None]
    worst = sorted(done, key=_length, reverse=True)[:_WORST]
    total = sum(_length(tick) for tick in done)
    return Decode(count=len(done), mean_ns=total // len(done) if done else 0, worst=tuple(worst))


def reason(tick: Tick) -> str:
    """In a few words: what most of the tick's time was spent on, and who was last."""
    return waited_for(tick) if tick.barrier_ns > tick.run_ns else ran(tick)


def waited_for(tick: Tick) -> str:
    """Why the tick was not released when its group had arrived."""
    if tick.hold:
        return f"held: {tick.hold}"
    if tick.last is not None and tick.last != tick.group:
        return f"waited for group {tick.last}"
    return "release on its way"


def ran(tick: Tick) -> str:
    """What the step itself was spent on."""
    slowest = tick.slowest
    if slowest is None:
        return "no rank reported the step"
    if slowest.own_ns * 2 < slowest.step_ns:
        return f"collectives; slowest {slowest.rank}"
    return f"slowest {slowest.rank}"
