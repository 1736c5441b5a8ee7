"""A trace for other tools: Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Each actor is a process: groups show barrier waits and steps per plane, ranks their steps, the others their events.
Requests are asynchronous tracks of their own, with their phases inside.
The format: "Trace Event Format", Google, https://chromium.googlesource.com/catapult (phases X, i, b, e and M).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, Final

import duckdb
import msgspec

from edgemesh.inspect.facts import Tick, Timeline
from edgemesh.inspect.queries import ticks_between

TraceEvent = dict[str, Any]

_REQUESTS_PROCESS: Final = 1


def write_perfetto(trace: duckdb.DuckDBPyConnection, timelines: Sequence[Timeline], out: IO[bytes]) -> int:
    """Write the whole trace, and these requests; how many trace events were written."""
    written = 0
    encoder = msgspec.json.Encoder()
    out.write(b'{"displayTimeUnit":"ms","traceEvents":[')
    for event in _events(trace, timelines):
        out.write((b",\n" if written else b"\n") + encoder.encode(event))
        written += 1
    out.write(b"\n]}\n")
    return written


def _events(trace: duckdb.DuckDBPyConnection, timelines: Sequence[Timeline]) -> Iterator[TraceEvent]:
    row = trace.execute("SELECT min(at_ns), max(at_ns) FROM events").fetchone()
    start, end = row or (0, 0)
    actors = [name for (name,) in trace.execute("SELECT DISTINCT actor FROM events ORDER BY actor").fetchall()]
    process = {actor: place for place, actor in enumerate(actors, _REQUESTS_PROCESS + 1)}
    yield _named("process_name", _REQUESTS_PROCESS, "requests")
    for actor, pid in process.items():
        yield _named("process_name", pid, actor)
    yield from _group_ticks(ticks_between(trace, start, end), process, start)
    yield from _rank_steps(trace, process, start)
    yield from _instants(trace, process, start)
    for timeline in timelines:
        yield from _request(timeline, start)


def _named(what: str, pid: int, name: str, tid: int = 0) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(name: str, track: tuple[int, int], start: int, end: int, args: dict[str, Any]) -> TraceEvent:
    """A box from ``start`` to ``end`` (nanoseconds since the trace began) on a (process, thread)."""
    pid, tid = track
    ts, dur = start / 1000, max(end - start, 0) / 1000
    return {"ph": "X", "name": name, "cat": "tick", "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def _group_ticks(ticks: Iterable[Tick], process: dict[str, int], origin: int) -> Iterator[TraceEvent]:
    threads: dict[tuple[int, str], int] = {}
    free_from: dict[tuple[int, str], int] = {}
    for tick in ticks:
        pid = process.get(f"group-{tick.group}")
        if pid is None:
            continue
        key = pid, tick.plane
        if key not in threads:
            threads[key] = 2 * len([other for other in threads if other[0] == pid]) + 1
            yield _named("thread_name", pid, f"{tick.plane} step", threads[key])
            yield _named("thread_name", pid, f"{tick.plane} barrier", threads[key] + 1)
        step = threads[key]
        args = {"tick": tick.tick, "tokens": tick.tokens, "sequences": tick.sequences, "requests": list(tick.requests)}
        if tick.arrive is not None and tick.plan is not None and not tick.idle:
            waited = {**args, "last": tick.last, "hold": tick.hold}
            yield _slice(f"barrier {tick.tick}", (pid, step + 1), tick.arrive - origin, tick.plan - origin, waited)
        if tick.plan is not None and tick.done is not None:
            # A step planned ahead waits for the one before: boxes of one track must not overlap.
            begun = min(max(tick.plan, free_from.get(key, 0)), tick.done)
            free_from[key] = tick.done
            name = f"{'idle' if tick.idle else tick.plane} {tick.tick}"
            planned = {**args, "planned_us": (tick.plan - origin) / 1000}
            yield _slice(name, (pid, step), begun - origin, tick.done - origin, planned)


def _rank_steps(trace: duckdb.DuckDBPyConnection, process: dict[str, int], origin: int) -> Iterator[TraceEvent]:
    rows = trace.execute(
        "SELECT rank, plane, tick, at_ns, step_ns, collective_ns, tokens, idle FROM steps ORDER BY at_ns"
    ).fetchall()
    for rank, plane, tick, at, step_ns, collective_ns, tokens, idle in rows:
        name = f"{'idle' if idle else plane} {tick}"
        args = {"tick": tick, "tokens": tokens, "collective_us": collective_ns / 1000}
        yield _slice(name, (process[rank], 1), at - step_ns - origin, at - origin, args)


def _instants(trace: duckdb.DuckDBPyConnection, process: dict[str, int], origin: int) -> Iterator[TraceEvent]:
    rows = trace.execute(
        "SELECT actor, event, at_ns, record FROM events "
        "WHERE event NOT IN ('tick.arrive', 'tick.plan', 'tick.done', 'tick.step') ORDER BY seq"
    ).fetchall()
    for actor, event, at, record in rows:
        shared = {"ph": "i", "s": "t", "cat": "event", "pid": process[actor], "tid": 0}
        yield {**shared, "name": event, "ts": (at - origin) / 1000, "args": msgspec.json.decode(record)}


def _request(timeline: Timeline, origin: int) -> Iterator[TraceEvent]:
    shared = {"cat": "request", "id": timeline.request, "pid": _REQUESTS_PROCESS, "tid": 0}
    args = {"group": timeline.group, "finish": timeline.finish, "output_tokens": timeline.output_tokens}
    yield {**shared, "ph": "b", "name": timeline.request, "ts": (timeline.start - origin) / 1000, "args": args}
    for span in timeline.spans:
        yield {**shared, "ph": "b", "name": span.category, "ts": (span.start - origin) / 1000}
        yield {**shared, "ph": "e", "name": span.category, "ts": (span.end - origin) / 1000}
    yield {**shared, "ph": "e", "name": timeline.request, "ts": (timeline.end - origin) / 1000}
