"""``edgemesh``: each command lives in a module of its own, imported only when it is the one that was asked for."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any, Final

import typer

from edgemesh import __version__

COMMANDS: Final = {
    "start": ("edgemesh.cli.start:start", "Start a mesh and serve the OpenAI API."),
    "topology": ("edgemesh.cli.topology:app", "Check, show and describe topology files."),
    "trace": ("edgemesh.cli.trace:app", "Say where a request's time went."),
    "bench": ("edgemesh.cli.bench:app", "Measure a mesh, or any OpenAI endpoint."),
    "api": ("edgemesh.cli.api:app", "Describe the HTTP API, and make keys for it."),
    "pull": ("edgemesh.cli.pull:pull", "Download a model into the user's cache."),
    "doctor": ("edgemesh.cli.doctor:doctor", "Check this machine for what a mesh needs."),
}


def main() -> None:
    """The console script."""
    application(sys.argv[1:])()


def application(arguments: list[str]) -> typer.Typer:
    """The whole program, of which only the command that ``arguments`` name is imported."""
    app = typer.Typer(
        name="edgemesh",
        help="LLM serving on boxes of consumer GPUs without NVLink.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    app.callback()(_options)
    asked = next((argument for argument in arguments if not argument.startswith("-")), "")
    for name, (place, text) in COMMANDS.items():
        _add(app, name, _imported(place) if name == asked else _unimported, text)
    return app


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"edgemesh {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    del version  # its callback has seen to it


def _add(app: typer.Typer, name: str, command: typer.Typer | Callable[..., Any], text: str) -> None:
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name, help=text)
    else:
        app.command(name, help=text)(command)


def _imported(place: str) -> typer.Typer | Callable[..., Any]:
    module, _, attribute = place.partition(":")
    command: typer.Typer | Callable[..., Any] = getattr(import_module(module), attribute)
    return command


def _unimported() -> None:
    """Stands in the list of commands for one that was not asked for."""


if __name__ == "__main__":
    main()
