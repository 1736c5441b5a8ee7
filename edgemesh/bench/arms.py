"""What a comparison of meshes is: arms (each a mesh, or a server that runs already), the loads that all of them get, and the tables; pure.

A spec is a TOML file. The first arm is what the others are compared with.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from edgemesh.bench.prompts import FIRST_ID, Endpoint
from edgemesh.bench.statistics import Summary

Name = Annotated[str, Meta(pattern=r"\A[a-z0-9][a-z0-9._-]{0,47}\Z")]
Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Value = str | int | float | bool

_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<field>.*?)`(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)


class SpecError(ValueError):
    """A file that is no spec; the message names the key and what is allowed."""


class Part(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file."""


class ModelShape(Part, frozen=True, kw_only=True):
    """A model of noise in the shape of ``config`` (the keys of a ``config.json``), with a pulled model's ``tokenizer``."""

    tokenizer: str = "smollm2-135m"
    config: dict[str, Any]


class Arm(Part, frozen=True, kw_only=True):
    """One mesh: a topology and what is set over it; or ``url``, a server that someone else has started."""

    name: Name
    topology: str = ""
    url: str = ""
    set: dict[str, Value] = {}


class ArmLoad(Part, frozen=True, kw_only=True):
    """One load that every arm gets; ``rate`` 0 is the closed loop. A mesh puts all of it on ``group``, if one is given."""

    name: Name
    concurrency: Count
    requests: Count
    input_len: Count
    output_len: Count
    rate: Annotated[float, Meta(ge=0)] = 0.0
    warmup: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    endpoint: Endpoint = Endpoint.COMPLETIONS
    group: Annotated[int, Meta(ge=0, le=1 << 16)] | None = None


class Spec(Part, frozen=True, kw_only=True):
    """The whole file; ``set`` holds for every arm, ``environment`` for the processes of every mesh."""

    title: str
    arms: Annotated[list[Arm], Meta(min_length=1, max_length=32)]
    loads: Annotated[list[ArmLoad], Meta(min_length=1, max_length=32)]
    model: ModelShape | None = None
    vocab: Annotated[int, Meta(ge=FIRST_ID + 1)] = 32000
    start_s: Annotated[float, Meta(gt=0, le=3600)] = 300.0
    set: dict[str, Value] = {}
    environment: dict[str, str] = {}


class Share(Struct, frozen=True):
    """What one plane of an arm's mesh did, from its trace; milliseconds, and shares from 0 to 1."""

    plane: str
    steps: int
    step_ms: float
    collectives: float
    barrier: float


class Outcome(Struct, frozen=True):
    """One arm under one load."""

    arm: str
    load: str
    summary: Summary
    tokens_of_groups: list[int] = []
    shares: list[Share] = []


def parse(text: str) -> Spec:
    """The spec in a TOML text. Raises ``SpecError``."""
    try:
        spec = msgspec.convert(tomllib.loads(text), Spec)
    except tomllib.TOMLDecodeError as error:
        message = f"this is not TOML: {error}"
        raise SpecError(message) from error
    except msgspec.ValidationError as error:
        raise SpecError(_explained(str(error))) from error
    for kind, names in (("arms", [arm.name for arm in spec.arms]), ("loads", [load.name for load in spec.loads])):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            message = f"{kind}: the name {twice[0]!r} is there twice; each needs its own"
            raise SpecError(message)
    for arm in spec.arms:
        if bool(arm.topology) == bool(arm.url):
            message = f"arm {arm.name!r}: give either `topology` (a mesh to start) or `url` (a server that runs)"
            raise SpecError(message)
        if arm.url and arm.set:
            message = f"arm {arm.name!r}: `set` is for a mesh that is started here, not for a `url`"
            raise SpecError(message)
    return spec


def _explained(error: str) -> str:
    match = _UNKNOWN.fullmatch(error)
    if match is None:
        return error
    every = {field for part in (Spec, Arm, ArmLoad, ModelShape) for field in part.__struct_fields__}
    near = difflib.get_close_matches(match["field"], sorted(every), n=1)
    where = f"{match['path']}.{match['field']}" if match["path"] else match["field"]
    return f"{where}: no such key" + (
        f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(every))}"
    )


def overrides_of(spec: Spec, arm: Arm, model: str) -> dict[str, Value]:
    """Everything that is set over an arm's topology: what follows from the model, the spec's, the arm's own."""
    shaped: dict[str, Value] = (
        {"model.path": model, "model.weights": "random", "model.served_name": "m"} if model else {}
    )
    return shaped | spec.set | arm.set


def tables(spec: Spec, outcomes: Sequence[Outcome]) -> str:
    """A Markdown table for each load, with ratios to the first arm that has figures for it."""
    parts = [f"**{spec.title}**"]
    for load in spec.loads:
        found = [each for each in outcomes if each.load == load.name]
        if found:
            parts.append(_table(load, found))
    shared = [each for each in outcomes if each.shares]
    if shared:
        parts.append(_planes(shared))
    return "\n\n".join(parts) + "\n"


_FIGURES: Final[Sequence[tuple[str, str]]] = (
    ("total tok/s", "total_tokens_per_s"),
    ("output tok/s", "output_tokens_per_s"),
    ("TTFT p50 ms", "ttft_ms.p50"),
    ("TTFT p99 ms", "ttft_ms.p99"),
    ("ITL p50 ms", "itl_ms.p50"),
    ("ITL p99 ms", "itl_ms.p99"),
    ("TPOT p50 ms", "tpot_ms.p50"),
    ("e2e mean ms", "e2e_ms.mean"),
    ("duration s", "duration_s"),
)


def _table(load: ArmLoad, outcomes: Sequence[Outcome]) -> str:
    manner = f"{load.rate:g} a second" if load.rate else f"{load.concurrency} at once"
    title = (
        f"{load.name}: {load.input_len} in, {load.output_len} out, {load.requests} requests, {manner}"
        f" (in brackets: ratio to {outcomes[0].arm})"
    )
    lines = [
        title,
        "",
        "| | " + " | ".join(name for name, _ in _FIGURES) + " | failed |",
        "|---|" + "---:|" * (len(_FIGURES) + 1),
    ]
    base = outcomes[0]
    for each in outcomes:
        cells = [_cell(_figure(each, path), _figure(base, path), first=each is base) for _, path in _FIGURES]
        lines.append(f"| {each.arm} | " + " | ".join(cells) + f" | {each.summary.failed} |")
    return "\n".join(lines)


def _planes(outcomes: Sequence[Outcome]) -> str:
    lines = [
        "Steps, from the traces (collectives: share of the ranks' step time as the host sees it; barrier: wait over wait and step):",
        "",
        "| arm | load | plane | steps | mean step ms | collectives | barrier | tokens of each group |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    lines += [
        f"| {each.arm} | {each.load} | {share.plane} | {share.steps} | {share.step_ms:.2f} | {share.collectives:.1%} |"
        f" {share.barrier:.1%} | {', '.join(map(str, each.tokens_of_groups))} |"
        for each in outcomes
        for share in each.shares
    ]
    return "\n".join(lines)


def _figure(outcome: Outcome, path: str) -> float:
    value: Any = outcome.summary
    for name in path.split("."):
        value = getattr(value, name)
    return float(value)


def _cell(value: float, base: float, *, first: bool) -> str:
    shown = f"{value:.0f}" if value >= 1000 else f"{value:.1f}"
    return shown if first or not base else f"{shown} ({value / base:.2f})"
