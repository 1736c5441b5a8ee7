"""One request's timeline for a terminal: a header, a waterfall with bars, the sums, and the ticks that mattered."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from edgemesh.inspect.escape import plain
from edgemesh.inspect.facts import DECODING, Category, Span, Tick, Timeline
from edgemesh.inspect.terminal import STYLES, add, count, counted, duration, table, ticks_table
from edgemesh.inspect.timeline import ran, waited_for

MAX_ROWS: Final = 24
"""Rows of a waterfall; what is left out in the middle is counted."""

NOTED: Final = 84
"""Terminal width from which on the waterfall has room for a note beside each bar."""


class Row(msgspec.Struct, frozen=True):
    """One line of the waterfall: one span, or the many short spans of a decode phase."""

    label: str
    spans: tuple[Span, ...]
    note: str = ""

    @property
    def start(self) -> int:
        """Where its first span begins."""
        return self.spans[0].start

    @property
    def ns(self) -> int:
        """Its spans together, which follow each other without a gap."""
        return self.spans[-1].end - self.spans[0].start


def show(timeline: Timeline, width: int, *, blocks: bool = True) -> list[RenderableType]:
    """Everything about one request; ``blocks`` says whether the terminal can draw block characters."""
    parts: list[RenderableType] = [header(timeline), waterfall(timeline, width, blocks=blocks), sums(timeline)]
    if timeline.prefill:
        parts.append(prefill_table(timeline))
    if timeline.decode.count:
        title = (
            f"Decode: {counted(timeline.decode.count, 'tick')}, mean {duration(timeline.decode.mean_ns)}; the slowest"
        )
        parts.append(ticks_table(title, timeline.decode.worst, timeline.start))
    return parts


def header(timeline: Timeline) -> Text:
    """What the request was, and how it ended."""
    text = Text(plain(timeline.request), style="bold")
    place = "not placed" if timeline.group is None else f"group {timeline.group}"
    text.append(f"  {place}, {plain(timeline.finish)}\n", style="not bold")
    cached = f" ({count(timeline.cached_tokens)} cached)" if timeline.cached_tokens else ""
    facts = [
        f"{count(timeline.prompt_tokens)} prompt tokens{cached}",
        f"{count(timeline.output_tokens)} output tokens",
        f"first token after {duration(timeline.ttft_ns)}",
        f"end to end {duration(timeline.e2e_ns)}",
    ]
    if timeline.sent_ns is not None:
        facts.append(f"detokenise and socket {duration(timeline.sent_ns)} of it, alongside")
    if timeline.choices > 1:
        facts.append(f"one of {timeline.choices} choices")
    if timeline.preemptions:
        facts.append(f"preempted {timeline.preemptions}x")
    if timeline.attempts > 1:
        facts.append(f"submitted {timeline.attempts}x")
    facts += grammar(timeline)
    return text.append(", ".join(facts), style="not bold dim")


def grammar(timeline: Timeline) -> list[str]:
    """What restricting the output cost, where it was; the waits are part of those for prefill and decode steps."""
    found = {each.event: each.detail for each in timeline.events if each.event in {"request.grammar", "request.masked"}}
    facts = []
    if first := found.get("request.grammar"):
        facts.append(f"grammar compiled in {_took(first, 'compile_ns')}, known after {_took(first, 'waited_ns')}")
    if whole := found.get("request.masked"):
        facts.append(f"{whole.get('masks')} masks in {_took(whole, 'mask_ns')}, waited for {_took(whole, 'waited_ns')}")
    return facts


def _took(detail: Mapping[str, object], field: str) -> str:
    value = detail.get(field)
    return duration(value if isinstance(value, int) else None)


def waterfall(timeline: Timeline, width: int, *, blocks: bool) -> Table:
    """Each phase with its bar, on one time axis."""
    noted = width >= NOTED
    made = table("Waterfall", "phase", "at", "took", "", *(["with"] if noted else []), left=("phase", "", "with"))
    made.columns[0].min_width = 15
    bar_width = max(min(width - 41 - (36 if noted else 0), 72), 8)
    for row in shortened(rows(timeline), MAX_ROWS):
        if row is None:
            add(made, "(shorter ones)", "", "", "", *([""] if noted else []))
            continue
        style = STYLES[row.spans[0].category]
        drawn = bar(row.spans, timeline.start, timeline.end, bar_width, blocks=blocks)
        at = duration(row.start - timeline.start)
        note = [row.note] if noted else []
        add(made, Text(plain(row.label), style=style), at, duration(row.ns), drawn, *note)
    return made


def rows(timeline: Timeline) -> list[Row]:
    """The spans as lines; each run of decode spans is one line."""
    made: list[Row] = []
    for decoding, together in itertools.groupby(timeline.spans, key=lambda span: span.category in DECODING):
        spans = tuple(together)
        if decoding:
            made.append(Row("decode", spans, _decode_note(timeline, spans)))
        else:
            made += [Row(span.category, (span,), _note(span, timeline)) for span in spans]
    return made


def _decode_note(timeline: Timeline, spans: Sequence[Span]) -> str:
    whole = sum(span.ns for span in spans) or 1
    held = sum(span.ns for span in spans if span.category is Category.PACE)
    waited = sum(span.ns for span in spans if span.category is not Category.DECODE) - held
    shares = (
        f"{waited / whole:.0%} waiting, {held / whole:.0%} for prompts"
        if held
        else f"{waited / whole:.0%} of it waiting"
    )
    return f"{counted(timeline.decode.count, 'tick')}, {shares}"


def _note(span: Span, timeline: Timeline) -> str:
    match span.category:
        case Category.ROUTE:
            return _detail(timeline, "request.placed", "why")
        case Category.QUEUE:
            waiting = _detail(timeline, "request.queued", "waiting")
            return f"{waiting} in the queue" if waiting else ""
        case Category.PREFILL | Category.PREFILL_BARRIER | Category.HOLD:
            return _ticks_note(span, timeline.prefill)
        case _:
            return ""


def _detail(timeline: Timeline, event: str, field: str) -> str:
    found = next((each.detail.get(field) for each in timeline.events if each.event == event), None)
    return "" if found is None else str(found)


def _ticks_note(span: Span, ticks: Sequence[Tick]) -> str:
    running = span.category is Category.PREFILL
    within = []
    for tick in ticks:
        start, end = (tick.plan, tick.done) if running else (tick.arrive, tick.plan)
        if start is not None and start < span.end and (end is None or end > span.start):
            within.append(tick)
    if not within:
        return ""
    if len(within) > 1:
        return f"{len(within)} ticks, {within[0].tick} to {within[-1].tick}"
    return f"tick {within[0].tick}: {ran(within[0]) if running else waited_for(within[0])}"


def shortened(made: list[Row], most: int) -> Iterable[Row | None]:
    """At most so many rows: the longest stay, in order; None stands for those left out."""
    if len(made) <= most:
        return made
    keep = set(sorted(range(len(made)), key=lambda place: -made[place].ns)[:most])
    places = [place for place in range(len(made)) if place in keep or place - 1 in keep]
    return [made[place] if place in keep else None for place in places]


def bar(spans: Sequence[Span], start: int, end: int, width: int, *, blocks: bool) -> Text:
    """The spans on an axis of ``width`` cells from ``start`` to ``end``: each cell has the colour of most of it."""
    whole = max(end - start, 1)
    text = Text()
    first = 0
    for cell in range(width):
        low, high = start + whole * cell // width, start + whole * (cell + 1) // width
        while first < len(spans) and spans[first].end <= low:
            first += 1
        covered: list[tuple[int, Span]] = []
        for span in itertools.islice(spans, first, None):
            if span.start >= high:
                break
            covered.append((min(span.end, high) - max(span.start, low), span))
        if not covered:
            text.append(" ")
            continue
        style = STYLES[max(covered, key=lambda each: each[0])[1].category]
        full = sum(part for part, _ in covered) * 2 >= high - low
        text.append(("\u2588" if full else "\u258f") if blocks else ("#" if full else "|"), style=style)
    return text


def sums(timeline: Timeline) -> Table:
    """Each category's time; they add up to the end-to-end time."""
    made = table("Where the time went", "category", "time", "share", left=("category",))
    whole = timeline.e2e_ns or 1
    for category, ns in sorted(timeline.totals.items(), key=lambda item: -item[1]):
        add(made, Text(category, style=STYLES[category]), duration(ns), f"{ns / whole:.1%}")
    made.add_section()
    add(made, "end to end", duration(timeline.e2e_ns), "100.0%" if timeline.e2e_ns else "-")
    return made


def prefill_table(timeline: Timeline) -> Table:
    """The ticks that computed its prompt, who shared them, and who was slowest."""
    ticks: Sequence[Tick] = timeline.prefill
    title = f"Prefill: {counted(len(ticks), 'tick')}"
    if len(ticks) > MAX_ROWS:
        title += f", the slowest {MAX_ROWS}"
        slowest = sorted(ticks, key=lambda tick: -(tick.run_ns + tick.barrier_ns))[:MAX_ROWS]
        ticks = sorted(slowest, key=lambda tick: tick.plan or 0)
    made = table(
        title, "tick", "at", "tokens", "barrier", "step", "slowest", "shared with", left=("slowest", "shared with")
    )
    for tick in ticks:
        others = [plain(request) for request in tick.requests if request != timeline.request]
        shared = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        at = duration(max((tick.plan or timeline.start) - timeline.start, 0))
        slowest_rank = f"{tick.slowest.rank} ({duration(tick.slowest.own_ns)})" if tick.slowest else "-"
        times = duration(tick.barrier_ns), duration(tick.run_ns)
        add(made, str(tick.tick), at, count(tick.tokens), *times, slowest_rank, shared or "alone")
    return made
