"""Files that a command writes where it is told to."""

from pathlib import Path

import typer


def write_files(directory: Path, files: dict[str, bytes]) -> None:
    """Write each of ``files`` (name -> content) into ``directory``, and say so."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        typer.echo(f"wrote {path}")
