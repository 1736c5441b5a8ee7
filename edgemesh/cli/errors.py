"""The one place where a command that fails says so: one paragraph on stderr, with the remedy, and no stack."""

import typer
from rich.console import Console
from rich.text import Text

from edgemesh.inspect.escape import plain


def fail(message: str, code: int = 1) -> typer.Exit:
    """Print the paragraph; raise what this returns."""
    complain("error", message)
    return typer.Exit(code)


def complain(what: str, message: str) -> None:
    """One paragraph on stderr; names and reasons in it may be anyone's, so none of it is markup or drives the terminal."""
    text = "\n".join(plain(line) for line in message.splitlines())
    Console(stderr=True).print(Text(f"{what}: ", style="bold red") + Text(text), soft_wrap=True)
