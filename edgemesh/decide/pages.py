"""The KV pages of one group: who holds each, which are free, and which the prefix index keeps.

A page is *held* by references (one per request whose block table names it, or one while a step that may touch it is under
way), *cached* when only the prefix index knows it, and else *free*. Cached pages are given out when no free ones are left,
the longest unused first. Page 0 is scratch: it is never given out and not counted.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

AUDITED: Final = 1 << 12
"""Pages that are looked at between two pauses of an audit."""


class PagesExhaustedError(RuntimeError):
    """More pages were asked for than are free."""


class PagesCorruptError(RuntimeError):
    """The books do not balance: a page is held by nobody, or by two owners."""


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
        self._indexed = bytearray(total)
        self._spare: OrderedDict[int, None] = OrderedDict()

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
        """One more reference to pages that are held or cached already."""
        for page in pages:
            if not self._references[page] and not self._indexed[page]:
                message = f"page {page} is free, so nothing in it can be held"
                raise PagesCorruptError(message)
            self._references[page] += 1
            self._spare.pop(page, None)

    def drop(self, pages: Sequence[int]) -> None:
        """One reference less; pages that nobody holds become free, or cached if the index knows them."""
        # The last pages of a sequence are evicted first: without its head, a chain is of no use.
        for page in reversed(pages):
            if self._references[page] < 1:
                message = f"page {page} is dropped more often than it was held"
                raise PagesCorruptError(message)
            self._references[page] -= 1
            if self._references[page]:
                continue
            if self._indexed[page]:
                self._spare[page] = None
            else:
                self._free.append(page)

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
        """Count every page anew: free + cached + held must be all. Raises ``PagesCorruptError`` with the figures."""
        for _ in self.audit():
            pass

    def audit(self) -> Iterator[None]:
        """The same with pauses, in which no page may be given out or come back."""
        owners = bytearray(self.total)
        stray: list[int] = []
        for pages, cached in ((self._free, False), (self._spare, True)):
            rest = iter(pages)
            while some := list(islice(rest, AUDITED)):
                for page in some:
                    if not 0 < page < self.total or owners[page]:
                        raise self._lost()
                    owners[page] = 1
                stray += [page for page in some if bool(self._indexed[page]) is not cached]
                yield
        for start in range(0, self.total, AUDITED):
            for page, references in enumerate(self._references[start : start + AUDITED], start):
                if bool(references) is bool(owners[page] or not page):
                    raise self._lost()
            yield
        if stray:
            message = f"{self._figures()}: pages {stray[:8]} are free but indexed, or cached but not indexed"
            raise PagesCorruptError(message)

    def _lost(self) -> PagesCorruptError:
        text = f"{self._figures()} of {self.usable} pages: a page is lost or has two owners"
        return PagesCorruptError(text)

    def _figures(self) -> str:
        held = sum(map(bool, self._references))
        return f"free {len(self._free)} + cached {len(self._spare)} + held {held}"


def _no_index(page: int) -> None:
    message = f"page {page} is cached, but no index was told"
    raise PagesCorruptError(message)
