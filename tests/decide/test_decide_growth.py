"""What one request costs its group does not grow with how many others there are, and nothing long is done in one go."""

import gc
import time
from unittest.mock import Mock

import pytest

from edgemesh.decide.pages import AUDITED, Pages, PagesCorruptError
from edgemesh.decide.prefix import Cursor
from edgemesh.decide.queue import FairQueue
from edgemesh.decide.request import Sequence
from edgemesh.decide.scheduling import Scheduler
from edgemesh.decide.state import Config
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.ids import Plane
from edgemesh.wire.messages import Place, Sampling, Submit

GROWTH = 6
"""How much more each of sixteen times as many may cost: caches take their part, a scan takes sixteen times."""


@pytest.fixture(autouse=True)
def no_collector():
    """Its work grows with all that the tests before have left, and is no request's."""
    gc.disable()
    yield
    gc.enable()


def submit(number, key=""):
    return Submit(f"r{number}", 0, 0, TokenArray.of(range(number, number + 40)), Sampling(), 8, key=key)


def scheduler_of(slots, pages):
    config = Config(
        group=0,
        member=0,
        epoch=0,
        planes=(Plane.MIXED,),
        pages=pages,
        page_tokens=16,
        slots=slots,
        chunk_tokens=2048,
        reserve_tokens=16,
        max_waiting=slots,
        quantum_tokens=2048,
        age_ns=1,
        pause_ns=1,
    )
    return Scheduler(config)


def admitting(slots):
    """CPU seconds for each of ``slots`` requests that are admitted in one step."""
    scheduler = scheduler_of(slots, 8 * slots)
    for number in range(slots):
        scheduler.place(Place(0, submit(number)), 0)
    start = time.thread_time()
    scheduler.advance(0)
    seconds = time.thread_time() - start
    assert len(scheduler.state.admitted) == slots
    return seconds / slots


def choosing(keys):
    """CPU seconds for each request that is taken from a queue in which all are of different keys."""
    queue = FairQueue(2048, 1 << 60)
    for number in range(keys):
        queue.add(Sequence(submit(number, f"k{number}"), number, 0))
    start = time.thread_time()
    for _ in range(keys):
        queue.remove(queue.peek(0))
    return (time.thread_time() - start) / keys


@pytest.mark.parametrize("cost", [admitting, choosing])
def test_one_of_many_costs_as_much_as_one_of_few(cost):
    few = min(cost(128) for _ in range(5))
    many = min(cost(2048) for _ in range(3))
    assert many < GROWTH * few


def test_an_audit_pauses_so_often_that_no_turn_is_long():
    pages = Pages(16 * AUDITED)
    held = pages.take(4 * AUDITED)
    for page in held[::2]:
        pages.index(page)
    pages.drop(held[: 2 * AUDITED])
    assert sum(1 for _ in pages.audit()) > 16 + 12


@pytest.mark.parametrize("wrong", ["lost", "twice", "scratch", "beyond"])
def test_an_audit_finds_one_wrong_page_among_many(wrong):
    pages = Pages(3 * AUDITED)
    held = pages.take(AUDITED)
    stray = {"lost": None, "twice": held[7], "scratch": 0, "beyond": 3 * AUDITED}[wrong]
    if stray is None:
        pages._free.pop(5)
    else:
        pages._free.append(stray)
    with pytest.raises(PagesCorruptError, match=f"free .* cached 0 . held {AUDITED} of"):
        pages.check()


def test_a_long_prompt_that_waits_is_looked_up_again_only_when_it_might_fit(monkeypatch):
    scheduler = scheduler_of(64, pages=1000)
    state = scheduler.state
    known = TokenArray.of(range(16 * 600))
    kept = state.pages.take(600)
    state.prefix.insert(Cursor(), known.buffer, kept, 16 * 600)
    state.pages.drop(kept)
    held = list(state.pages.take(395))
    looked_up = Mock(wraps=state.prefix.match)
    monkeypatch.setattr(state.prefix, "match", looked_up)
    prompt = TokenArray.of(range(16 * 600 + 16 * 20))
    scheduler.place(Place(0, Submit("long", 0, 0, prompt, Sampling(), 8)), 0)
    for _ in range(10):
        state.pages.drop([held.pop()])
        scheduler.advance(0)
    assert looked_up.call_count == 1
    while not state.admitted:
        state.pages.drop([held.pop()])
        scheduler.advance(0)
    assert looked_up.call_count == 2
    # The known pages, those for the rest of the prompt, and one for the next token.
    assert len(held) == 999 - (600 + 21)
    scheduler.check()
