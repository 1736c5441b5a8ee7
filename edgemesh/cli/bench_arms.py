"""`edgemesh bench arms`: meshes side by side under the same loads, one after the other, from a spec file.

Every load's report is written as soon as it is there, and so are the tables: a run that is cut short loses nothing that it measured.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import duckdb
import msgspec

from edgemesh.bench import prompts
from edgemesh.bench.arms import Arm, ArmLoad, Outcome, Share, Spec, overrides_of, tables
from edgemesh.bench.client import target
from edgemesh.bench.launch import Launched, LaunchError
from edgemesh.bench.load import Load, drive, model_of
from edgemesh.bench.report import Report, report, write
from edgemesh.bench.statistics import summarise
from edgemesh.engine.locate import locate
from edgemesh.inspect.store import open_trace

Say = Callable[[str], None]

TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

FLUSHED_S: Final = 1.0
"""Actors write their traces' last lines a few times a second."""

_SHARES: Final = """
SELECT plane, count(*), avg(step_ns) / 1e6, sum(collective_ns) / greatest(sum(step_ns), 1),
    (SELECT sum(w) / greatest(sum(w) + sum(s), 1) FROM (
        SELECT greatest(plan - greatest(coalesce(arrive, plan), coalesce(previous, 0)), 0) AS w, coalesce(step_ns, 0) AS s
        FROM ticks WHERE ticks.plane = steps.plane AND NOT idle AND plan BETWEEN $start AND $end))
FROM steps WHERE NOT idle AND at_ns BETWEEN $start AND $end GROUP BY plane ORDER BY plane
"""

_GROUPS: Final = """
SELECT sum(tokens) FROM ticks WHERE plan BETWEEN $start AND $end AND NOT idle GROUP BY "group" ORDER BY "group"
"""


def run(spec: Spec, directory: Path, minutes: float, say: Say) -> Iterator[Outcome]:
    """Measure every arm under every load; no arm is begun once ``minutes`` are over. Raises ``LaunchError`` and ``OSError``."""
    directory.mkdir(parents=True, exist_ok=True)
    due = time.monotonic() + 60 * minutes
    model = _model(spec, directory)
    outcomes: list[Outcome] = []
    for arm in spec.arms:
        if time.monotonic() > due:
            say(f"{arm.name}: left out, {minutes:g} minutes are over")
            continue
        for outcome in _arm(spec, arm, model, directory, say):
            outcomes.append(outcome)
            (directory / "tables.md").write_text(tables(spec, outcomes), encoding="utf-8")
            (directory / "outcomes.json").write_bytes(msgspec.json.format(msgspec.json.encode(outcomes)))
            yield outcome


def _arm(spec: Spec, arm: Arm, model: str, directory: Path, say: Say) -> Iterator[Outcome]:
    if arm.url:
        for load in spec.loads:
            say(f"{arm.name}: {load.name}")
            yield Outcome(arm.name, load.name, _drive(spec, arm, load, arm.url, directory).summary)
        return
    say(f"{arm.name}: starting")
    # A trace must not be rotated away before its shares are read.
    overrides = overrides_of(spec, arm, model) | {"trace.max_bytes": 1 << 30}
    launched = Launched(arm.topology, overrides, environment=os.environ | spec.environment)
    try:
        launched.wait_healthy(spec.start_s)
        for load in spec.loads:
            say(f"{arm.name}: {load.name}")
            start = time.time_ns()
            made = _drive(spec, arm, load, launched.url, directory)
            end = time.time_ns()
            time.sleep(FLUSHED_S)
            shares, groups = _traced(launched.traces, start, end)
            yield Outcome(arm.name, load.name, made.summary, groups, shares)
        launched.stop()
    except LaunchError:
        (directory / f"{arm.name}.log").write_text(launched.tell(arm.name), encoding="utf-8")
        raise
    finally:
        launched.close()


def _drive(spec: Spec, arm: Arm, load: ArmLoad, url: str, directory: Path) -> Report:
    goal = target(url, os.environ.get("OPENAI_API_KEY", ""))
    shape = prompts.Shape(
        model_of(goal),
        load.endpoint,
        prompts.PromptKind.TOKENS,
        load.input_len,
        load.output_len,
        spec.vocab,
        # Each load of an arm has prompts of its own, the same for all arms: no cache has seen them.
        seed=1 + [each.name for each in spec.loads].index(load.name),
        group=load.group,
    )
    shaped = Load(load.requests, load.concurrency, load.rate, load.warmup)
    calls = drive(goal, shape, shaped, lambda _: None)
    made = report(url, shape, shaped, summarise(calls), calls)
    write(directory / f"{arm.name}-{load.name}.json", made)
    return made


def _traced(traces: Path, start: int, end: int) -> tuple[list[Share], list[int]]:
    """What the planes did between two wall-clock times, and the tokens that each group ran."""
    span = {"start": start, "end": end}
    trace: duckdb.DuckDBPyConnection = open_trace(traces)
    try:
        shares = [
            Share(plane, steps, step_ms, float(collectives or 0), float(barrier or 0))
            for plane, steps, step_ms, collectives, barrier in trace.execute(_SHARES, span).fetchall()
        ]
        return shares, [int(tokens) for (tokens,) in trace.execute(_GROUPS, span).fetchall()]
    finally:
        trace.close()


def _model(spec: Spec, directory: Path) -> str:
    """The directory of a model in the spec's shape, or nothing where the topologies name their models."""
    if spec.model is None:
        return ""
    made = directory / "model"
    made.mkdir(exist_ok=True)
    (made / "config.json").write_text(json.dumps(spec.model.config, indent=1), encoding="utf-8")
    source = locate(spec.model.tokenizer)
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, made / name)
    return str(made.resolve())
