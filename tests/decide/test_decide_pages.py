"""The allocator against a model that only counts references, and its index against one that remembers what is in each page."""

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from edgemesh.decide.pages import Pages, PagesCorruptError, PagesExhaustedError
from edgemesh.decide.prefix import Cursor, Prefix, chain

TOTAL, PAGE_TOKENS = 12, 2


class Books(RuleBasedStateMachine):
    """Requests with random prompts over two token ids, so that they often begin alike.

    ``content`` is what the slab would hold: the prefix that the last owner wrote into each page.
    """

    requests = Bundle("requests")

    def __init__(self):
        super().__init__()
        self.pages = Pages(TOTAL)
        self.prefix = Prefix(self.pages, PAGE_TOKENS)
        self.content = {}
        self.holds = dict.fromkeys(range(1, TOTAL), 0)

    @rule(target=requests, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def admit(self, tokens):
        tokens = array("i", tokens)
        cursor = Cursor()
        hit = list(self.prefix.match(cursor, tokens))
        assert len(hit) <= (len(tokens) - 1) // PAGE_TOKENS
        for at, page in enumerate(hit):
            assert self.content[page] == tuple(tokens[: (at + 1) * PAGE_TOKENS]), "a hit on a page with other content"
            self.holds[page] += 1
        missing = -(-len(tokens) // PAGE_TOKENS) - len(hit)
        if missing > self.pages.free:
            with pytest.raises(PagesExhaustedError):
                self.pages.take(missing)
            self.drop(hit)
            return multiple()
        taken = self.pages.take(missing)
        for page in taken:
            assert self.holds[page] == 0, "a page that someone holds was given out"
            self.holds[page] = 1
            self.content.pop(page, None)
        return cursor, tokens, [*hit, *taken]

    @rule(request=requests, share=st.floats(0, 1))
    def write(self, request, share):
        cursor, tokens, pages = request
        upto = round(len(tokens) * share)
        for at in range(upto // PAGE_TOKENS):
            self.content[pages[at]] = tuple(tokens[: (at + 1) * PAGE_TOKENS])
        duplicates = self.prefix.insert(cursor, tokens, pages, upto)
        assert set(duplicates) <= set(pages)

    @rule(request=requests, more=st.lists(st.integers(0, 1), max_size=3))
    def generate(self, request, more):
        _, tokens, pages = request
        tokens.extend(more[: len(pages) * PAGE_TOKENS - len(tokens)])

    @rule(request=consumes(requests))
    def end(self, request):
        self.drop(request[2])

    def drop(self, pages):
        self.pages.drop(pages)
        for page in pages:
            self.holds[page] -= 1

    @precondition(lambda self: self.pages.cached)
    @rule(count=st.integers(1, TOTAL))
    def evict(self, count):
        before = self.pages.cached
        assert self.pages.evict(count) == min(count, before)

    @rule(page=st.integers(1, TOTAL - 1))
    def wrong(self, page):
        if not self.holds[page]:
            with pytest.raises(PagesCorruptError):
                self.pages.drop([page])
            if not self.pages.indexed(page):
                with pytest.raises(PagesCorruptError):
                    self.pages.hold([page])

    @invariant()
    def balanced(self):
        self.pages.check()
        self.prefix.check()
        assert self.pages.free == sum(not count for count in self.holds.values())


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_all_of_the_pool_but_page_zero_is_given_out_once():
    pages = Pages(5)
    assert sorted(pages.take(4)) == [1, 2, 3, 4]
    with pytest.raises(PagesExhaustedError, match="1 pages asked for, 0 of 4 are free"):
        pages.take(1)


def test_the_tail_of_the_longest_unused_chain_is_evicted_first():
    pages = Pages(5)
    prefix = Prefix(pages, PAGE_TOKENS)
    old, new = array("i", [1, 1, 1, 1, 9]), array("i", [2, 2, 2, 2, 9])
    for tokens in (old, new):
        taken = pages.take(2)
        prefix.insert(Cursor(), tokens, taken, 4)
        pages.drop(taken)
    kept = [len(prefix.match(Cursor(), tokens)) for tokens in (old, new) if pages.evict(1)]
    assert kept == [1, 1], "first the old chain's tail, and then, as its head was just used, the new one's"


def test_corruption_is_told_with_figures():
    pages = Pages(4)
    pages.take(2)
    pages._free.append(1)
    with pytest.raises(PagesCorruptError, match=r"free 2 . cached 0 . held 2 of 3"):
        pages.check()
    with pytest.raises(ValueError, match="least is 2"):
        Pages(1)


def test_a_page_is_written_by_its_own_request_while_another_holds_the_same_prefix():
    pages = Pages(6)
    prefix = Prefix(pages, PAGE_TOKENS)
    tokens = array("i", [1, 2, 3, 4, 5])
    first, second = pages.take(2), pages.take(2)
    assert prefix.insert(Cursor(), tokens, first, 4) == ()
    assert prefix.insert(Cursor(), tokens, second, 4) == second
    assert prefix.match(Cursor(), tokens) == first


def test_a_disabled_index_finds_and_keeps_nothing():
    pages = Pages(6)
    prefix = Prefix(pages, PAGE_TOKENS, enabled=False)
    tokens = array("i", [1, 2, 3])
    taken = pages.take(2)
    prefix.insert(Cursor(), tokens, taken, 3)
    assert prefix.match(Cursor(), tokens) == ()
    pages.drop(taken)
    assert pages.cached == 0


def test_hashing_goes_on_where_it_stopped():
    tokens = array("i", range(64))
    cursor = Cursor()
    for limit in range(1, 33):
        cursor.extend(tokens, PAGE_TOKENS, limit)
        assert len(cursor.keys) == limit
    assert cursor.keys == chain(tokens, PAGE_TOKENS, 99)
    assert len(set(cursor.keys)) == 32
    assert chain(array("i", [7, *range(1, 64)]), PAGE_TOKENS, 99)[-1] != cursor.keys[-1], "keys are chained"
