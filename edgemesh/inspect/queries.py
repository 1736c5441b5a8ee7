"""Questions to a loaded trace: which requests, which ticks, and everything that one request met."""

import difflib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import duckdb
import msgspec

from edgemesh.inspect.facts import Event, Step, Tick, Timeline
from edgemesh.inspect.store import TraceError
from edgemesh.inspect.timeline import TickIndex, build

MAX_REQUESTS: Final = 1000
"""Timelines that one answer is made of, at most."""

_NEAREST: Final = 5

_SHARED: Final = ("request.received", "request.tokenised", "request.sent", "request.failed", "request.aborted")
"""What a gateway says once for all choices of a request, under the id of the first."""

_RANKING: Final = """
WITH life AS (
    SELECT request, regexp_replace(request, '/[0-9]+$', '') AS parent, min(at_ns) AS start, max("group") AS "group",
        max(e2e_ns) FILTER (event = 'request.finished') AS e2e_ns,
        min(at_ns) FILTER (actor LIKE 'gateway-%'
            AND event IN ('request.finished', 'request.failed', 'request.aborted')) AS ended
    FROM events WHERE request IS NOT NULL GROUP BY request
), lives AS (
    SELECT life.request, life."group", coalesce(life.ended, whole.ended) AS ended,
        coalesce(life.e2e_ns, coalesce(life.ended, whole.ended, now) - least(life.start, whole.start)) AS e2e_ns
    FROM life LEFT JOIN life AS whole ON whole.request = life.parent, (SELECT max(at_ns) AS now FROM events)
)
SELECT request FROM lives
WHERE ($group IS NULL OR "group" = $group) AND (NOT $running OR ended IS NULL)
ORDER BY e2e_ns DESC, request LIMIT $limit
"""

_EVENTS: Final = """
SELECT request, at_ns, actor, event, coalesce(epoch, 0), "group", tick, record
FROM events
WHERE list_contains($requests, request) OR (list_contains($parents, request) AND list_contains($shared, event))
ORDER BY at_ns, seq
"""

_TICKS: Final = """
SELECT t."group", t.plane, t.tick, t.epoch, t.arrive, t.plan, t.done, t.tokens, t.sequences, t.idle, t.hold,
    t.requests, r."last", t.previous, t.step_ns, t.paced_ns, t.made, t.run, s.steps
FROM ticks t
LEFT JOIN sets USING ("group")
LEFT JOIN releases r ON r."set" = sets."set" AND r.run = t.run AND r.epoch = t.epoch AND r.plane = t.plane AND r.tick = t.tick
LEFT JOIN (
    SELECT sets."set", run, epoch, plane, tick,
        list({'rank': rank, 'group': steps."group", 'step_ns': step_ns, 'collective_ns': collective_ns} ORDER BY rank)
            AS steps
    FROM steps LEFT JOIN sets USING ("group") GROUP BY ALL
) s ON s."set" = sets."set" AND s.run = t.run AND s.epoch = t.epoch AND s.plane = t.plane AND s.tick = t.tick
WHERE coalesce(t.done, t.plan, t.arrive) >= $start AND coalesce(t.arrive, t.plan, t.done) <= $end
    AND (t.arrive IS NOT NULL OR t.plan IS NOT NULL)
ORDER BY coalesce(t.plan, t.arrive), t."group"
"""


_OUTER_IDS: Final = """
SELECT json_extract_string(record, '$.external') AS outer_id, request FROM events
WHERE event = 'request.received' AND request IS NOT NULL AND outer_id IS NOT NULL ORDER BY seq
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
    coalesce(avg(step) FILTER (NOT idle), 0), coalesce(quantile_cont(step, 0.5) FILTER (NOT idle), 0),
    coalesce(quantile_cont(step, 0.99) FILTER (NOT idle), 0),
    coalesce(avg(barrier) FILTER (NOT idle), 0), coalesce(quantile_cont(barrier, 0.99) FILTER (NOT idle), 0)
FROM (
    SELECT *, coalesce(nullif(step_ns, 0), greatest(done - greatest(plan, coalesce(previous, 0)), 0)) AS step,
        greatest(plan - greatest(coalesce(arrive, plan), coalesce(previous, 0)), 0) AS barrier
    FROM ticks WHERE done IS NOT NULL AND plan IS NOT NULL AND ($plane IS NULL OR plane = $plane)
)
GROUP BY plane, "group" ORDER BY plane, "group"
"""

_SLOWEST: Final = """
SELECT run, "group", epoch, plane, tick, coalesce(arrive, plan), done FROM ticks
WHERE done IS NOT NULL AND plan IS NOT NULL AND NOT idle AND ($plane IS NULL OR plane = $plane)
ORDER BY coalesce(nullif(step_ns, 0), greatest(done - greatest(plan, coalesce(previous, 0)), 0))
    + greatest(plan - greatest(coalesce(arrive, plan), coalesce(previous, 0)), 0) DESC, tick, "group"
LIMIT $limit
"""

_CHOICES: Final = """
SELECT regexp_replace(request, '/[0-9]+$', '') AS parent,
    count(DISTINCT request) FILTER (event = 'request.submitted') AS choices,
    max(at_ns) FILTER (actor LIKE 'group-%' AND event IN ('request.finished', 'request.failed', 'request.aborted'))
FROM events WHERE request IS NOT NULL GROUP BY parent HAVING choices > 1
"""


def request_ids(trace: duckdb.DuckDBPyConnection) -> list[str]:
    """Every request that the trace names."""
    rows = trace.execute("SELECT DISTINCT request FROM events WHERE request IS NOT NULL ORDER BY request").fetchall()
    return [row[0] for row in rows]


def find_request(trace: duckdb.DuckDBPyConnection, wanted: str) -> str:
    """The one request with this id, or whose id begins so; a client's own id (``external``) is as good.

    Raises ``TraceError``, which names the candidates or the nearest ids, if there is not exactly one.
    """
    known = request_ids(trace)
    names: dict[str, str] = {request: request for request in known}
    names |= {outer: request for outer, request in trace.execute(_OUTER_IDS).fetchall() if outer not in names}
    if wanted in names:
        return names[wanted]
    stem = parent(wanted)
    choice = wanted.removeprefix(stem)
    begun = sorted({names[name] for name in names if name.startswith(stem) and name.endswith(choice)})
    if begun and len({parent(request) for request in begun}) == 1:
        return begun[0]
    if begun:
        message = f"{len(begun)} requests begin with {wanted!r}: {_some(begun)}. Give more of the id."
        raise TraceError(message)
    if not known:
        message = f"The trace holds no request yet, so none is {wanted!r}. Send one to the mesh and look again."
        raise TraceError(message)
    near = difflib.get_close_matches(wanted, names, n=_NEAREST, cutoff=0.3) or known[-_NEAREST:]
    message = (
        f"No request {wanted!r} in this trace; the nearest ids are {_some(near)}. `edgemesh trace requests` lists all."
    )
    raise TraceError(message)


def parent(request: str) -> str:
    """The id under which the gateway speaks of all choices of a request: ``ID`` for ``ID/1``."""
    base, _, choice = request.rpartition("/")
    return base if base and choice.isascii() and choice.isdigit() else request


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
    named: dict[str, list[Event]] = defaultdict(list)
    parents = sorted({parent(request) for request in requests} - set(requests))
    shared = {"requests": list(requests), "parents": parents, "shared": list(_SHARED)}
    for request, at, actor, event, epoch, group, tick, record in trace.execute(_EVENTS, shared).fetchall():
        detail = msgspec.json.decode(record, type=dict[str, object])
        named[request].append(Event(at, actor, event, epoch, group, tick, detail))
    now: int = _one(trace, "SELECT max(at_ns) FROM events")
    start = min(event.at for found in named.values() for event in found)
    ticks = TickIndex(ticks_between(trace, start, now))
    together = {whole: (choices, last) for whole, choices, last in trace.execute(_CHOICES).fetchall()}
    made = []
    for request in requests:
        choices, last = together.get(parent(request), (1, None))
        own = [*_of_parent(request, named), *named[request]]
        made.append(build(request, own, ticks, now, choices=choices, together=last))
    return made


def _of_parent(request: str, named: Mapping[str, Sequence[Event]]) -> list[Event]:
    whole = parent(request)
    if whole == request:
        return []
    return [event for event in named[whole] if event.role == "gateway" and event.event in _SHARED]


def ticks_between(trace: duckdb.DuckDBPyConnection, start: int, end: int) -> list[Tick]:
    """The ticks of every group that touch ``[start, end]``, with the steps of the ranks that had a part in them."""
    rows = trace.execute(_TICKS, {"start": start, "end": end}).fetchall()
    return [_tick(row) for row in rows]


def _tick(row: Sequence[Any]) -> Tick:
    *head, requests, last, previous, step_ns, paced_ns, made, run, steps = row
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
        previous=previous,
        step_ns=step_ns,
        paced_ns=paced_ns,
        made=made,
        run=run,
        steps=tuple(Step(**step) for step in steps or ()),
    )


def plane_stats(trace: duckdb.DuckDBPyConnection, plane: str | None = None) -> list[PlaneStats]:
    """What each plane of each group did."""
    rows = trace.execute(_PLANES, {"plane": plane}).fetchall()
    return [PlaneStats(row[0], *(round(value) for value in row[1:])) for row in rows]


def slowest_ticks(trace: duckdb.DuckDBPyConnection, *, plane: str | None = None, limit: int = 10) -> list[Tick]:
    """The real ticks that took longest, from arrival to the result."""
    rows = trace.execute(_SLOWEST, {"plane": plane, "limit": limit}).fetchall()
    if not rows:
        return []
    wanted = {row[:5]: place for place, row in enumerate(rows)}
    ticks = ticks_between(trace, min(row[5] for row in rows), max(row[6] for row in rows))
    named = {(tick.run, tick.group, tick.epoch, tick.plane, tick.tick): tick for tick in ticks}
    return [named[each] for each in wanted]


def _one(trace: duckdb.DuckDBPyConnection, query: str) -> Any:  # noqa: ANN401 - a cell of a table has any type
    row = trace.execute(query).fetchone()
    return row[0] if row else None
