"""The KV pages of one group: who holds each, which are free, and which must wait before they are used again.

A page is *held* by references (one per request whose block table names it), *waiting* while an unacknowledged step may
still touch it, *cached* when only the prefix index knows it, and else *free*. Cached pages are given out when no free ones
are left, the longest unused first. Page 0 is scratch: it is never given out and not counted.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from edgemesh.wire.ids import Plane

NO_FENCE: Final[Mapping[Plane, int]] = {}


class PagesExhaustedError(RuntimeError):
    """More pages were asked for than are free."""


class PagesCorruptError(RuntimeError):
    """The books do not balance: a page is held by nobody, or by two owners."""


@dataclass(slots=True)
class _Fence:
    """Pages that wait until ``planes`` more planes have acknowledged the step that may touch them."""

    planes: int
    pages: tuple[int, ...]


class Pages:
    """The page allocator of one group; every operation costs O(pages named).

    ``total`` counts page 0. ``on_evict`` is told of each cached page that is given out anew.
    """

    def __init__(self, total: int) -> None:
        if total < 2:
            message = f"a slab of {total} pages holds none beside the scratch page; the least is 2"
            raise ValueError(message)
        self.total = total
        self.on_evict: Callable[[int], None] = _no_index
        self._free = array("i", range(total - 1, 0, -1))
        self._references = array("i", bytes(4 * total))
        self._fenced = array("i", bytes(4 * total))
        self._indexed = bytearray(total)
        self._spare: OrderedDict[int, None] = OrderedDict()
        self._fences: dict[Plane, deque[tuple[int, _Fence]]] = {}
        self._acknowledged: dict[Plane, int] = {}

    @property
    def usable(self) -> int:
        """All pages but the scratch page."""
        return self.total - 1

    @property
    def free(self) -> int:
        """Pages that ``take`` can give at once, cached ones included."""
        return len(self._free) + len(self._spare)

    @property
    def cached(self) -> int:
        """Pages that only the prefix index knows; they count as free."""
        return len(self._spare)

    def take(self, count: int) -> tuple[int, ...]:
        """Give out pages, each held once.

        Raises ``PagesExhaustedError``, and gives none, if fewer are free.
        """
        if count > self.free:
            message = f"{count} pages asked for, {self.free} of {self.usable} are free"
            raise PagesExhaustedError(message)
        if count > len(self._free):
            self.evict(count - len(self._free))
        taken = tuple(self._free.pop() for _ in range(count))
        for page in taken:
            self._references[page] = 1
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        """One more reference to pages that are held, waiting or cached already."""
        for page in pages:
            if not self._references[page] and not self._indexed[page]:
                message = f"page {page} is free, so nothing in it can be held"
                raise PagesCorruptError(message)
            self._references[page] += 1
            self._spare.pop(page, None)

    def drop(self, pages: Sequence[int], after: Mapping[Plane, int] = NO_FENCE) -> None:
        """One reference less; pages that nobody holds become free, or cached if the index knows them.

        They wait until every plane of ``after`` has acknowledged the tick given there: the last that may touch them.
        """
        for page in pages:
            if self._references[page] < 1:
                message = f"page {page} is dropped more often than it was held"
                raise PagesCorruptError(message)
            self._references[page] -= 1
        fences = {plane: tick for plane, tick in after.items() if tick > self._acknowledged.get(plane, -1)}
        if not fences:
            self._settle(pages)
            return
        fence = _Fence(len(fences), tuple(pages))
        for page in fence.pages:
            self._fenced[page] += 1
        for plane, tick in fences.items():
            line = self._fences.setdefault(plane, deque())
            line.append((max(tick, line[-1][0]) if line else tick, fence))

    def acknowledge(self, plane: Plane, tick: int) -> None:
        """The plane's steps up to ``tick`` touch nothing any more."""
        self._acknowledged[plane] = tick
        line = self._fences.get(plane)
        while line and line[0][0] <= tick:
            _, fence = line.popleft()
            fence.planes -= 1
            if not fence.planes:
                for page in fence.pages:
                    self._fenced[page] -= 1
                self._settle(fence.pages)

    def reset(self) -> None:
        """A new epoch: no step of an older one runs any more, and ticks start again."""
        for plane, line in self._fences.items():
            if line:
                self.acknowledge(plane, line[-1][0])
        self._acknowledged.clear()

    def index(self, page: int) -> None:
        """The prefix index knows this page from now on; someone holds it."""
        if not self._references[page]:
            message = f"page {page} is indexed though nobody holds it"
            raise PagesCorruptError(message)
        self._indexed[page] = 1

    def indexed(self, page: int) -> bool:
        """Whether the prefix index knows this page."""
        return bool(self._indexed[page])

    def evict(self, count: int) -> int:
        """Turn up to ``count`` cached pages into free ones, the longest unused first; how many it were."""
        count = min(count, len(self._spare))
        for _ in range(count):
            page, _ = self._spare.popitem(last=False)
            self._indexed[page] = 0
            self._free.append(page)
            self.on_evict(page)
        return count

    def check(self) -> None:
        """Count every page anew: free + cached + waiting + held must be all. Raises ``PagesCorruptError`` with the figures."""
        free, cached = set(self._free), set(self._spare)
        held = {page for page in range(1, self.total) if self._references[page]}
        waiting = {page for page in range(1, self.total) if self._fenced[page]} - held
        figures = f"free {len(self._free)} + cached {len(cached)} + waiting {len(waiting)} + held {len(held)}"
        once = len(free) == len(self._free) and not (free & cached or (free | cached) & (held | waiting))
        if not once or len(free) + len(cached) + len(waiting) + len(held) != self.usable or 0 in free | cached | held:
            message = f"{figures} of {self.usable} pages: a page is lost or has two owners"
            raise PagesCorruptError(message)
        stray = [page for page in free if self._indexed[page]] + [page for page in cached if not self._indexed[page]]
        if stray:
            message = f"{figures}: pages {stray[:8]} are free but indexed, or cached but not indexed"
            raise PagesCorruptError(message)

    def _settle(self, pages: Sequence[int]) -> None:
        # The last pages of a sequence become evictable first: without its head, a chain is of no use.
        for page in reversed(pages):
            if self._references[page] or self._fenced[page]:
                continue
            if not self._indexed[page]:
                self._free.append(page)
            else:
                self._spare[page] = None


def _no_index(page: int) -> None:
    message = f"page {page} is cached, but no index was told"
    raise PagesCorruptError(message)
