"""Clients that hang up, do not read, name their requests alike, or come by the thousand: four groups without a network."""

import asyncio
import random
from pathlib import Path

import pytest
from e2e_clients import CHAT, COMPLETIONS, OPEN, body, held, posting, raw, rest_of, text_of, together, wait_for, words

pytestmark = pytest.mark.parametrize("served", ["null-dp4 split"], indirect=True)

GROUPS = range(4)
GENERATED = "edgemesh_generated_tokens_total"


@pytest.mark.parametrize("count", [48, pytest.param(400, marks=pytest.mark.full)])
def test_clients_that_hang_up_at_any_moment_leave_nothing(served, traces, count):
    draw = random.Random(count)

    def one(number):
        path, longest = draw.choice((CHAT, COMPLETIONS)), draw.choice((1, 30, 3000))
        fields = {"stream": draw.random() < 0.5, "n": draw.choice((1, 1, 4)), "max_tokens": longest}
        text, offset_s = words(draw.choice((3, 100, 1500)), number), draw.choice((0, 0.02, 0.3)) * draw.random()

        async def call(client):
            with await asyncio.to_thread(raw, served, path, text=text, **fields):
                await asyncio.sleep(offset_s)  # the moment at which this client has had enough

        return call

    together(served, [one(number) for number in range(count)])
    traces.settle()
    ended = {event["request"].split("/")[0] for event in traces.events("request.aborted", actors="gateway-*")}
    assert ended, "some of them left before their answer was complete"


def test_the_same_request_id_many_times_at_once(served, traces):
    async def call(client):
        response = await client.post(
            COMPLETIONS, json=body(max_tokens=50, request_id="twice", n=2), headers={"x-request-id": "once"}
        )
        assert response.headers["x-request-id"] == "twice"
        return response.json()

    answers = together(served, [call] * 16)
    assert len({answer["id"] for answer in answers}) == 16
    assert {answer["usage"]["completion_tokens"] for answer in answers} == {100}
    assert len({text_of(answer, index) for answer in answers for index in (0, 1)}) == 32


def resident_mb(served, actor):
    pages = int(Path(f"/proc/{served.actors()[actor]}/statm").read_text().split()[1])
    return pages * 4096 / 1e6


@pytest.mark.parametrize("count", [12, pytest.param(32, marks=pytest.mark.full)])
def test_clients_that_do_not_read_cost_the_gateway_little_and_others_no_wait(served, traces, count):
    before, made_before = resident_mb(served, "gateway-0"), served.metric(GENERATED)
    fields = {"max_tokens": 3000, "stream": True, "stream_options": {"include_usage": True}}
    texts = [words(20, number) for number in range(count)]
    with held(served, *texts, **fields) as (first, *_):
        made = -1.0

        def stands():
            nonlocal made
            last, made = made, served.metric(GENERATED)
            return made == last

        wait_for(stands, lambda: f"tokens are still made for clients that do not read: {made}", poll_s=0.5)
        assert made - made_before < count * 2700
        assert resident_mb(served, "gateway-0") - before < 10 + count / 2
        # Their pages go to others before the gateway gives them up.
        together(served, [posting(text=words(30, 99 + group), group=group, max_tokens=4) for group in GROUPS])
        wait_for(lambda: served.metric(OPEN) == count, "some of them are no longer open")
        # One of them reads after all, and misses nothing.
        said = rest_of(first)
        assert b'"completion_tokens":3000' in said, said[-500:]
