"""Whether a grammar can be used at all, found out before its request goes any further, and away from the gateway's loop."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from hashlib import blake2b
from typing import Final

from edgemesh.actors.workshop import Workshop
from edgemesh.api.errors import unavailable

KEPT: Final = 1024
"""Verdicts that are remembered; whoever asks with a grammar asks again with the same."""

REFUSED_NS: Final = 60_000_000_000
"""How long a bad verdict stands: a busy machine may have taken too long."""

MAX_WAITING: Final = 256
"""Grammars that may be under way at once; each may take seconds."""


class Checker:
    """Asks a workshop about one grammar after the other, from the loop that it is first used in."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self._verdicts: OrderedDict[bytes, tuple[str, int]] = OrderedDict()
        self._waiting: dict[int, asyncio.Future[str]] = {}
        self._last = 0
        self._watched: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def check(self, source: str) -> str:
        """Nothing if something can be generated under this source, else why not, in a sentence.

        Raises ``ApiError`` 503 where too many are under way.
        """
        mark = blake2b(source.encode(errors="surrogatepass"), digest_size=16).digest()
        verdict, since_ns = self._verdicts.get(mark, ("", 0))
        if not since_ns or (verdict and self._workshop.now() - since_ns > REFUSED_NS):
            verdict = await self._ask(source)
            self._verdicts[mark] = verdict, self._workshop.now()
        self._verdicts.move_to_end(mark)
        if len(self._verdicts) > KEPT:
            self._verdicts.popitem(last=False)
        return verdict

    def close(self) -> None:
        """End the process, if one was started."""
        self._unwatch()
        self._workshop.close()

    async def _ask(self, source: str) -> str:
        if len(self._waiting) >= MAX_WAITING:
            message = f"{len(self._waiting)} grammars are being checked already; try again later"
            raise unavailable(message)
        key = self._last = self._last + 1
        waiting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[key] = waiting
        try:
            self._workshop.ask(key, source, ())
            self._watch()
            return await waiting
        finally:
            del self._waiting[key]
            self._workshop.drop(key)
            self._watch()

    def _turn(self) -> None:
        self._unwatch()  # before another process takes the descriptor's number
        for found in self._workshop.take():
            waiting = self._waiting.get(found.key)
            if waiting is not None and not waiting.done():
                waiting.set_result(found.error)
        self._watch()

    def _watch(self) -> None:
        """Turn when the workshop has something to say, or has said nothing for too long."""
        loop = asyncio.get_running_loop()
        descriptor = self._workshop.fileno()
        if descriptor != self._watched:
            self._unwatch()
            if descriptor is not None:
                loop.add_reader(descriptor, self._turn)
                self._watched = descriptor
        if self._timer is not None:
            self._timer.cancel()
        due, now = self._workshop.deadline(), self._workshop.now()
        self._timer = None if due is None else loop.call_later(max(0, due - now) / 1e9, self._turn)

    def _unwatch(self) -> None:
        if self._watched is not None:
            asyncio.get_running_loop().remove_reader(self._watched)
            self._watched = None
