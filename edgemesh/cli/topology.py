"""``edgemesh topology``: check a topology file, show what it comes to, print its schema."""

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from edgemesh.api.openapi import openapi_schemas
from edgemesh.cli.errors import complain, fail
from edgemesh.cli.files import write_files
from edgemesh.topology import Mesh, Topology, TopologyError, derive, load, preflight
from edgemesh.topology.budget import check_budget, read_numbers
from edgemesh.topology.draw import headline, mermaid, svg
from edgemesh.topology.proof import violations
from edgemesh.topology.schema import topology_schemas
from edgemesh.wire.catalogue import CARRIES
from edgemesh.wire.ids import Role
from edgemesh.wire.schema import wire_schemas

app = typer.Typer(help="Check, show and describe topology files.", no_args_is_help=True)

RUN_DIR = "/run/user/0/edgemesh"
"""Stands in for the run directory, which a start chooses."""

File = Annotated[str, typer.Argument(help="A topology file, or the name of a shipped one (demo, tp8-dp2, ...).")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="section.key=value over the file's; repeatable.")]


@app.command()
def check(
    file: File,
    overrides: Overrides = None,
    model: Annotated[
        Path | None, typer.Option(help="Model directory whose config.json the memory budget uses.")
    ] = None,
    card_gb: Annotated[float, typer.Option(min=1, max=1024, help="Memory of one card, in GiB.")] = 24.0,
    machine: Annotated[bool, typer.Option(help="Also ask this machine: ports, paths, permissions.")] = False,
) -> None:
    """Validate a file, prove its mesh's invariants, and check that it fits the cards."""
    topology, mesh = _mesh(file, overrides)
    problems = violations(mesh)
    if machine:
        problems += preflight(topology)
    console = Console()
    console.print(_title(file, mesh), soft_wrap=True)
    if not problems:
        proof = "no link with request or step data reaches two groups"
        console.print(f"{len(mesh.actors)} actors, {len(mesh.links)} links; {proof}.", highlight=False, soft_wrap=True)
    try:
        _budget(console, topology, model, card_gb)
    except TopologyError as error:
        problems.append(str(error))
    for problem in problems:
        complain("problem", problem)
    if problems:
        raise typer.Exit(1)


def _budget(console: Console, topology: Topology, model: Path | None, card_gb: float) -> None:
    """Print the memory budget of a CUDA topology, or that the model's numbers are not at hand."""
    local = Path(topology.model.path).expanduser()
    directory = model or (local if (local / "config.json").is_file() else None)
    if topology.engine.device != "cuda" and model is None:
        return
    if directory is None:
        console.print(
            f"no memory budget: the config.json of model.path = {topology.model.path!r} is not at hand;"
            " give its directory with --model",
            highlight=False,
            soft_wrap=True,
        )
        return
    found = check_budget(topology, read_numbers(directory), int(card_gb * (1 << 30)))
    console.print(
        f"each card: {found.weights_bytes / 1e9:.1f} GB of weights, {found.overhead_bytes / 1e9:.1f} GB beside them,"
        f" {found.kv_bytes / 1e9:.1f} GB of KV",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"each group: {found.kv_tokens:,} tokens of KV, {found.full_requests:.1f} requests of {found.longest:,} tokens;"
        f" all groups: {found.kv_tokens * topology.mesh.dp:,} tokens",
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def show(
    file: File,
    overrides: Overrides = None,
    svg_file: Annotated[Path | None, typer.Option("--svg", help="Write the picture to this file.")] = None,
    as_mermaid: Annotated[bool, typer.Option("--mermaid", help="Print the picture as Mermaid text.")] = False,
) -> None:
    """Print every actor and link, or draw them."""
    _, mesh = _mesh(file, overrides)
    if as_mermaid:
        typer.echo(mermaid(mesh), nl=False)
    if svg_file is not None:
        svg_file.write_text(svg(mesh), encoding="utf-8")
        typer.echo(f"wrote {svg_file}")
    if as_mermaid or svg_file is not None:
        return
    console = Console()
    console.print(_title(file, mesh), soft_wrap=True)
    console.print(_actors(mesh))
    console.print(_links(mesh))


def _title(file: str, mesh: Mesh) -> Text:
    return Text(file, style="bold") + Text(f": {headline(mesh)}", style="")


def _actors(mesh: Mesh) -> Table:
    """One row per actor, and one per group and plane for its ranks."""
    table = Table(
        "actor", "host", "group", "plane", "hears from", title="actors", title_justify="left", box=SIMPLE_HEAD
    )
    ranks = [mesh.rank_names(group, plane) for plane in mesh.planes for group in mesh.groups]
    others = [(actor.name,) for actor in mesh.actors if actor.role is not Role.RANK]
    for names in [*others, *ranks]:
        actor = mesh.actor(names[0])
        hosts = sorted({mesh.actor(name).host for name in names})
        table.add_row(
            _some(names),
            ", ".join(mesh.topology.mesh.hosts[host] for host in hosts),
            "" if actor.group is None else str(actor.group),
            actor.plane or "",
            " ".join(link.name for link in mesh.links_of(actor.name) if actor.name in link.receivers),
        )
    return table


def _links(mesh: Mesh) -> Table:
    """One row per link; endpoints only where some are not files of the run directory."""
    endpoints = any(link.endpoint.startswith("tcp://") for link in mesh.links)
    headers = ["link", "scope", "from", "to", "may carry", *(["endpoint"] if endpoints else [])]
    table = Table(*headers, title="links", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name, column in zip(headers, table.columns, strict=True):
        column.no_wrap = name != "may carry"
        column.overflow = "fold"
    for link in mesh.links:
        scope = link.scope if link.group is None else f"{link.scope}({link.group})"
        carries = " ".join(message.__name__ for message in CARRIES[link.kind])
        row = [link.name, scope, _some(link.senders), _some(link.receivers), carries]
        table.add_row(*row, *([link.endpoint.replace(RUN_DIR, "RUN_DIR")] if endpoints else []))
    return table


def _some(names: tuple[str, ...]) -> str:
    """The names, or the first and the last of many."""
    return "\n".join(names) if len(names) <= 2 else f"{names[0]}\n.. {names[-1]}"


@app.command()
def schema(
    write: Annotated[
        Path | None,
        typer.Option(help="Write this, the schemas of all messages and inboxes, and the HTTP API's into a directory."),
    ] = None,
) -> None:
    """Print the JSON Schema of a topology file: every key, its meaning, bounds and default."""
    files = topology_schemas()
    if write is None:
        typer.echo(files["topology.json"].decode(), nl=False)
        return
    write_files(write, files | wire_schemas() | openapi_schemas())


def _mesh(file: str, overrides: list[str] | None) -> tuple[Topology, Mesh]:
    try:
        topology = load(file, overrides or ())
        return topology, derive(topology, RUN_DIR)
    except TopologyError as error:
        raise fail(str(error), 2) from error
