"""What the trace commands print: rich renderables, made of plain values.

Ids and reasons come from clients and from files: every text is shown as it is, never as markup, and characters that
could drive a terminal are written as escapes.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from edgemesh.inspect.blame import Blame
from edgemesh.inspect.escape import plain
from edgemesh.inspect.facts import DECODING, Category, Tick, Timeline
from edgemesh.inspect.queries import PlaneStats, parent
from edgemesh.inspect.sql import Answer
from edgemesh.inspect.timeline import RUNNING, reason

STYLES: Final[dict[Category, str]] = {
    Category.RECEIVE: "cyan",
    Category.TOKENISE: "cyan",
    Category.SUBMIT: "cyan",
    Category.ROUTE: "blue",
    Category.PLACE: "blue",
    Category.QUEUE: "yellow",
    Category.PREFILL_WAIT: "yellow",
    Category.PREFILL_BARRIER: "red",
    Category.HOLD: "red",
    Category.PREFILL: "magenta",
    Category.SLOT: "yellow",
    Category.DECODE_WAIT: "yellow",
    Category.PACE: "yellow",
    Category.DECODE_BARRIER: "red",
    Category.DECODE: "green",
    Category.PREEMPTED: "bright_red",
    Category.SIBLINGS: "yellow",
    Category.DELIVER: "cyan",
}
"""Work is green or magenta, waiting for one's own group yellow, for another group red, the edges blue."""

_HEAD: Final = frozenset({"ts", "mono", "actor", "event", "epoch"})

WIDE: Final = 100
"""Terminal width from which on all columns fit."""

TEXT_WIDTH: Final = 24
"""So much of a text stays in any case; `show` takes the beginning of an id."""

DROPPED: Final = ("cached", "group", "output", "prompt", "queue", "prefill", "decode", "TTFT")
"""Columns of a request that a narrow terminal does without, in this order."""


def duration(ns: float | None) -> str:
    """Nanoseconds as a person reads them: three digits and a unit."""
    if ns is None:
        return "-"
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(ns) >= size:
            value = ns / size
            return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {unit}"
    return f"{ns:.0f} ns" if ns else "0"


def count(value: int | None) -> str:
    """A whole number with separators, or a dash."""
    return "-" if value is None else f"{value:,}"


def counted(number: int, noun: str) -> str:
    """A number of things."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def table(title: str, *columns: str, left: Iterable[str] = ()) -> Table:
    """An empty table: figures stand right and are never cut; columns named in ``left`` hold text, the last of it wrapped."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    kept = list(left)
    for name in columns:
        made.add_column(name, justify="left" if name in kept else "right", no_wrap=True, overflow="ellipsis")
    if columns and columns[-1] in kept:
        made.columns[-1].no_wrap, made.columns[-1].overflow = False, "fold"
    return made


def add(to: Table, *cells: str | Text) -> None:
    """Add a row of literal cells."""
    literal = [Text(plain(cell)) if isinstance(cell, str) else cell for cell in cells]
    for column, cell in zip(to.columns, literal, strict=True):
        if column.no_wrap:
            most = cell.cell_len if column.justify == "right" else min(cell.cell_len, TEXT_WIDTH)
            column.min_width = max(column.min_width or cell_len(str(column.header)), most)
    to.add_row(*literal)


def requests_table(timelines: Sequence[Timeline], width: int) -> Table:
    """One row per request, in the order given; the columns that fit the width."""
    rows = [request_cells(timeline) for timeline in timelines]
    names = list(rows[0]) if rows else ["request"]
    widths = {name: max(cell_len(name), *(cell_len(str(row[name])) for row in rows)) for name in names}
    widths["request"] = min(widths["request"], TEXT_WIDTH)
    for dropped in DROPPED:
        if sum(widths[name] + 3 for name in names) <= width:
            break
        names.remove(dropped)
    made = table("Requests, the slowest first", *names, left=("request", "finish"))
    # The longest ids are cut where they meet the figures; all else keeps its width.
    room = max(width - sum(widths[name] + 3 for name in names[1:]) - 3, TEXT_WIDTH // 2)
    made.columns[-1].min_width = min(widths["finish"], TEXT_WIDTH)
    for row in rows:
        add(made, shortened(str(row["request"]), room), *(row[name] for name in names[1:]))
    return made


def shortened(request: str, width: int) -> str:
    """An id in so many cells: cut in the middle, so that the number of a choice stays."""
    text = plain(request)
    choice = text.removeprefix(parent(text))
    return (
        text if cell_len(text) <= width else set_cell_size(text, width - len(choice) - 1).rstrip() + "\u2026" + choice
    )


def request_cells(timeline: Timeline) -> dict[str, str | Text]:
    """A request's figures by column."""
    finish = Text(plain(timeline.finish))
    if timeline.finish == RUNNING:
        finish.stylize("cyan")
    elif timeline.finish.startswith(("failed", "abort")):
        finish.stylize("red")
    return {
        "request": timeline.request,
        "group": count(timeline.group),
        "prompt": count(timeline.prompt_tokens),
        "cached": count(timeline.cached_tokens),
        "output": count(timeline.output_tokens),
        "queue": duration(queued_ns(timeline)),
        "prefill": duration(prefill_ns(timeline)),
        "decode": duration(decode_ns(timeline)),
        "TTFT": duration(timeline.ttft_ns),
        "e2e": duration(timeline.e2e_ns),
        "finish": finish,
    }


def queued_ns(timeline: Timeline) -> int:
    """In a queue of its group: for admission, for a row, or after a preemption."""
    return _total(timeline, Category.QUEUE, Category.SLOT, Category.PREEMPTED)


def prefill_ns(timeline: Timeline) -> int:
    """From each admission to the end of the prompt."""
    return _total(timeline, Category.PREFILL_WAIT, Category.PREFILL_BARRIER, Category.HOLD, Category.PREFILL)


def decode_ns(timeline: Timeline) -> int:
    """With a row in the decode batch."""
    return _total(timeline, *DECODING)


def _total(timeline: Timeline, *categories: Category) -> int:
    return sum(timeline.totals.get(category, 0) for category in categories)


def planes_table(stats: Sequence[PlaneStats], width: int) -> Table:
    """One row per plane and group."""
    names = ["plane", "group", "ticks", "idle", "tokens", "mean", "p50", "p99", "barrier mean", "barrier p99"]
    if width < WIDE:
        names = ["plane", "group", "ticks", "tokens", "mean", "p50", "p99", "barrier p99"]
    made = table("Steps by plane (idle ones only counted)", *names, left=("plane",))
    for row in stats:
        cells: Mapping[str, str] = {
            "plane": row.plane,
            "group": count(row.group),
            "ticks": count(row.ticks),
            "idle": count(row.idle_ticks),
            "tokens": count(row.tokens),
            "mean": duration(row.mean_ns),
            "p50": duration(row.p50_ns),
            "p99": duration(row.p99_ns),
            "barrier mean": duration(row.barrier_mean_ns),
            "barrier p99": duration(row.barrier_p99_ns),
        }
        add(made, *(cells[name] for name in names))
    return made


def ticks_table(title: str, ticks: Sequence[Tick], origin: int | None = None) -> Table:
    """One row per tick: how long, and why."""
    at = () if origin is None else ("at",)
    made = table(title, "plane", "tick", "group", *at, "tokens", "barrier", "step", "why", left=("plane", "why"))
    for tick in ticks:
        since = () if origin is None else (duration(max((tick.plan or tick.arrive or origin) - origin, 0)),)
        cells = (count(tick.tokens), duration(tick.barrier_ns), duration(tick.run_ns), reason(tick))
        add(made, tick.plane, str(tick.tick), str(tick.group), *since, *cells)
    return made


def blame_tables(found: Blame) -> list[Table]:
    """Where the time went, by phase, group and rank."""
    phases = table("By phase", "phase", "time", "share", "requests", "most", "in", left=("phase", "in"))
    for share in found.phases:
        name = Text(share.category, style=STYLES[share.category])
        most = duration(share.worst_ns)
        add(phases, name, duration(share.total_ns), f"{share.share:.1%}", count(share.requests), most, share.worst)
    groups = table("By group", "plane", "group", "ticks", "came last", "made peers wait", "waited", left=("plane",))
    for row in found.groups:
        waits = duration(row.caused_ns), duration(row.waited_ns)
        add(groups, row.plane, count(row.group), count(row.ticks), count(row.last), *waits)
    ranks = table("By rank", "rank", "ticks", "slowest in", "behind by", "own work", "collectives", left=("rank",))
    for rank in found.ranks:
        times = duration(rank.behind_ns), duration(rank.own_ns), duration(rank.collective_ns)
        add(ranks, rank.rank, count(rank.ticks), count(rank.slowest), *times)
    return [phases, *([groups] if found.groups else []), *([ranks] if found.ranks else [])]


def event_line(line: Mapping[str, object]) -> Text:
    """One event of a live trace: when, who, what, and its fields."""
    ts = line.get("ts")
    when = datetime.fromtimestamp(ts / 1e9, tz=UTC).astimezone().strftime("%H:%M:%S.%f") if isinstance(ts, int) else "-"
    text = Text(when, style="dim")
    text.append(f"  {plain(line.get('actor', '-')):<15} ", style="cyan not dim")
    text.append(f"{plain(line.get('event', '-')):<18}", style="bold not dim")
    for name, value in line.items():
        if name not in _HEAD:
            shown = duration(value) if name.endswith("_ns") and isinstance(value, int) else plain(value)
            text.append(f" {plain(name)}=", style="dim").append(shown, style="not dim")
    return text


def answer_table(answer: Answer, width: int) -> RenderableType:
    """The answer to a question in SQL: a table, or where that is too wide, one block of lines for each row."""
    names = [plain(name) for name in answer.columns]
    rows = [["" if cell is None else plain(cell) for cell in row] for row in answer.rows]
    widths = [max(cell_len(cell) for cell in column) for column in zip(names, *rows, strict=True)]
    if sum(widths) + 3 * len(widths) > width and len(names) > 1:
        return Group(*(_block(place, names, row) for place, row in enumerate(rows, 1)))
    made = table("", *names, left=names)
    made.title = None
    for row in rows:
        add(made, *row)
    return made


def _block(place: int, names: Sequence[str], row: Sequence[str]) -> Text:
    text = Text(f"row {place}\n", style="bold")
    longest = max(cell_len(name) for name in names)
    for name, cell in zip(names, row, strict=True):
        text.append(f"  {name:<{longest}}  ", style="not bold dim").append(cell + "\n", style="not bold")
    return text
