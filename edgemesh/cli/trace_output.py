"""How the trace commands find their trace, print, write files and fail."""

import os
import secrets
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any, Final, NoReturn

import duckdb
import msgspec
from rich.console import Console, RenderableType

from edgemesh.cli import errors
from edgemesh.inspect.facts import Timeline
from edgemesh.inspect.store import TraceError, newest_trace, open_trace
from edgemesh.inspect.terminal import decode_ns, prefill_ns, queued_ns
from edgemesh.runtime import paths

PIPE_WIDTH: Final = 160
"""Columns when the output is no terminal: nothing should be cut for a file's sake."""


def fail(message: str) -> NoReturn:
    """End with one paragraph on stderr."""
    raise errors.fail(message)


def trace_directory(directory: Path | None) -> Path:
    """The directory that was named, or that of the newest run."""
    if directory is not None:
        return directory
    runs = paths.state_dir()
    newest = newest_trace([runs, *runs.iterdir()]) if runs.is_dir() else None
    if newest is None:
        fail(
            f"No run has left a trace in {runs}. Start a mesh (`edgemesh start`) and send it a request, "
            "or name a run's trace directory with --dir."
        )
    beside = Console(stderr=True, highlight=False)
    if beside.is_terminal:
        beside.print(f"the newest run: {newest}", style="dim", markup=False)
    return newest


@contextmanager
def opened(directory: Path | None) -> Iterator[duckdb.DuckDBPyConnection]:
    """A loaded trace; what goes wrong with it, or in asking it, ends the command with a paragraph."""
    try:
        with closing(open_trace(trace_directory(directory))) as trace:
            yield trace
    except TraceError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.strerror or error}: {error.filename}." if error.filename else f"{error}.")


def terminal_console() -> Console:
    """Standard output, as wide as the terminal, or wide enough for a file."""
    fixed = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH
    return Console(width=fixed, highlight=False)


def print_all(console: Console, parts: Iterable[RenderableType]) -> None:
    """Print parts with a blank line between them."""
    for place, part in enumerate(parts):
        if place:
            console.print()
        console.print(part)


def print_json(value: object) -> None:
    """One JSON document on standard output; what JSON does not know is written as text."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode() + "\n")


def summary(timeline: Timeline) -> dict[str, Any]:
    """A request's line of the list, for scripts."""
    return {
        "request": timeline.request,
        "group": timeline.group,
        "prompt_tokens": timeline.prompt_tokens,
        "cached_tokens": timeline.cached_tokens,
        "output_tokens": timeline.output_tokens,
        "queue_ns": queued_ns(timeline),
        "prefill_ns": prefill_ns(timeline),
        "decode_ns": decode_ns(timeline),
        "ttft_ns": timeline.ttft_ns,
        "e2e_ns": timeline.e2e_ns,
        "finish": timeline.finish,
        "totals_ns": timeline.totals,
    }


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of ``path`` once it is whole."""
    made = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with made.open("xb") as out:
            yield out
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)
