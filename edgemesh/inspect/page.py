"""One request's timeline as a page for a browser: one file, no script, nothing fetched."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from edgemesh.inspect.escape import plain
from edgemesh.inspect.facts import Category, Span, Tick, Timeline
from edgemesh.inspect.terminal import count, counted, duration
from edgemesh.inspect.timeline import reason
from edgemesh.inspect.waterfall import Row, rows, shortened

MAX_BOXES: Final = 4000
"""Boxes of one lane; the longest are drawn, which on a screen hides none of the others that could be seen."""

MAX_ROWS: Final = 100
MAX_NOTE: Final = 80
"""Characters beside a bar; the bar itself tells all of it to a pointer."""

_LEFT, _WIDTH, _ROW, _TOP = 150, 1000, 24, 34
_COLOURS: Final[dict[Category, str]] = {
    Category.RECEIVE: "#56b4e9",
    Category.TOKENISE: "#56b4e9",
    Category.SUBMIT: "#56b4e9",
    Category.ROUTE: "#0072b2",
    Category.PLACE: "#0072b2",
    Category.QUEUE: "#e6c229",
    Category.PREFILL_WAIT: "#e6c229",
    Category.PREFILL_BARRIER: "#d55e00",
    Category.HOLD: "#d55e00",
    Category.PREFILL: "#aa4499",
    Category.SLOT: "#e6c229",
    Category.DECODE_WAIT: "#e6c229",
    Category.PACE: "#e6c229",
    Category.DECODE_BARRIER: "#d55e00",
    Category.DECODE: "#009e73",
    Category.PREEMPTED: "#cc3311",
    Category.SIBLINGS: "#999999",
    Category.DELIVER: "#56b4e9",
}
"""As in the terminal, in hues that colour-blind readers tell apart (Okabe and Ito)."""

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1a1a1a; --dim: #666; --line: #ddd; --back: #fff }
@media (prefers-color-scheme: dark) { :root { --ink: #eee; --dim: #aaa; --line: #3a3a3a; --back: #161616 } }
body { font: 14px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 2rem auto;
  max-width: 1240px; padding: 0 1rem }
h1 { font-size: 1.2rem; margin: 0; overflow-wrap: anywhere } h2 { font-size: 1rem; margin: 2rem 0 .5rem }
p { color: var(--dim); margin: .3rem 0 1rem } svg { width: 100%; height: auto } svg text { fill: var(--ink); font-size: 12px }
svg .dim { fill: var(--dim) } svg line { stroke: var(--line) } rect:hover { opacity: .7 }
table { border-collapse: collapse } th, td { text-align: right; padding: .15rem .8rem; border-bottom: 1px solid var(--line) }
th { color: var(--dim); font-weight: normal } .text { text-align: left; overflow-wrap: anywhere }
i { display: inline-block; width: .8em; height: .8em; margin-right: .5em }
"""


def render(timeline: Timeline) -> str:
    """The whole page."""
    name = _safe(timeline.request)
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{name}</h1><p>{_facts(timeline)}</p>",
        _drawing(timeline),
        "<h2>Where the time went</h2>",
        _sums(timeline),
    ]
    if timeline.prefill:
        parts += [f"<h2>Prefill: {counted(len(timeline.prefill), 'tick')}</h2>", _ticks(timeline, timeline.prefill)]
    if timeline.decode.count:
        title = (
            f"Decode: {counted(timeline.decode.count, 'tick')}, mean {duration(timeline.decode.mean_ns)}; the slowest"
        )
        parts += [f"<h2>{title}</h2>", _ticks(timeline, timeline.decode.worst)]
    return "\n".join([*parts, "</body></html>\n"])


def _safe(value: object) -> str:
    return escape(plain(value))


def _facts(timeline: Timeline) -> str:
    place = "not placed" if timeline.group is None else f"group {timeline.group}"
    facts = [
        place,
        timeline.finish,
        f"{count(timeline.prompt_tokens)} prompt tokens ({count(timeline.cached_tokens)} cached)",
        f"{count(timeline.output_tokens)} output tokens",
        f"first token after {duration(timeline.ttft_ns)}",
        f"end to end {duration(timeline.e2e_ns)}",
    ]
    return _safe(", ".join(facts))


def _drawing(timeline: Timeline) -> str:
    lanes = [Row("everything", timeline.spans)] if timeline.spans else []
    lanes += [row or Row("(shorter ones)", ()) for row in shortened(rows(timeline), MAX_ROWS)]
    height = _TOP + _ROW * len(lanes) + 8
    drawn = [
        f'<svg viewBox="0 0 {_LEFT + _WIDTH + 60} {height}" role="img" aria-label="timeline">',
        *_axis(timeline, height),
    ]
    for place, lane in enumerate(lanes):
        top = _TOP + _ROW * place
        drawn.append(f'<text x="0" y="{top + 15}">{_safe(lane.label)}</text>')
        drawn += _boxes(timeline, lane.spans, top, lane.note)
        if place and lane.spans:
            drawn.append(_label(timeline, lane, top))
    return "\n".join([*drawn, "</svg>"])


def _axis(timeline: Timeline, height: int) -> Iterable[str]:
    whole = max(timeline.e2e_ns, 1)
    step = 10 ** math.floor(math.log10(whole))
    step = next(each for each in (step // 10, step // 5, step // 2, step) if not each or whole / each <= 10) or whole
    for at in range(0, whole + 1, step):
        x = _LEFT + _WIDTH * at / whole
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="20" y2="{height}"/>'
        yield f'<text class="dim" x="{x:.1f}" y="14" text-anchor="middle">{duration(at)}</text>'


def _boxes(timeline: Timeline, spans: Sequence[Span], top: int, note: str) -> Iterable[str]:
    whole = max(timeline.e2e_ns, 1)
    longest = sorted(spans, key=lambda span: -span.ns)[:MAX_BOXES]
    for span in sorted(longest, key=lambda span: span.start):
        x, width = _LEFT + _WIDTH * (span.start - timeline.start) / whole, max(_WIDTH * span.ns / whole, 0.6)
        told = f"{span.category}: {duration(span.ns)} from {duration(span.start - timeline.start)}"
        about = _safe(f"{told}. {note}" if note else told)
        place = f'x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_ROW - 6}"'
        yield f'<rect {place} fill="{_COLOURS[span.category]}"><title>{about}</title></rect>'


def _label(timeline: Timeline, lane: Row, top: int) -> str:
    """The lane's length and note, on the side of its boxes that has room."""
    whole = max(timeline.e2e_ns, 1)
    start, end = lane.start - timeline.start, lane.start - timeline.start + lane.ns
    after = _WIDTH * (whole - end) > _WIDTH * start
    x = _LEFT + _WIDTH * (end if after else start) / whole + (6 if after else -6)
    note = lane.note if len(lane.note) <= MAX_NOTE else lane.note[: MAX_NOTE - 1] + "\u2026"
    told = f"{duration(lane.ns)}: {note}" if note else duration(lane.ns)
    return (
        f'<text class="dim" x="{x:.1f}" y="{top + 14}" text-anchor="{"start" if after else "end"}">{_safe(told)}</text>'
    )


def _sums(timeline: Timeline) -> str:
    whole = timeline.e2e_ns or 1
    lines = [
        f'<tr><td class="text"><i style="background:{_COLOURS[category]}"></i>{category}</td>'
        f"<td>{duration(ns)}</td><td>{ns / whole:.1%}</td></tr>"
        for category, ns in sorted(timeline.totals.items(), key=lambda item: -item[1])
    ]
    total = f'<tr><td class="text">end to end</td><td>{duration(timeline.e2e_ns)}</td><td></td></tr>'
    return "<table>" + "".join([*lines, total]) + "</table>"


def _ticks(timeline: Timeline, ticks: Sequence[Tick]) -> str:
    lines = []
    for tick in ticks:
        others = ", ".join(request for request in tick.requests if request != timeline.request)
        at = max((tick.plan or tick.arrive or timeline.start) - timeline.start, 0)
        figures = str(tick.tick), duration(at), count(tick.tokens), duration(tick.barrier_ns), duration(tick.run_ns)
        cells = "".join(f"<td>{figure}</td>" for figure in figures)
        texts = "".join(f'<td class="text">{_safe(text)}</td>' for text in (reason(tick), others))
        lines.append(f"<tr>{cells}{texts}</tr>")
    heads = "".join(f"<th>{head}</th>" for head in ("tick", "at", "tokens", "barrier", "step"))
    return f'<table><tr>{heads}<th class="text">why</th><th class="text">shared with</th></tr>{"".join(lines)}</table>'
