"""``python -m edgemesh.bench.bare FILE PORT``: uvicorn and nothing else, which answers every POST with the events of a recorded stream.

It is what a gateway is measured beside: the same bytes by the same HTTP server, an event at a time, and no work for them.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvicorn
from starlette.types import Receive, Scope, Send

EVENT_END = b"\n\n"


def split(body: bytes) -> list[bytes]:
    """The events of a stream, each with its end."""
    return [event + EVENT_END for event in body.split(EVENT_END) if event]


def one_each(body: bytes, tokens: int) -> bytes:
    """The same stream with an event for each of ``tokens``: the first one's, as often; then what ends the stream.

    A gateway that was behind has put several tokens into one event.
    """
    events = split(body)
    texts = [event for event in events if b'"finish_reason":null' in event and b'"choices":[{' in event]
    rest = events[events.index(texts[-1]) + 1 :]
    return b"".join([texts[0]] * tokens + rest)


class Replay:
    """An ASGI application with one answer."""

    def __init__(self, events: list[bytes]) -> None:
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the request, then send the events, letting other streams have a turn after each."""
        if scope["type"] != "http":
            return
        if scope["method"] != "POST":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})


def main() -> None:
    """Serve until the process is ended."""
    file, port = sys.argv[1:]
    application = Replay(split(Path(file).read_bytes()))
    uvicorn.run(
        application,
        host="127.0.0.1",
        port=int(port),
        loop="uvloop",
        http="httptools",
        log_level="error",
        lifespan="off",
    )


if __name__ == "__main__":
    main()
