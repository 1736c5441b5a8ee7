"""Questions to a loaded trace: which requests, which ticks, and everything that one request met."""

import difflib
from collections.abc import Sequence
from typing import Any, Final

import duckdb
import msgspec

from edgemesh.inspect.facts import Event, Step, Tick, Timeline
from edgemesh.inspect.store import TraceError
from edgemesh.inspect.timeline import TickIndex, build

MAX_REQUESTS: Final = 1000
"""Timelines that one answer is made of, at most."""

_NEAREST: Final = 5

_RANKING: Final = """
WITH life AS (
    SELECT request, min(at_ns) AS start, max(at_ns) AS seen, max("group") AS "group",
        min(at_ns) FILTER (actor LIKE 'gateway-%'
            AND event IN ('request.finished', 'request.failed', 'request.aborted')) AS ended
    FROM events WHERE request IS NOT NULL GROUP BY request
)
SELECT request FROM life, (SELECT max(at_ns) AS now FROM events)
WHERE ($group IS NULL OR "group" = $group) AND (NOT $running OR ended IS NULL)
ORDER BY coalesce(ended, now) - start DESC, request LIMIT $limit
"""

_EVENTS: Final = """
SELECT request, at_ns, actor, event, coalesce(epoch, 0), "group", tick, record
FROM events WHERE list_contains($requests, request) ORDER BY at_ns, seq
"""

_TICKS: Final = """
SELECT t."group", t.plane, t.tick, t.epoch, t.arrive, t.plan, t.done, t.tokens, t.sequences, t.idle, t.hold,
    t.requests, r."last", s.steps
FROM ticks t
LEFT JOIN sets USING ("group")
LEFT JOIN releases r ON r."set" = sets."set" AND r.epoch = t.epoch AND r.plane = t.plane AND r.tick = t.tick
LEFT JOIN (
    SELECT sets."set", epoch, plane, tick,
        list({'rank': rank, 'group': steps."group", 'step_ns': step_ns, 'collective_ns': collective_ns} ORDER BY rank)
            AS steps
    FROM steps LEFT JOIN sets USING ("group") GROUP BY ALL
) s ON s."set" = sets."set" AND s.epoch = t.epoch AND s.plane = t.plane AND s.tick = t.tick
WHERE coalesce(t.done, t.plan, t.arrive) >= $start AND coalesce(t.arrive, t.plan, t.done) <= $end
    AND (t.arrive IS NOT NULL OR t.plan IS NOT NULL)
ORDER BY coalesce(t.plan, t.arrive), t."group"
"""


class PlaneStats(msgspec.Struct, frozen=True):
    """The steps of one plane in one group, idle ones left out; nanoseconds."""

    plane: str
    group: int
    ticks: int
    idle_ticks: int
    tokens: int
    mean_ns: int
    p50_ns: int
    p99_ns: int
    barrier_mean_ns: int
    barrier_p99_ns: int


_PLANES: Final = """
SELECT plane, "group",
    count(*) FILTER (NOT idle), count(*) FILTER (idle), coalesce(sum(tokens) FILTER (NOT idle), 0),
    coalesce(avg(done - plan) FILTER (NOT idle), 0), coalesce(quantile_cont(done - plan, 0.5) FILTER (NOT idle), 0),
    coalesce(quantile_cont(done - plan, 0.99) FILTER (NOT idle), 0),
    coalesce(avg(greatest(plan - arrive, 0)) FILTER (NOT idle), 0),
    coalesce(quantile_cont(greatest(plan - arrive, 0), 0.99) FILTER (NOT idle), 0)
FROM ticks
WHERE done IS NOT NULL AND plan IS NOT NULL AND ($plane IS NULL OR plane = $plane)
GROUP BY plane, "group" ORDER BY plane, "group"
"""


def request_ids(trace: duckdb.DuckDBPyConnection) -> list[str]:
    """Every request that the trace names."""
    rows = trace.execute("SELECT DISTINCT request FROM events WHERE request IS NOT NULL ORDER BY request").fetchall()
    return [row[0] for row in rows]


def find_request(trace: duckdb.DuckDBPyConnection, wanted: str) -> str:
    """The one request with this id, or whose id begins so; ``TraceError`` names the candidates otherwise."""
    known = request_ids(trace)
    if wanted in known:
        return wanted
    begun = [request for request in known if request.startswith(wanted)]
    if len(begun) == 1:
        return begun[0]
    if begun:
        message = f"{len(begun)} requests begin with {wanted!r}: {_some(begun)}. Give more of the id."
        raise TraceError(message)
    if not known:
        message = f"The trace holds no request yet, so none is {wanted!r}. Send one to the mesh and look again."
        raise TraceError(message)
    near = difflib.get_close_matches(wanted, known, n=_NEAREST, cutoff=0.3) or known[-_NEAREST:]
    message = (
        f"No request {wanted!r} in this trace; the nearest ids are {_some(near)}. `edgemesh trace requests` lists all."
    )
    raise TraceError(message)


def _some(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _NEAREST} more" if len(ids) > _NEAREST else ""
    return ", ".join(ids[:_NEAREST]) + more


def slowest_requests(
    trace: duckdb.DuckDBPyConnection, *, limit: int = 20, group: int | None = None, running: bool = False
) -> list[Timeline]:
    """The timelines of the slowest requests, the slowest first."""
    limit = min(limit, MAX_REQUESTS)
    rows = trace.execute(_RANKING, {"limit": limit, "group": group, "running": running}).fetchall()
    return timelines(trace, [row[0] for row in rows])


def timelines(trace: duckdb.DuckDBPyConnection, requests: Sequence[str]) -> list[Timeline]:
    """The timelines of these requests, in the order asked for."""
    if not requests:
        return []
    events: dict[str, list[Event]] = {request: [] for request in requests}
    for request, event in _events(trace, requests):
        events[request].append(event)
    now: int = _one(trace, "SELECT max(at_ns) FROM events")
    every = [event for found in events.values() for event in found]
    ticks = TickIndex(ticks_between(trace, min(event.at for event in every), now))
    return [build(request, events[request], ticks, now) for request in requests]


def _events(trace: duckdb.DuckDBPyConnection, requests: Sequence[str]) -> list[tuple[str, Event]]:
    rows = trace.execute(_EVENTS, {"requests": list(requests)}).fetchall()
    return [
        (request, Event(at, actor, event, epoch, group, tick, msgspec.json.decode(record, type=dict[str, object])))
        for request, at, actor, event, epoch, group, tick, record in rows
    ]


def ticks_between(trace: duckdb.DuckDBPyConnection, start: int, end: int) -> list[Tick]:
    """The ticks of every group that touch ``[start, end]``, with the steps of the ranks that had a part in them."""
    rows = trace.execute(_TICKS, {"start": start, "end": end}).fetchall()
    return [_tick(row) for row in rows]


def _tick(row: Sequence[Any]) -> Tick:
    *head, requests, last, steps = row
    group, plane, tick, epoch, arrive, plan, done, tokens, sequences, idle, hold = head
    return Tick(
        group=group,
        plane=plane,
        tick=tick,
        epoch=epoch,
        arrive=arrive,
        plan=plan,
        done=done,
        tokens=tokens,
        sequences=sequences,
        idle=idle,
        hold=hold,
        requests=tuple(requests or ()),
        last=last,
        steps=tuple(Step(**step) for step in steps or ()),
    )


def plane_stats(trace: duckdb.DuckDBPyConnection, plane: str | None = None) -> list[PlaneStats]:
    """What each plane of each group did."""
    rows = trace.execute(_PLANES, {"plane": plane}).fetchall()
    return [PlaneStats(row[0], *(round(value) for value in row[1:])) for row in rows]


def slowest_ticks(trace: duckdb.DuckDBPyConnection, *, plane: str | None = None, limit: int = 10) -> list[Tick]:
    """The real ticks that took longest, from arrival to the result."""
    rows = trace.execute(
        'SELECT "group", epoch, plane, tick, coalesce(arrive, plan), done FROM ticks '
        "WHERE done IS NOT NULL AND plan IS NOT NULL AND NOT idle AND ($plane IS NULL OR plane = $plane) "
        "ORDER BY done - coalesce(arrive, plan) DESC LIMIT $limit",
        {"plane": plane, "limit": limit},
    ).fetchall()
    if not rows:
        return []
    wanted = {row[:4]: place for place, row in enumerate(rows)}
    ticks = ticks_between(trace, min(row[4] for row in rows), max(row[5] for row in rows))
    found = [tick for tick in ticks if (tick.group, tick.epoch, tick.plane, tick.tick) in wanted]
    return sorted(found, key=lambda tick: wanted[tick.group, tick.epoch, tick.plane, tick.tick])


def _one(trace: duckdb.DuckDBPyConnection, query: str) -> Any:  # noqa: ANN401 - a cell of a table has any type
    row = trace.execute(query).fetchone()
    return row[0] if row else None
