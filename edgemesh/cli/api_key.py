"""``edgemesh api key``: a new API key, and the line by which a gateway knows it."""

import os
import secrets
from pathlib import Path
from typing import Annotated, Final

import typer

from edgemesh.api.keys import MOST, KeyFileError, KeyLimits, hashed_line, parse_keys
from edgemesh.cli.errors import fail

PREFIX: Final = "em-"


def key(
    name: Annotated[
        str, typer.Option(help="What the file calls the key; letters, digits, . _ -", show_default=False)
    ] = "",
    max_requests: Annotated[
        int, typer.Option(min=0, max=MOST, help="Requests that it may have open.", show_default=False)
    ] = 0,
    requests_per_minute: Annotated[
        int, typer.Option(min=0, max=MOST, help="Requests that it may make a minute.", show_default=False)
    ] = 0,
    tokens_per_minute: Annotated[
        int, typer.Option(min=0, max=MOST, help="Tokens that it may use a minute.", show_default=False)
    ] = 0,
    file: Annotated[
        Path | None,
        typer.Option("--file", help="Add the line to this file (gateway.api_keys_file), made if it is not there."),
    ] = None,
) -> None:
    """Print a new random key, and the line that a key file needs of it: a hash, from which nobody finds the key."""
    fresh = PREFIX + secrets.token_urlsafe(32)
    line = hashed_line(fresh, name, KeyLimits(max_requests, requests_per_minute, tokens_per_minute))
    try:
        parse_keys(line, KeyLimits(), "the new key")
        if file is not None:
            _append(file, line)
    except (KeyFileError, OSError) as error:
        raise fail(str(error), 2) from error
    typer.echo(fresh)
    if file is None:
        typer.echo(line)


def _append(path: Path, line: str) -> None:
    """Add a line at once, so that a gateway never reads half of it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        joint = "\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else ""
        os.write(descriptor, f"{joint}{line}\n".encode())
    finally:
        os.close(descriptor)
