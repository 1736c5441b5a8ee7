"""Processes of one measurement: started together, each prints its samples, none outlives a failure."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec


class ChildError(RuntimeError):
    """A measuring process failed or did not end; the message holds what it said."""


def run(
    commands: Sequence[Sequence[str]], servers: Sequence[Sequence[str]] = (), *, deadline_s: float
) -> list[list[int]]:
    """Run ``python -m`` with each command's words; the samples of each, in order.

    ``servers`` run beside them without an end of their own and are stopped at the end. Raises ``ChildError``.
    """
    serving = [_start(words) for words in servers]
    children = [_start(words) for words in commands]
    due = time.monotonic() + deadline_s
    try:
        return [_samples(child, due) for child in children]
    finally:
        for process in (*children, *serving):
            process.kill()
            process.communicate()


def call(words: Sequence[str], *, deadline_s: float) -> None:
    """Run one ``python -m`` command for what it does. Raises ``ChildError``."""
    child = _start(words)
    try:
        _output(child, time.monotonic() + deadline_s)
    finally:
        child.kill()
        child.communicate()


def _start(words: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - our own modules
        [sys.executable, "-m", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def _samples(child: subprocess.Popen[bytes], due: float) -> list[int]:
    return msgspec.json.decode(_output(child, due), type=list[int])


def _output(child: subprocess.Popen[bytes], due: float) -> bytes:
    try:
        out, err = child.communicate(timeout=max(0.1, due - time.monotonic()))
    except subprocess.TimeoutExpired as error:
        message = f"{child.args!r} did not end in time"
        raise ChildError(message) from error
    if child.returncode:
        message = f"{child.args!r} ended with {child.returncode}:\n{err.decode(errors='replace')[-4000:]}"
        raise ChildError(message)
    return out
