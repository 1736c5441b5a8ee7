"""The trace directory as tables: every actor's JSON lines in an in-memory DuckDB that can reach nothing else.

A trace may be read while it is written, and after a crash: a torn or garbled line is left out, an unknown field
stays in the ``record`` column, and a file that is rotated away between two looks is looked at again.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import duckdb
import msgspec

LINE_BYTES: Final = 4 << 20
"""A longer line is no event of ours."""

READ_ATTEMPTS: Final = 5
"""A rotation renames files while they are listed; so many in a row mean something else."""

CLOCK_GAP_S: Final = 2
"""Wall minus monotonic time differs by more than this only between boots or hosts."""

_NAME: Final = re.compile(
    r"(?P<actor>[a-z]+-\d+(?:\.[a-z]+)?)(?:\.(?P<inner>\d{1,6}))?\.jsonl(?:\.(?P<outer>\d{1,6}))?\Z"
)
"""``group-0.jsonl`` is being written, ``group-0.1.jsonl`` (or ``group-0.jsonl.1``) was rotated away before it."""

COLUMNS: Final[dict[str, str]] = {
    "ts": "BIGINT",
    "mono": "BIGINT",
    "actor": "VARCHAR",
    "epoch": "BIGINT",
    "event": "VARCHAR",
    "request": "VARCHAR",
    "plane": "VARCHAR",
    "tick": "BIGINT",
    "group": "VARCHAR",
    "slot": "BIGINT",
    "set": "BIGINT",
    "tokens": "BIGINT",
    "sequences": "BIGINT",
    "idle": "BOOLEAN",
    "hold": "VARCHAR",
    "last": "VARCHAR",
    "step_ns": "BIGINT",
    "wait_ns": "BIGINT",
    "paced_ns": "BIGINT",
    "since_ns": "BIGINT",
    "collective_ns": "BIGINT",
    "ns": "BIGINT",
    "prompt_tokens": "BIGINT",
    "output_tokens": "BIGINT",
    "cached_tokens": "BIGINT",
    "ttft_ns": "BIGINT",
    "e2e_ns": "BIGINT",
    "finish": "VARCHAR",
    "status": "BIGINT",
    "code": "VARCHAR",
    "reason": "VARCHAR",
}
"""The fields that have a column of their own; a value of another type reads as null there."""

_LOAD: Final = """
CREATE TABLE events AS
SELECT row_number() OVER () AS seq, fields.ts AS at_ns,
    fields.* EXCLUDE ("group", "last") REPLACE (coalesce(fields.actor, writer) AS actor),
    try_cast(regexp_extract(coalesce(fields."group", fields.actor, writer), '^(?:group-)?(\\d+)$', 1) AS BIGINT) AS "group",
    try_cast(regexp_extract(fields."last", '^(?:group-)?(\\d+)$', 1) AS BIGINT) AS "last",
    requests, group_tokens, record
FROM (
    SELECT json AS record, regexp_extract(filename, '([a-z]+-[0-9]+(?:\\.(?:prefill|decode|mixed))?)[^/]*$', 1) AS writer,
        json_transform(json, $columns) AS fields,
        try_cast(json_transform(json, '{"requests":["VARCHAR"]}').requests AS VARCHAR[]) AS requests,
        try_cast(json_transform(json, '{"tokens":["BIGINT"]}').tokens AS BIGINT[]) AS group_tokens
    FROM (
        -- The reader lets some lines pass that are JSON only up to a point.
        SELECT filename, CASE WHEN json_valid(json) THEN json END AS json
        FROM read_json_objects($files, format='newline_delimited', ignore_errors=true,
            compression='uncompressed', filename=true, maximum_object_size=$line_bytes)
    )
    WHERE json IS NOT NULL
)
WHERE fields.ts IS NOT NULL AND fields.mono IS NOT NULL AND fields.event IS NOT NULL
"""

_TICKS: Final = """
CREATE TABLE ticks AS
SELECT *, lag(done) OVER (PARTITION BY run, "group", epoch, plane ORDER BY tick) AS previous FROM (
SELECT run, "group", epoch, plane, tick,
    max(at_ns) FILTER (event = 'tick.arrive') AS arrive,
    min(at_ns) FILTER (event = 'tick.plan') AS plan,
    max(at_ns) FILTER (event = 'tick.done') AS done,
    coalesce(max(tokens) FILTER (event = 'tick.plan'), 0) AS tokens,
    coalesce(max(sequences) FILTER (event = 'tick.plan'), 0) AS sequences,
    coalesce(bool_and(idle) FILTER (event = 'tick.plan'), false) AS idle,
    coalesce(any_value(hold) FILTER (event = 'tick.plan' AND hold NOT IN ('false', '0')), '') AS hold,
    coalesce(any_value(requests) FILTER (event = 'tick.plan'), []) AS requests,
    coalesce(max(paced_ns) FILTER (event = 'tick.plan'), 0) AS paced_ns,
    min(at_ns) FILTER (event = 'tick.plan') - coalesce(max(since_ns) FILTER (event = 'tick.plan'), 0) AS made,
    max(step_ns) FILTER (event = 'tick.done') AS step_ns,
    max(wait_ns) FILTER (event = 'tick.done') AS wait_ns
FROM events
WHERE event IN ('tick.arrive', 'tick.plan', 'tick.done') AND tick IS NOT NULL AND plane IS NOT NULL
    AND "group" IS NOT NULL
GROUP BY run, "group", epoch, plane, tick
)
"""

_STEPS: Final = """
CREATE TABLE steps AS
SELECT actor AS rank, run, "group", epoch, plane, tick, at_ns, coalesce(step_ns, 0) AS step_ns,
    coalesce(collective_ns, 0) AS collective_ns,
    greatest(coalesce(step_ns, 0) - coalesce(collective_ns, 0), 0) AS own_ns,
    coalesce(tokens, 0) AS tokens, coalesce(idle, false) AS idle
FROM events
WHERE event = 'tick.step' AND tick IS NOT NULL AND plane IS NOT NULL
"""

_RELEASES: Final = """
CREATE TABLE releases AS
SELECT run, coalesce("set", 0) AS "set", epoch, plane, tick, max(at_ns) AS at_ns, max(wait_ns) AS wait_ns,
    any_value("last") AS "last", any_value(group_tokens) AS group_tokens
FROM events
WHERE event = 'tick.release' AND tick IS NOT NULL AND plane IS NOT NULL
GROUP BY ALL
"""

_SETS: Final = """
CREATE TABLE sets AS
WITH width AS (SELECT coalesce(max(len(group_tokens)), 1) AS width FROM releases)
SELECT "group", "group" // greatest(width, 1) AS "set"
FROM (SELECT DISTINCT "group" FROM ticks UNION SELECT DISTINCT "group" FROM steps WHERE "group" IS NOT NULL), width
"""


class TraceError(Exception):
    """A trace cannot be read or asked like that; the message says what to do."""


class TraceFile(msgspec.Struct, frozen=True, order=True):
    """One actor's file; ``age`` is 0 for the one being written, negative for those rotated away (oldest lowest)."""

    actor: str
    age: int
    path: Path


def trace_files(directory: Path) -> list[TraceFile]:
    """The trace files of a directory, each actor's oldest first."""
    found = []
    for path in directory.iterdir():
        match = _NAME.match(path.name)
        if match and path.is_file():
            found.append(TraceFile(match["actor"], -int(match["inner"] or match["outer"] or 0), path))
    return sorted(found)


def newest_trace(directories: Iterable[Path]) -> Path | None:
    """Of these directories, the one in which an actor wrote last; None if none holds a trace."""
    newest: tuple[int, Path] | None = None
    for directory in directories:
        if not directory.is_dir():
            continue
        times = [written for file in trace_files(directory) if (written := _modified(file.path)) is not None]
        if times and (newest is None or max(times) > newest[0]):
            newest = max(times), directory
    return newest[1] if newest else None


def _modified(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def open_trace(directory: Path) -> duckdb.DuckDBPyConnection:
    """Load every event of the directory; the connection can read no file and no network from then on.

    Raises ``TraceError`` when there is no such directory, no trace in it, or no event in the trace.
    """
    if not directory.is_dir():
        message = f"{directory} is not a directory; name the trace directory of a run with --dir."
        raise TraceError(message)
    connection = duckdb.connect(
        ":memory:",
        config={
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "python_enable_replacements": "false",
            "temp_directory": "",
        },
    )
    _load_events(connection, directory)
    _align_clocks(connection)
    _number_runs(connection)
    for statement in (_TICKS, _STEPS, _RELEASES, _SETS):
        connection.execute(statement)
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def _load_events(connection: duckdb.DuckDBPyConnection, directory: Path) -> None:
    failure = ""
    for _ in range(READ_ATTEMPTS):
        files = [file.path for file in trace_files(directory)]
        if not files:
            message = (
                f"There are no trace files in {directory}. A run writes them from its start: see that the mesh was "
                "started with tracing on ([trace] level), or name another directory with --dir."
            )
            raise TraceError(message)
        before = _identities(files)
        connection.execute("DROP TABLE IF EXISTS events")
        try:
            connection.execute(
                _LOAD,
                {
                    "columns": msgspec.json.encode(COLUMNS).decode(),
                    "files": [_literal(path) for path in files],
                    "line_bytes": LINE_BYTES,
                },
            )
        except duckdb.IOException as error:
            failure = str(error).splitlines()[0]
            continue
        if before == _identities([file.path for file in trace_files(directory)]):
            return
        failure = "the files were rotated while they were read"
    message = f"The trace in {directory} could not be read in {READ_ATTEMPTS} attempts: {failure}. Try again."
    raise TraceError(message)


def _identities(files: Sequence[Path]) -> dict[Path, int | None]:
    """Which file stands behind each name; a rotation changes it, growth does not."""
    identities: dict[Path, int | None] = {}
    for path in files:
        try:
            identities[path] = path.stat().st_ino
        except FileNotFoundError:
            identities[path] = None
    return identities


def _literal(path: Path) -> str:
    """A path that DuckDB takes as one file, whatever pattern characters are in it."""
    return re.sub(r"[\[*?]", lambda match: f"[{match[0]}]", str(path))


def _align_clocks(connection: duckdb.DuckDBPyConnection) -> None:
    """Put every event on one axis (``at_ns``, wall nanoseconds), ordered by the monotonic clock within a host.

    All processes of a host share one monotonic clock, so one offset serves them all, and a stepped wall clock
    cannot reorder them. Another host, or another boot, is told by its offset.
    """
    seconds = connection.execute(
        "SELECT (ts - mono) // 1000000000 AS second, min(ts - mono) FROM events GROUP BY second ORDER BY second"
    ).fetchall()
    if not seconds:
        message = "The trace files hold no events yet. Send a request, or look again when the mesh has started."
        raise TraceError(message)
    offsets: list[tuple[int, int]] = []
    base, last = seconds[0][1], seconds[0][0]
    for second, offset in seconds:
        if second - last > CLOCK_GAP_S:
            base = offset
        last = second
        offsets.append((second, base))
    connection.execute("CREATE TEMP TABLE clocks (second BIGINT, base BIGINT)")
    connection.executemany("INSERT INTO clocks VALUES (?, ?)", offsets)
    connection.execute(
        "UPDATE events SET at_ns = mono + clocks.base FROM clocks WHERE (ts - mono) // 1000000000 = clocks.second"
    )
    connection.execute("DROP TABLE clocks")


def _number_runs(connection: duckdb.DuckDBPyConnection) -> None:
    """Tell runs that share a directory apart (``run``, from 1): in each, ticks begin at 0 again.

    A supervisor starts its vault once in the first epoch of a run, before any other actor can write.
    """
    connection.execute("ALTER TABLE events ADD COLUMN run BIGINT DEFAULT 1")
    starts = connection.execute(
        "SELECT at_ns FROM events WHERE actor = 'supervisor-0' AND event = 'actor.spawned' AND epoch = 0 "
        "AND json_extract_string(record, '$.name') = 'vault-0' ORDER BY at_ns"
    ).fetchall()
    for run, (start,) in enumerate(starts[1:], 2):
        connection.execute("UPDATE events SET run = ? WHERE at_ns >= ?", [run, start])
