"""What a load leaves behind: one JSON file with the load, its summary and every call's own times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from edgemesh.bench.load import Load
from edgemesh.bench.prompts import Shape
from edgemesh.bench.statistics import Call, Summary

MAX_BYTES: Final = 1 << 30


class ReportError(ValueError):
    """A file that is no report of a load."""


class Report(Struct, frozen=True, forbid_unknown_fields=True):
    """One load; the lists are in milliseconds, one value for each good call (``itl_ms``: each gap)."""

    url: str
    shape: Shape
    load: Load
    summary: Summary
    e2e_ms: list[float]
    ttft_ms: list[float]
    itl_ms: list[float]
    tpot_ms: list[float]
    errors: list[str]


def report(url: str, shape: Shape, load: Load, summary: Summary, calls: Sequence[Call]) -> Report:
    """The report of a load that has ended."""
    good = [call for call in calls if not call.error]
    streamed = [call for call in good if call.stamps]
    return Report(
        url=url,
        shape=shape,
        load=load,
        summary=summary,
        e2e_ms=[call.e2e_ms for call in good],
        ttft_ms=[call.ttft_ms for call in streamed],
        itl_ms=[gap for call in streamed for gap in call.itl_ms],
        tpot_ms=[tpot for call in streamed if (tpot := call.tpot_ms) is not None],
        errors=sorted({call.error for call in calls if call.error}),
    )


def write(path: Path, made: Report) -> None:
    """Store a report; the numbers that a load without a good call does not have are null."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(made)))


def read(path: Path) -> Report:
    """The report in a file. Raises ``ReportError`` that names the file and the field."""
    try:
        if path.stat().st_size > MAX_BYTES:
            message = f"{path} is larger than {MAX_BYTES >> 20} MiB"
            raise ReportError(message)
        return msgspec.convert(_numbers(msgspec.json.decode(path.read_bytes())), Report)
    except OSError as error:
        message = f"{path}: {error.strerror or error}"
        raise ReportError(message) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"{path} is no report of `edgemesh bench serve --json`: {error}"
        raise ReportError(message) from error


def _numbers(raw: Any) -> Any:  # noqa: ANN401 - whatever the JSON holds
    """The summary's nulls as what they stand for: JSON has no NaN."""
    if isinstance(raw, dict) and isinstance(raw.get("summary"), dict):
        raw["summary"] = {
            name: {key: math.nan if each is None else each for key, each in value.items()}
            if isinstance(value, dict)
            else math.nan
            if value is None
            else value
            for name, value in raw["summary"].items()
        }
    return raw
