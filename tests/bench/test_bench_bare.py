"""The server that a gateway is measured beside sends what was recorded, an event at a time."""

import asyncio

from edgemesh.bench.bare import Replay, one_each, split

TEXT = b'data: {"id":"a","choices":[{"index":0,"text":" two words","finish_reason":null}]}\n\n'
OTHER = TEXT.replace(b" two words", b" x")
ENDING = (
    b'data: {"id":"a","choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n'
    b'data: {"id":"a","choices":[],"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n'
)


def test_a_stream_gets_an_event_for_each_token_and_keeps_its_end():
    assert b"".join(split(TEXT + OTHER + ENDING)) == TEXT + OTHER + ENDING
    assert one_each(TEXT + OTHER + ENDING, 3) == TEXT * 3 + ENDING


def test_every_request_gets_the_events_one_by_one_after_its_body_is_read():
    async def run():
        inbox = [{"type": "http.request", "more_body": True}, {"type": "http.request", "more_body": False}]
        sent = []

        async def receive():
            return inbox.pop(0)

        async def send(message):
            assert not inbox, "the body is read first"
            sent.append(message)

        await Replay(split(TEXT + ENDING))({"type": "http", "method": "POST"}, receive, send)
        return sent

    start, *bodies = asyncio.run(run())
    assert start["status"] == 200
    assert [each["body"] for each in bodies] == [*split(TEXT + ENDING), b""]
    assert [each.get("more_body", False) for each in bodies] == [True] * 4 + [False]
