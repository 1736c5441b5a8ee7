"""``edgemesh doctor``: look at this machine as a topology would use it, and say what to do."""

from collections.abc import Iterator
from typing import Annotated, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from edgemesh.cli.doctor_gpu import gpu_findings
from edgemesh.cli.doctor_machine import Finding, Verdict, machine_findings
from edgemesh.cli.errors import fail
from edgemesh.engine.locate import locate, to_be_pulled
from edgemesh.engine.shape import ModelError
from edgemesh.topology import Topology, TopologyError, load

_STYLE: Final = {
    Verdict.OK: "green",
    Verdict.NOTE: "cyan",
    Verdict.WARN: "yellow",
    Verdict.FAIL: "bold red",
}


def doctor(
    topology: Annotated[
        str, typer.Option(help="The topology that is to run: a file, or the name of a shipped one.")
    ] = "demo",
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="section.key=value over the file's; repeatable.", show_default=False),
    ] = None,
) -> None:
    """Check this machine for what a mesh needs; exits with 1 if it would not start."""
    try:
        wanted = load(topology, overrides or ())
    except TopologyError as error:
        raise fail(str(error), 2) from error
    findings = list(all_findings(wanted))
    Console().print(report(findings))
    if any(finding.verdict is Verdict.FAIL for finding in findings):
        raise typer.Exit(1)


def all_findings(topology: Topology) -> Iterator[Finding]:
    """The machine's, the model's, the cards'."""
    yield from machine_findings(topology)
    yield model_finding(topology)
    yield from gpu_findings(topology)


def model_finding(topology: Topology) -> Finding:
    """Whether the topology's model is here."""
    try:
        directory = locate(topology.model.path)
    except ModelError as error:
        if to_be_pulled(topology.model.path):
            return Finding("model", Verdict.NOTE, str(error), "start pulls it by itself")
        return Finding("model", Verdict.FAIL, str(error))
    return Finding("model", Verdict.OK, f"{topology.model.path}: {directory}")


def report(findings: list[Finding]) -> Table:
    """The findings as a table, the remedy beside each that needs one."""
    table = Table(box=SIMPLE_HEAD)
    for column in ("what", "verdict", "found", "what to do"):
        table.add_column(column, overflow="fold", no_wrap=column in {"what", "verdict"})
    for finding in findings:
        style = _STYLE[finding.verdict]
        # Text, since what was found may hold brackets that look like markup.
        table.add_row(finding.what, Text(finding.verdict, style), Text(finding.found), Text(finding.remedy))
    return table
