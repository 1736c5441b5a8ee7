"""Reasoning between ``<think>`` and ``</think>`` at the beginning of a message, as Qwen3, DeepSeek and others write it."""

from __future__ import annotations

from typing import Final

from edgemesh.api.events import BLANKS, Sink
from edgemesh.api.source import Reading, Source

OPEN: Final = "<think>"
CLOSE: Final = "</think>"
CLOSING: Final = f"\n{CLOSE}\n\n"
"""What ends reasoning from outside."""


def think(source: Source, sink: Sink, *, opened: bool) -> Reading[bool]:
    """Read the reasoning, if the message begins with one; returns whether it did.

    With ``opened`` the prompt ended with the opening tag. Line ends beside the tags belong to the tags.
    """
    if not opened:
        before = yield from source.run(BLANKS)
        if not (yield from source.match(OPEN)):
            sink.say(before)
            return False
    sink.inside = True
    yield from source.run("\n")
    closed = yield from source.until(CLOSE, sink.think)
    if closed:
        sink.thought()
        sink.inside = False
        yield from source.run("\n")
    return True


def opens(prompt: str) -> bool:
    """Whether a rendered prompt ends inside of reasoning."""
    return prompt.rstrip().endswith(OPEN)


def closed(prompt: str) -> str:
    """The prompt, with the reasoning that it opens or that would follow over before it has begun."""
    return prompt + ("" if opens(prompt) else f"{OPEN}\n") + CLOSING


def closes(prompt: str) -> bool:
    """Whether a rendered prompt ends behind reasoning, so that none is to come."""
    return prompt.rstrip().endswith(CLOSE)
