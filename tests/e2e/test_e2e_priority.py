"""Among requests that wait in a group, the lower priority goes first, whichever came first."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from e2e_clients import held, posting, rest_of, together, wait_for

pytestmark = pytest.mark.parametrize("served", ["null-dp4 split"], indirect=True)

LONG, SAID = 3100, 2900
"""Tokens of a prompt, and of an answer to one, of which a group's pages hold one."""


def test_the_lower_priority_is_admitted_first(served, traces):
    def queued():
        return list(traces.events("request.queued", actors="group-*"))

    def ask(token, priority):
        (answer,) = together(served, [posting(prompt=[token] * LONG, group=0, max_tokens=2, priority=priority)])
        return answer["id"]

    # The first holds the pages until it is read.
    with held(served, "", prompt=[7] * LONG, group=0, max_tokens=SAID) as (first,), ThreadPoolExecutor(4) as pool:
        waiting = []
        for number, (token, priority) in enumerate(((8, 5), (9, 0), (10, -5), (11, 0)), start=2):
            waiting.append(pool.submit(ask, token, priority))
            wait_for(lambda number=number: len(queued()) >= number, "it does not wait in the group")
        rest_of(first)
        low, none, high, later = (each.result() for each in waiting)
    traces.settle()
    admitted = [event["request"] for event in traces.events("request.admitted", actors="group-*")]
    order = [request for request in admitted if request in {low, none, high, later}]
    assert order == [high, none, later, low]
