"""``edgemesh api``: the HTTP API as documents, and keys for it."""

from pathlib import Path
from typing import Annotated

import typer

from edgemesh.api.openapi import openapi_schemas
from edgemesh.api.parameters import FILE, parameter_files
from edgemesh.cli.api_key import key
from edgemesh.cli.files import write_files

app = typer.Typer(help="Describe the HTTP API, and make keys for it.", no_args_is_help=True)


@app.callback()
def api() -> None:
    """Describe the HTTP API, and make keys for it."""


app.command()(key)


@app.command()
def openapi(
    write: Annotated[Path | None, typer.Option(help="Write it as openapi.json into a directory.")] = None,
) -> None:
    """Print the OpenAPI document: every route, its parameters, bodies and errors."""
    files = openapi_schemas()
    if write is None:
        typer.echo(files["openapi.json"].decode(), nl=False)
    else:
        write_files(write, files)


@app.command()
def parameters(
    write: Annotated[Path | None, typer.Option(help=f"Write it as {FILE} into a directory.")] = None,
) -> None:
    """Print the table of parameters: what is served, within which bounds, and what is refused and why."""
    files = parameter_files()
    if write is None:
        typer.echo(files[FILE].decode(), nl=False)
    else:
        write_files(write, files)
