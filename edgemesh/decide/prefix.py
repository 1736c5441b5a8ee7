"""The prefix index: finds the KV pages that already hold the beginning of a prompt.

Each full page is known by a chained 128-bit hash of all tokens up to its end, so that equal keys mean equal prefixes. A page
enters the index when the step that filled it is acknowledged, and is never written again; it leaves it when the allocator
gives it out anew. A chain whose head is gone is not found, and ages out.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Final, TypeAlias

from edgemesh.decide.pages import AUDITED, Pages

KEY_BYTES: Final = 16

AHEAD: Final = 64
"""Pages that are hashed in one go, beyond what is known to be looked for: they will be needed when they are written."""

Tokens: TypeAlias = "array[int] | memoryview"
"""Token ids of 32 bits: an ``array("i")``, or the ``buffer`` of a ``TokenArray``."""


@dataclass(slots=True)
class Cursor:
    """How far one request's tokens are hashed (``keys``, one per full page) and known to the index (in pages).

    Chains that begin with another ``root`` never meet.
    """

    root: bytes = b""
    keys: list[bytes] = field(default_factory=list)
    indexed: int = 0

    def extend(self, tokens: Tokens, page_tokens: int, limit: int) -> None:
        """Hash on, up to ``limit`` full pages; those that are hashed already cost nothing."""
        start, size = len(self.keys), 4 * page_tokens
        if start >= limit:
            return
        with memoryview(tokens) as view, view.cast("B") as buffer:
            limit = min(limit, len(buffer) // size)
            parent = self.keys[-1] if self.keys else self.root
            for page in range(start, limit):
                parent = blake2b(buffer[page * size : (page + 1) * size], digest_size=KEY_BYTES, key=parent).digest()
                self.keys.append(parent)


def root_of(tenant: str) -> bytes:
    """Where the chains of one tenant begin; without tenants all chains begin alike."""
    return blake2b(tenant.encode(), digest_size=KEY_BYTES, person=b"tenant").digest() if tenant else b""


def chain(tokens: Tokens, page_tokens: int, limit: int, root: bytes = b"") -> list[bytes]:
    """The keys of the first ``limit`` full pages of a prompt.

    >>> from array import array
    >>> one, two = array("i", [1, 2, 3, 4, 5]), array("i", [1, 2, 3, 9])
    >>> len(chain(one, 2, 8)), chain(one, 2, 8)[0] == chain(two, 2, 8)[0], chain(one, 2, 8)[1] == chain(two, 2, 8)[1]
    (2, True, False)
    """
    cursor = Cursor(root)
    cursor.extend(tokens, page_tokens, limit)
    return cursor.keys


class Prefix:
    """The index of one group's pages, keyed by the chain of their tokens."""

    def __init__(self, pages: Pages, page_tokens: int, *, enabled: bool = True) -> None:
        self.pages = pages
        self.page_tokens = page_tokens
        self.enabled = enabled
        self._page: dict[bytes, int] = {}
        self._key: dict[int, bytes] = {}
        self.inserted = 0
        """Pages that ever entered the index: as long as it stays the same, no prefix is found that was not found before."""

        pages.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._page)

    def match(self, cursor: Cursor, tokens: Tokens, most: int | None = None) -> tuple[int, ...]:
        """The pages that hold the beginning of ``tokens``, in order, each held once more for the caller.

        At least one token is left over, because its logits must be computed; ``most`` is how many may be covered where those of
        others are wanted, too. Sets the cursor to what was found.
        """
        cursor.indexed = 0
        if not self.enabled:
            return ()
        count = len(tokens) if isinstance(tokens, array) else tokens.nbytes // 4
        found: list[int] = []
        reach = count - 1 if most is None else min(count - 1, most)
        for at in range(reach // self.page_tokens):
            if at == len(cursor.keys):
                cursor.extend(tokens, self.page_tokens, at + AHEAD)
            page = self._page.get(cursor.keys[at])
            if page is None:
                break
            found.append(page)
        self.pages.hold(found)
        cursor.indexed = len(found)
        return tuple(found)

    def insert(self, cursor: Cursor, tokens: Tokens, pages: list[int] | tuple[int, ...], upto: int) -> tuple[int, ...]:
        """Make known the full pages among the first ``upto`` tokens, whose KV is written and acknowledged.

        ``pages`` is the request's block table. Where another page holds the same prefix already, that one stays and
        ours is returned among the duplicates: it remains its request's alone.
        """
        full = upto // self.page_tokens
        if not self.enabled or full <= cursor.indexed:
            return ()
        cursor.extend(tokens, self.page_tokens, full)
        duplicates: list[int] = []
        for at in range(cursor.indexed, full):
            key, page = cursor.keys[at], pages[at]
            if key in self._page:
                duplicates.append(page)
                continue
            self.pages.index(page)
            self._page[key] = page
            self._key[page] = key
            self.inserted += 1
        cursor.indexed = full
        return tuple(duplicates)

    def check(self) -> None:
        """The two directions of the index agree with each other and with the allocator."""
        for _ in self.audit():
            pass

    def audit(self) -> Iterator[None]:
        """The same with pauses, in which nothing of the index may change."""
        figures = f"{len(self._page)} keys, {len(self._key)} pages"
        assert len(self._page) == len(self._key), figures
        entries = iter(self._key.items())
        while some := list(islice(entries, AUDITED)):
            assert all(self._page.get(key) == page for page, key in some), figures
            assert all(self.pages.indexed(page) for page, _ in some), (
                "the index knows a page that the allocator does not"
            )
            yield

    def _forget(self, page: int) -> None:
        del self._page[self._key.pop(page)]
