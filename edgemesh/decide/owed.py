"""The last words on requests that their gateway must still hear: its link took no message when they were due.

Without them a client would wait for tokens that no longer come.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from edgemesh.wire.messages import Failed, Rejected

Word = Failed | Rejected

RETRY_NS: Final = 50_000_000
"""How long to wait before a gateway is tried again."""

KEEP_NS: Final = 30_000_000_000
"""A gateway that takes nothing for so long is gone; that the supervisor sees itself."""

MOST: Final = 1 << 16
"""Words kept for one gateway, more than it may have streams by far; the oldest are dropped beyond that."""


class Owed:
    """Per gateway: one word for each attempt at a request, in the order in which they came to be owed."""

    def __init__(self) -> None:
        self._words: dict[int, OrderedDict[tuple[str, int], Word]] = {}
        self._since_ns: dict[int, int] = {}
        self._due_ns = 0

    def __contains__(self, gateway: int) -> bool:
        return gateway in self._words

    @property
    def deadline(self) -> int | None:
        """When to try again, or None."""
        return self._due_ns if self._words else None

    def add(self, word: Word, now_ns: int) -> None:
        """Owe a word; the first one on an attempt stays."""
        words = self._words.setdefault(word.gateway, OrderedDict())
        self._since_ns.setdefault(word.gateway, now_ns)
        words.setdefault((word.request, word.attempt), word)
        if len(words) > MOST:
            words.popitem(last=False)
        self._due_ns = now_ns + RETRY_NS

    def forgive(self, request: str, attempt: int) -> None:
        """The gateway says itself that nobody waits for this any more."""
        for gateway, words in list(self._words.items()):
            words.pop((request, attempt), None)
            if not words:
                self._forget(gateway)

    def pay(self, now_ns: int, say: Callable[[Word], bool]) -> None:
        """Say what is due; ``say`` tells whether it was taken, and the first that is not ends a gateway's turn."""
        if not self._words or now_ns < self._due_ns:
            return
        for gateway, words in list(self._words.items()):
            while words and say(next(iter(words.values()))):
                words.popitem(last=False)
                self._since_ns[gateway] = now_ns
            if not words or now_ns - self._since_ns[gateway] >= KEEP_NS:
                self._forget(gateway)
        self._due_ns = now_ns + RETRY_NS

    def _forget(self, gateway: int) -> None:
        del self._words[gateway], self._since_ns[gateway]
