"""What one request costs its group does not grow with how many others there are, and nothing long is done in one go."""

import time

import pytest

from edgemesh.decide.pages import AUDITED, Pages, PagesCorruptError
from edgemesh.decide.queue import FairQueue
from edgemesh.decide.request import Sequence
from edgemesh.decide.scheduling import Scheduler
from edgemesh.decide.state import Config
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.ids import Plane
from edgemesh.wire.messages import Place, Sampling, Submit

GROWTH = 4
"""How much more each of sixteen times as many may cost: caches and the collector take their part, a scan takes sixteen times."""


def submit(number, key=""):
    return Submit(f"r{number}", 0, 0, TokenArray.of(range(number, number + 40)), Sampling(), 8, key=key)


def admitting(slots):
    """CPU seconds for each of ``slots`` requests that are admitted in one step."""
    config = Config(
        group=0,
        member=0,
        epoch=0,
        planes=(Plane.MIXED,),
        pages=8 * slots,
        page_tokens=16,
        slots=slots,
        chunk_tokens=2048,
        reserve_tokens=16,
        max_waiting=slots,
        quantum_tokens=2048,
        age_ns=1,
        pause_ns=1,
    )
    scheduler = Scheduler(config)
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
