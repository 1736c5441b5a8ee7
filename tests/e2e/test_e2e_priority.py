"""Among requests that wait in a group, the lower priority goes first, whichever came first."""

import asyncio

import httpx
import pytest
from e2e_clients import COMPLETIONS, OPEN, body, wait_for

pytestmark = pytest.mark.parametrize("served", ["null-dp4 split"], indirect=True)

LONG, SAID = 3100, 2900
"""Tokens of a prompt, and of an answer to one, of which a group's pages hold one."""


def test_the_lower_priority_is_admitted_first(served, traces):
    async def everyone():
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:

            async def ask(token, priority):
                asked = body(prompt=[token] * LONG, group=0, max_tokens=2, priority=priority)
                return (await client.post(COMPLETIONS, json=asked)).json()["id"]

            first = body(prompt=[7] * LONG, group=0, max_tokens=SAID, stream=True)
            async with client.stream("POST", COMPLETIONS, json=first) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                waiting = []
                for number, (token, priority) in enumerate(((8, 5), (9, 0), (10, -5), (11, 0)), start=2):
                    waiting.append(asyncio.create_task(ask(token, priority)))
                    await asyncio.to_thread(
                        wait_for, lambda number=number: served.metric(OPEN) >= number, 10, "it is not submitted"
                    )
                async for _ in lines:
                    pass
            return await asyncio.gather(*waiting)

    low, none, high, later = asyncio.run(everyone())
    traces.settle(10)
    admitted = [event["request"] for event in traces.events("request.admitted", actors="group-*")]
    order = [request for request in admitted if request in {low, none, high, later}]
    assert order == [high, none, later, low]
