"""Two loads side by side: a table of ratios, and the distributions of their latencies as a picture; pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final
from xml.sax.saxutils import escape

from msgspec import Struct

from edgemesh.bench.report import Report
from edgemesh.bench.statistics import Spread, percentile

INK: Final = "#1f2933"
FAINT: Final = "#9aa5b1"
COLOURS: Final = ("#2f6fde", "#e07b39")
"""Of the first and the second load."""

PANEL_W: Final = 400
PANEL_H: Final = 240
GAP: Final = 56
TOP: Final = 92
POINTS: Final = 200
"""Steps of a drawn distribution: more would not be seen."""

TAIL: Final = 0.999
"""The axis ends here: one outlier must not press all others into a corner."""


class Row(Struct, frozen=True):
    """One figure of both loads; ``ratio`` is the second over the first (NaN where there is none)."""

    name: str
    first: float
    second: float
    more_is_better: bool = False

    @property
    def ratio(self) -> float:
        """Second over first."""
        return self.second / self.first if self.first else math.nan


def rows(first: Report, second: Report) -> list[Row]:
    """Every figure that engines are compared by, throughput first."""
    one, two = first.summary, second.summary
    found = [
        Row("duration s", one.duration_s, two.duration_s),
        Row("requests/s", one.requests_per_s, two.requests_per_s, more_is_better=True),
        Row("total tokens/s", one.total_tokens_per_s, two.total_tokens_per_s, more_is_better=True),
        Row("output tokens/s", one.output_tokens_per_s, two.output_tokens_per_s, more_is_better=True),
    ]
    for name, one_s, two_s in (
        ("e2e", one.e2e_ms, two.e2e_ms),
        ("TTFT", one.ttft_ms, two.ttft_ms),
        ("ITL", one.itl_ms, two.itl_ms),
        ("TPOT", one.tpot_ms, two.tpot_ms),
    ):
        found += [Row(f"{name} {which} ms", _of(one_s, which), _of(two_s, which)) for which in Spread.__struct_fields__]
    return found


def differences(first: Report, second: Report) -> list[str]:
    """What the two loads do not have in common, and what makes a comparison doubtful."""
    found = []
    for part in ("shape", "load"):
        one, two = getattr(first, part), getattr(second, part)
        found += [
            f"{field}: {getattr(one, field)} and {getattr(two, field)}"
            for field in one.__struct_fields__
            if field != "model" and getattr(one, field) != getattr(two, field)
        ]
    for name, each in (("first", first), ("second", second)):
        if each.summary.failed:
            found.append(f"{each.summary.failed} requests of the {name} failed: {each.errors[0]}")
        if each.summary.cached_tokens:
            found.append(f"{each.summary.cached_tokens} prompt tokens of the {name} came from a cache")
    return found


def picture(first: Report, second: Report, names: tuple[str, str]) -> str:
    """The latencies' cumulative distributions as an SVG document: TTFT, ITL, TPOT and e2e, both loads in each."""
    panels = (
        ("time to first token", first.ttft_ms, second.ttft_ms),
        ("between tokens (ITL)", first.itl_ms, second.itl_ms),
        ("per output token (TPOT)", first.tpot_ms, second.tpot_ms),
        ("end to end", first.e2e_ms, second.e2e_ms),
    )
    width, height = 3 * GAP + 2 * PANEL_W, TOP + 2 * (PANEL_H + GAP)
    look = (
        f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}" role="img" aria-label="latency distributions"'
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" {look}>',
        f'<rect width="{width}" height="{height}" rx="12" fill="#ffffff"/>',
        f'<text x="{GAP}" y="34" font-size="18" font-weight="600">Latencies: share of all that took at most so long</text>',
    ]
    for place, (name, colour) in enumerate(zip(names, COLOURS, strict=True)):
        x = GAP + place * (PANEL_W + GAP)
        parts.append(f'<line x1="{x}" y1="56" x2="{x + 26}" y2="56" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 34}" y="60">{escape(name)}</text>')
    for place, (title, one, two) in enumerate(panels):
        x, y = GAP + place % 2 * (PANEL_W + GAP), TOP + place // 2 * (PANEL_H + GAP)
        parts += _panel(x, y, title, (sorted(one), sorted(two)))
    return "\n".join([*parts, "</svg>\n"])


def _panel(x: float, y: float, title: str, both: tuple[Sequence[float], Sequence[float]]) -> list[str]:
    longest = max((percentile(each, TAIL) for each in both if each), default=0.0) or 1.0
    parts = [f'<text x="{x}" y="{y - 8}" font-weight="600">{escape(title)}</text>']
    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
        level = y + PANEL_H * (1 - share)
        parts.append(
            f'<line x1="{x}" y1="{level:g}" x2="{x + PANEL_W}" y2="{level:g}" stroke="{FAINT}" opacity="0.4"/>'
        )
        if share != 0.99:  # its label would lie on the one of 1.0
            parts.append(f'<text x="{x - 6}" y="{level + 4:g}" text-anchor="end" fill="{FAINT}">{share:.0%}</text>')
    for part in range(5):
        at = x + PANEL_W * part / 4
        parts.append(
            f'<text x="{at:g}" y="{y + PANEL_H + 16}" text-anchor="middle" fill="{FAINT}">{_short(longest * part / 4)}</text>'
        )
    for ordered, colour in zip(both, COLOURS, strict=True):
        if ordered:
            points = " ".join(f"{px:.1f},{py:.1f}" for px, py in _curve(ordered, longest, x, y))
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return parts


def _curve(ordered: Sequence[float], longest: float, x: float, y: float) -> list[tuple[float, float]]:
    steps = [step / POINTS for step in range(POINTS + 1)]
    return [
        (x + PANEL_W * min(1.0, percentile(ordered, share) / longest), y + PANEL_H * (1 - share)) for share in steps
    ]


def _short(milliseconds: float) -> str:
    return f"{milliseconds / 1000:.3g} s" if milliseconds >= 1000 else f"{milliseconds:.3g} ms"


def _of(spread: Spread, which: str) -> float:
    value: float = getattr(spread, which)
    return value
