"""``edgemesh trace``: where each millisecond of a request went, from the traces of a run, live or after it."""

import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from edgemesh.cli.trace_output import (
    fail,
    opened,
    print_all,
    print_json,
    replacing,
    summary,
    terminal_console,
    trace_directory,
)
from edgemesh.inspect import blame as blaming
from edgemesh.inspect import exports, follow, page, queries, sql, terminal, waterfall
from edgemesh.inspect.escape import plain

app = typer.Typer(no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)

LOOK_S: Final = 0.25
"""How often ``tail`` looks for new lines."""

Dir = Annotated[
    Path | None,
    typer.Option("--dir", help="A run's trace directory. Default: that of the newest run.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="JSON for scripts, in nanoseconds.")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, max=queries.MAX_REQUESTS, help="How many, at most.")]
PlaneOption = Annotated[str | None, typer.Option("--plane", help="prefill, decode or mixed.", show_default=False)]
GroupOption = Annotated[int | None, typer.Option("--group", min=0, help="Only this group.", show_default=False)]


@app.command()
def requests(
    directory: Dir = None, limit: Limit = 20, group: GroupOption = None, running: bool = False, as_json: Json = False
) -> None:
    """List requests, the slowest first (--running: only those that have not ended)."""
    with opened(directory) as trace:
        found = queries.slowest_requests(trace, limit=limit, group=group, running=running)
        if as_json:
            print_json([summary(timeline) for timeline in found])
        elif found:
            console = terminal_console()
            console.print(terminal.requests_table(found, console.width))
        else:
            fail("No request in the trace matches. Send one to the mesh, or leave out --group and --running.")


@app.command()
def show(
    request: Annotated[str, typer.Argument(metavar="ID", help="A request id, or the beginning of one.")],
    directory: Dir = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page for a browser instead.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Show one request's timeline across all actors: a waterfall, and which wait cost what."""
    with opened(directory) as trace:
        timeline = queries.timelines(trace, [queries.find_request(trace, request)])[0]
        if html is not None:
            with replacing(html) as out:
                out.write(page.render(timeline).encode())
            print(f"{html}: the timeline of {plain(timeline.request)}. Open it in a browser.")
        elif as_json:
            print_json(timeline)
        else:
            console = terminal_console()
            print_all(console, waterfall.show(timeline, console.width, blocks=not console.options.ascii_only))


@app.command()
def ticks(directory: Dir = None, plane: PlaneOption = None, limit: Limit = 10, as_json: Json = False) -> None:
    """Show what the steps of each plane took, and the slowest of them with who was last."""
    with opened(directory) as trace:
        planes = queries.plane_stats(trace, plane)
        slowest = queries.slowest_ticks(trace, plane=plane, limit=limit)
        if as_json:
            print_json({"planes": planes, "slowest": slowest})
        elif planes:
            console = terminal_console()
            tables = [terminal.planes_table(planes, console.width), terminal.ticks_table("The slowest ticks", slowest)]
            print_all(console, tables)
        else:
            seen = ", ".join(each.plane for each in queries.plane_stats(trace)) or "none yet"
            fail(f"No finished tick{f' of plane {plane!r}' if plane else ''} in the trace; planes with ticks: {seen}.")


@app.command()
def blame(directory: Dir = None, limit: Limit = 200, group: GroupOption = None, as_json: Json = False) -> None:
    """Say which phase, group or rank the time of the slowest requests went to."""
    with opened(directory) as trace:
        timelines = queries.slowest_requests(trace, limit=limit, group=group)
        if not timelines:
            fail("No request in the trace to ask about. Send one to the mesh, or leave out --group.")
        start, end = min(each.start for each in timelines), max(each.end for each in timelines)
        found = blaming.blame(timelines, queries.ticks_between(trace, start, end))
        if as_json:
            print_json(found)
        else:
            console = terminal_console()
            console.print(f"{found.requests} requests, {terminal.duration(found.e2e_ns)} of waiting clients in all")
            print_all(console, terminal.blame_tables(found))


@app.command()
def export(
    perfetto: Annotated[
        Path, typer.Option("--perfetto", help="Where to write a trace that ui.perfetto.dev opens.", show_default=False)
    ],
    directory: Dir = None,
    limit: Limit = queries.MAX_REQUESTS,
) -> None:
    """Write the trace for another tool: actors, ticks and requests on one time axis."""
    with opened(directory) as trace:
        timelines = queries.slowest_requests(trace, limit=limit)
        with replacing(perfetto) as out:
            written = exports.write_perfetto(trace, timelines, out)
    print(f"{perfetto}: {written:,} events, {len(timelines):,} requests. Open it at https://ui.perfetto.dev.")


@app.command()
def tail(
    *,
    directory: Dir = None,
    actor: Annotated[str | None, typer.Option(help="Actor or role it begins with.", show_default=False)] = None,
    event: Annotated[str | None, typer.Option(help="What the event begins with.", show_default=False)] = None,
    request: Annotated[str | None, typer.Option(help="What the request begins with.", show_default=False)] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=10_000, help="Lines to begin with.")] = 20,
    follow_on: Annotated[bool, typer.Option("--follow/--no-follow", help="Go on as the actors write.")] = True,
    as_json: Json = False,
) -> None:
    """Follow the events of all actors as they are written."""
    matches = follow.matches(actor, event, request)
    console = terminal_console()
    found = trace_directory(directory)
    if not found.is_dir():
        fail(f"{found} is not a directory; name the trace directory of a run with --dir.")
    with closing(follow.Follower(found)) as follower:
        shown = [line for line in follower.look() if matches(line)]
        shown = shown[len(shown) - min(lines, len(shown)) :]
        try:
            while True:
                for line in shown:
                    if as_json:
                        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
                    else:
                        console.print(terminal.event_line(line), soft_wrap=True)
                sys.stdout.flush()
                if not follow_on:
                    return
                time.sleep(LOOK_S)
                shown = [line for line in follower.look() if matches(line)]
        except KeyboardInterrupt:
            return


@app.command("sql")
def ask(
    query: Annotated[str, typer.Argument(help="One SELECT, e.g. 'SELECT event, count(*) FROM events GROUP BY ALL'.")],
    directory: Dir = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=sql.MAX_ROWS, help="Rows, at most.")] = 1000,
    as_json: Json = False,
) -> None:
    """Ask the trace in SQL (DuckDB). Tables: events, ticks, steps, releases, sets; nothing else can be reached."""
    with opened(directory) as trace:
        answer = sql.ask(trace, query, limit)
    if as_json:
        print_json([dict(zip(answer.columns, row, strict=True)) for row in answer.rows])
        return
    console = terminal_console()
    console.print(terminal.answer_table(answer, console.width))
    if answer.more:
        console.print(f"The first {limit} rows; --limit gives more.")
