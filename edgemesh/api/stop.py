"""Stop strings in a text that comes in pieces.

The result does not depend on where the pieces are cut: a string that stops the text is the one that is complete
first (of several, the longest), just as if the text came character by character.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes a text on up to the first stop string.

    What may be the beginning of a stop string is held back until it turns out to be one, or not. ``include``: the text ends
    behind the stop string, not before it.
    """

    __slots__ = ("_firsts", "_held", "_include", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._include = include
        self._stops = tuple(stops)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The part of the text so far that may be shown and was not yet; nothing once ``matched``."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        found = min(((at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            end, at, self.matched = found
            self._held = ""
            return text[: end if self._include else at]
        cut = self._border(text)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """What was held back, now that nothing more comes."""
        text, self._held = self._held, ""
        return text

    def _border(self, text: str) -> int:
        """Where the first suffix of ``text`` starts that is the beginning of a stop string."""
        firsts = self._firsts
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in firsts and any(stop.startswith(text[at:]) for stop in self._stops):
                return at
        return len(text)
