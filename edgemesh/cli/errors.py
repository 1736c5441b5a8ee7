"""The one place where a command that fails says so: one paragraph on stderr, with the remedy, and no stack."""

import typer
from rich.console import Console
from rich.text import Text


def fail(message: str, code: int = 1) -> typer.Exit:
    """Print the paragraph; raise what this returns."""
    Console(stderr=True).print(Text("error: ", style="bold red") + Text(message), soft_wrap=True)
    return typer.Exit(code)
