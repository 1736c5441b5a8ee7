"""A text that comes in pieces, for parsers that are written as if all of it were there.

A parser is a generator that yields when it needs more text. What it does depends on the characters alone, never on
where the pieces were cut.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]


class Source:
    """The text that has come and was not read yet."""

    __slots__ = ("_at", "_ended", "_text")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False

    def feed(self, text: str) -> None:
        """More text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """Nothing more comes."""
        self._ended = True

    def skip(self, count: int) -> None:
        """Read on; ``count`` characters must be there."""
        self._at += count

    def some(self) -> Reading[str]:
        """What is there, at least one character; empty at the end. It counts as read only after ``skip``."""
        while self._at >= len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at :]

    def peek(self) -> Reading[str]:
        """The next character; empty at the end."""
        while self._at >= len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def run(self, characters: str) -> Reading[str]:
        """Read on while the text is of these characters; returns them."""
        parts = []
        while True:
            text = yield from self.some()
            rest = text.lstrip(characters)
            count = len(text) - len(rest)
            parts.append(text[:count])
            self.skip(count)
            if rest or not text:
                return "".join(parts)

    def match(self, tag: str) -> Reading[bool]:
        """Read ``tag`` if it comes next; else nothing is read."""
        while True:
            text = self._text[self._at : self._at + len(tag)]
            if text == tag:
                self.skip(len(tag))
                return True
            if self._ended or not tag.startswith(text):
                return False
            yield

    def until(self, tag: str, tell: Callable[[str], None]) -> Reading[bool]:
        """Tell all text before ``tag`` and read on behind it; false where the text ends without one."""
        while text := (yield from self.some()):
            at = text.find(tag)
            if at >= 0:
                tell(text[:at])
                self.skip(at + len(tag))
                return True
            kept = _border(text, tag)
            tell(text[: len(text) - kept])
            self.skip(len(text) - kept)
            if not kept:
                continue
            if self._ended:
                tell(text[len(text) - kept :])
                self.skip(kept)
                return False
            yield
        return False


def _border(text: str, tag: str) -> int:
    """Characters at the end of ``text`` that may be the beginning of ``tag``."""
    for count in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:count]):
            return count
    return 0
