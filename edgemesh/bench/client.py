"""One keep-alive connection to an HTTP server, one call at a time: asyncio and httptools, nothing else.

A general client spends more on a token than a fast engine does; this one stamps a piece of text when its bytes arrive
and decodes three fields of it.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import Final, cast
from urllib.parse import urlsplit

import httptools
import msgspec
from msgspec import Struct

from edgemesh.bench.events import DONE, EventLines, LineTooLongError, Usage, chunk
from edgemesh.bench.statistics import Call

MAX_ERROR_BYTES: Final = 4096
MAX_BODY_BYTES: Final = 1 << 22


class Target(Struct, frozen=True):
    """A server: where it listens, the path that ``/v1`` follows, and a key if it wants one."""

    host: str
    port: int
    tls: bool = False
    base: str = ""
    api_key: str = ""

    def head(self, method: str, path: str, length: int) -> bytes:
        """The head of a request with a JSON body of ``length`` bytes."""
        key = f"authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        return (
            f"{method} {self.base}{path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\n{key}"
            f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        ).encode()


def target(url: str, api_key: str = "") -> Target:
    """Read a base URL (``http://host:port``, with or without a final ``/v1``). Raises ``ValueError``."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        message = f"url: {url!r} is not http://HOST:PORT or https://HOST:PORT"
        raise ValueError(message)
    if any(character in api_key for character in "\r\n"):
        message = "api key: it may not contain a line break"
        raise ValueError(message)
    tls = parts.scheme == "https"
    base = parts.path.rstrip("/").removesuffix("/v1")
    return Target(parts.hostname, parts.port or (443 if tls else 80), tls, base, api_key)


class Reply(Struct):
    """What has come back so far."""

    status: int = 0
    stamps: list[int] = []
    usage: Usage | None = None
    body: bytes = b""
    error: str = ""
    ended: bool = False


class Connection(asyncio.Protocol):
    """Sends a request, reads its response, and can be used again if the server keeps it open."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._reset()

    def _reset(self) -> None:
        self._reply = Reply()
        self._lines = EventLines()
        self._parser = httptools.HttpResponseParser(self)
        self._arrived = 0

    @property
    def usable(self) -> bool:
        """Whether another call can be sent on this connection."""
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, target: Target, method: str, path: str, body: bytes) -> Reply:
        """Send one request and wait for the whole response, which may be an error.

        A server may close an idle connection just as a request is sent; that request never reached it, and goes out again
        on a new connection.
        """
        reused = self.usable
        reply = await self._once(target, method, path, body)
        if reused and reply.error and not self._arrived:
            reply = await self._once(target, method, path, body)
        return reply

    async def _once(self, target: Target, method: str, path: str, body: bytes) -> Reply:
        self._reset()
        loop = asyncio.get_running_loop()
        if not self.usable:
            context = ssl.create_default_context() if target.tls else None
            await loop.create_connection(lambda: self, target.host, target.port, ssl=context)
        self._waiter = loop.create_future()
        transport = cast("asyncio.Transport", self._transport)
        transport.write(target.head(method, path, len(body)) + body)
        await self._waiter
        return self._reply

    def close(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Stamp and parse what came."""
        self._arrived = time.perf_counter_ns()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.DecodeError, LineTooLongError) as error:
            self._finish(f"{type(error).__name__}: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """End the call that was waiting, as a failure."""
        self._transport = None
        self._finish(f"the server closed the connection{f': {exc}' if exc else ''}")

    # httptools calls these

    def on_body(self, piece: bytes) -> None:
        """Read events from a good response, keep a bounded part of a bad one."""
        reply = self._reply
        reply.status = self._parser.get_status_code()
        if reply.status != 200 or not self._streams:
            reply.body = (reply.body + piece)[:MAX_BODY_BYTES]
            return
        for payload in self._lines.feed(piece):
            if payload == DONE:
                reply.ended = True
                continue
            event = chunk(payload)
            if event.error is not None:
                reply.error = bytes(event.error).decode(errors="replace")
            if event.has_text:
                reply.stamps.append(self._arrived)
            if event.usage is not None:
                reply.usage = event.usage

    def on_message_begin(self) -> None:
        """A response starts."""
        self._streams = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note whether events follow."""
        if name.lower() == b"content-type":
            self._streams = value.startswith(b"text/event-stream")

    def on_message_complete(self) -> None:
        """The response is whole."""
        self._reply.status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.close()
        self._finish("")

    def _finish(self, error: str) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._reply.error = self._reply.error or error
            self._waiter.set_result(None)
            if error:
                self.close()


def judge(reply: Reply) -> str:
    """Why a streamed response counts as failed; empty if it does not."""
    if reply.error:
        return reply.error
    if reply.status != 200:
        return f"status {reply.status}: {reply.body[:MAX_ERROR_BYTES].decode(errors='replace')}"
    if not reply.ended:
        return "the stream ended without [DONE]"
    if reply.usage is None:
        return "the stream had no usage"
    return ""


async def call(connection: Connection, target: Target, path: str, body: bytes) -> Call:
    """One timed, streamed call; it never raises for what the server or the network did."""
    start = time.perf_counter_ns()
    try:
        reply = await connection.exchange(target, "POST", path, body)
        error = judge(reply)
    except OSError as failure:
        reply, error = Reply(), f"{type(failure).__name__}: {failure}"
    usage = reply.usage or Usage()
    details = usage.prompt_tokens_details
    return Call(
        start_ns=start,
        end_ns=time.perf_counter_ns(),
        stamps=tuple(reply.stamps),
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        error=error,
    )


async def get(target: Target, path: str) -> Reply:
    """One plain GET on a connection of its own. Raises ``OSError``."""
    connection = Connection()
    try:
        return await connection.exchange(target, "GET", path, b"")
    finally:
        connection.close()
