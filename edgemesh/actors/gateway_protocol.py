"""uvicorn's HTTP/1.1 protocol with bounds: on heads, on pipelines, on connections, and on how long anything may take.

A connection waits for a head (``head_s``), for the rest of a body that nobody reads any more (``LINGER_S``), or for a
client that does not read (``stall_s``); in between, uvicorn's keep-alive limit holds, and ``gateway_http`` bounds the body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar, Final, NoReturn

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from edgemesh.actors.gateway_outlets import Flow, Outlet, UnframedCycle
from edgemesh.api.errors import ApiError

MAX_HEAD_BYTES: Final = 64 << 10
MAX_URL_BYTES: Final = 8 << 10
MAX_HEADERS: Final = 128
MAX_PIPELINED: Final = 32
"""Requests of one connection that may wait for the answer to an earlier one."""

LINGER_S: Final = 3.0
"""How long what a client still sends is read, so that it can read why nobody wants it."""

SLICE_BYTES: Final = 1 << 15
"""Bytes that are parsed in one go: a body in pieces of one byte has thousands of pieces in so many."""

SPARE: Final = 256
"""Connections beyond the most that are told so; more are only closed."""


FRAMING: Final = (b"content-length", b"transfer-encoding")
_TOO_LARGE: Final = ApiError(
    431,
    f"the head of the request is larger than {MAX_HEAD_BYTES} bytes or has more than {MAX_HEADERS} headers",
    code="headers_too_large",
)
_MALFORMED: Final = ApiError(400, "this is not a request as RFC 9112 has it", code="malformed_request")


class Bounds:
    """What all connections of one gateway share; ``tell`` hears why each was ended before its time."""

    def __init__(
        self,
        *,
        max_connections: int = 8192,
        head_s: float = 30.0,
        stall_s: float = 30.0,
        tell: Callable[[str], None] = lambda _why: None,
    ) -> None:
        self.max_connections = max_connections
        self.head_s = head_s
        self.stall_s = stall_s
        self.tell = tell
        self.draining = False
        self.connections: set[BoundedProtocol] = set()
        self.idle: dict[BoundedProtocol, None] = {}
        """Connections between two requests, the longest idle first."""

    def drain(self) -> None:
        """Close what is idle; every answer from now on ends its connection."""
        self.draining = True
        for connection in self.connections:
            connection.drain()


def protocol_of(bounds: Bounds) -> type[BoundedProtocol]:
    """The class of connections that share these bounds."""

    class Connection(BoundedProtocol):
        shared = bounds

    return Connection


class BoundedProtocol(HttpToolsProtocol):
    """One client's connection."""

    shared: ClassVar[Bounds] = Bounds()

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as uvicorn has it
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._in_message = False
        """Between the end of a head and that of its body."""

        self._unanswered = 0
        self._over = False
        """Nothing more is read, or written after what is under way."""

        self._refusal: ApiError | None = None
        self._head_bytes = 0
        self._dry_bytes = 0
        """Bytes since the last head, piece of a body or end of one."""

        self._body_seen = False
        self._unread_bytes = bytearray()
        """What came and was not looked at yet."""

        self._again = False
        """A new parser is told what the last one knew."""

        self._late: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    # --- the connection ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """A client connected; where there are too many, the one that was idle longest makes way."""
        super().connection_made(transport)
        self.flow: Flow = Flow(transport)
        self._outlet = Outlet(transport, self._end)
        self.shared.connections.add(self)
        beyond = len(self.shared.connections) - self.shared.max_connections
        if beyond > 0 and self.shared.idle:
            next(iter(self.shared.idle)).end_idle()
        elif beyond > 0:
            self._too_many(beyond)
            return
        self._await(self.shared.head_s, self._head_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """A client is gone."""
        self.shared.connections.discard(self)
        self.shared.idle.pop(self, None)
        self._unread_bytes.clear()
        self._await_nothing()
        self.resume_writing()
        super().connection_lost(exc)

    def end_idle(self) -> None:
        """Close the connection between two requests."""
        self.shared.idle.pop(self, None)
        self.transport.close()

    def drain(self) -> None:
        """Close the connection now if it is idle, else after the answers that are under way."""
        if self in self.shared.idle:
            self.end_idle()
        elif self._unanswered:
            self.cycle.keep_alive = False

    def pause_writing(self) -> None:
        """The client does not read what it is sent."""
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self.shared.stall_s, self._cut)

    def resume_writing(self) -> None:
        """It does again."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Bytes of a client; of many, all other clients have their turn after some."""
        if self._over or self._refusal is not None:
            return
        if not self._unread_bytes and len(data) <= SLICE_BYTES:
            self._received(data)
            return
        begun = bool(self._unread_bytes)
        self._unread_bytes += data
        self.flow.hold()
        if not begun:
            self._go_on()

    def _go_on(self) -> None:
        """Take some more of what came."""
        if not self._unread_bytes:  # the client is gone
            return
        data = bytes(self._unread_bytes[:SLICE_BYTES])
        del self._unread_bytes[:SLICE_BYTES]
        self._received(data)
        if self._unread_bytes:
            self.loop.call_soon(self._go_on)
        elif not self.transport.is_closing():
            self.flow.release()

    def _received(self, data: bytes) -> None:
        if self._over or self._refusal is not None:
            return
        self._unset_keepalive_if_required()
        self.shared.idle.pop(self, None)
        if not self._in_message and self._late is None:
            self._await(self.shared.head_s, self._head_late)
        self._dry_bytes += len(data)
        dry = self._dry_bytes
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._malformed()
        else:
            if self._dry_bytes == dry > MAX_HEAD_BYTES:
                self._refusal = _TOO_LARGE
                self._malformed()

    def _feed(self, data: bytes) -> None:
        """Parse; a wish to speak another protocol is passed over, but the parser would leave out what follows it."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            framing = [b"%s: %s\r\n" % each for each in self.headers if each[0] in FRAMING]
            self.parser = httptools.HttpRequestParser(self)
            self._again = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(framing))
            self._again = False
            if self._in_message and not framing:
                self.on_message_complete()
            rest = data[upgrade.args[0] :]
            if rest:
                self._feed(rest)

    # --- what the parser finds ---

    def on_message_begin(self) -> None:
        """A head begins."""
        if not self._again:
            super().on_message_begin()
            self._in_head = True
            self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        """The target of the request, or a part of it."""
        if self._again:
            return
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            message = f"the request line is longer than {MAX_URL_BYTES} bytes"
            self._stop(ApiError(414, message, code="uri_too_long"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        if self._again:
            return
        super().on_header(name, value)
        self._head_bytes += len(name) + len(value)
        if len(self.headers) > MAX_HEADERS or self._head_bytes > MAX_HEAD_BYTES:
            self._stop(_TOO_LARGE)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        if self._again:
            return
        if self._unanswered > MAX_PIPELINED:
            message = f"more than {MAX_PIPELINED} requests wait for the answer to an earlier one on this connection"
            self._stop(ApiError(400, message, code="pipeline_too_long"))
        if self.parser.get_http_version() not in {"1.0", "1.1"}:
            self._stop(ApiError(400, "this server speaks HTTP/1.1 and HTTP/1.0", code="http_version"))
        super().on_headers_complete()
        self._await_nothing()
        self._in_head, self._in_message, self._body_seen = False, True, False
        self._dry_bytes = 0
        self._unanswered += 1
        self.cycle.transport = self._outlet  # type: ignore[assignment]  # it is all of a transport that a cycle uses
        if self.shared.draining:
            self.cycle.keep_alive = False
        if self.parser.get_http_version() == "1.0":
            self.cycle.__class__ = UnframedCycle

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self._body_seen = True
        self._dry_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The body is whole; another head may follow."""
        if self._again or (self.parser.should_upgrade() and any(name in FRAMING for name, _ in self.headers)):
            return
        self._in_message = False
        self._dry_bytes = 0
        super().on_message_complete()
        if not self._unanswered:  # it was answered before
            self._rest()

    def on_response_complete(self) -> None:
        """An answer is written."""
        self._unanswered -= 1
        if self._over or self.transport.is_closing():
            return
        super().on_response_complete()
        if self._unanswered:
            return
        if self._refusal is not None:
            self._refuse(self._refusal)
        elif not self._in_message:
            self._rest()
        elif self.expect_100_continue and not self._body_seen:
            self._end()  # the client may leave the body out, and then nobody knows what its next bytes are
        else:
            self._unset_keepalive_if_required()
            self._await(LINGER_S, self._unread)

    # --- how it ends ---

    def _rest(self) -> None:
        """No answer is under way; uvicorn's own timer ends what stays so."""
        self._await_nothing()
        if self._in_head:
            self._await(self.shared.head_s, self._head_late)
            return
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        self.shared.idle[self] = None

    def _stop(self, refusal: ApiError) -> NoReturn:
        """Have the parser stop at what is refused."""
        self._refusal = refusal
        raise refusal

    def _malformed(self) -> None:
        refusal, self._refusal = self._refusal or _MALFORMED, None
        if self._in_message and not self.cycle.response_started:
            # Whoever waits for the rest of this body has waited enough, and need not say so.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._unanswered -= 1
            if self.pipeline and self.pipeline[0][0] is self.cycle:
                self.pipeline.popleft()
        elif self._in_message and self.cycle.response_complete:
            self._end()
            return
        self._refuse(refusal)

    def _refuse(self, refusal: ApiError) -> None:
        """Answer a request that never became one, after those before it, and end."""
        if self._unanswered:
            self._refusal = refusal
            return
        body = refusal.body
        retry = b"retry-after: %d\r\n" % refusal.retry_after_s if refusal.retry_after_s else b""
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
        self.shared.tell(refusal.detail.code or "")
        self.transport.write(STATUS_LINE[refusal.status] + retry + head + b"\r\n" + body)
        self._end(linger=True)

    def _too_many(self, beyond: int) -> None:
        if beyond > SPARE:
            self._over = True
            self.transport.abort()
            return
        message = f"this server has {self.shared.max_connections} connections already, the most that it takes"
        self._refuse(
            ApiError(503, message, kind="service_unavailable_error", code="too_many_connections", retry_after_s=1)
        )

    def _head_late(self) -> None:
        self._late = None
        if self._dry_bytes or self._in_head:
            message = f"the head of a request was not complete after {self.shared.head_s:g} s"
            self._refuse(ApiError(408, message, code="head_timeout"))
        else:
            self._end()

    def _unread(self) -> None:
        """Of a body that nobody wanted, not all came in time."""
        self._end(linger=False)

    def _cut(self) -> None:
        """The client has not read for too long: what waits for it is thrown away."""
        self._stalled = None
        self.shared.tell("slow_reader")
        self.transport.abort()

    def _end(self, *, linger: bool | None = None) -> None:
        """Close; but a client that still sends must be able to read its answer first, so what it sends is thrown away."""
        if self._over:
            return
        self._over = True
        self._unset_keepalive_if_required()
        self.shared.idle.pop(self, None)
        if self.transport.is_closing():
            return
        if linger if linger is not None else self._in_message or self._in_head or self._dry_bytes:
            self.flow.resume_reading()
            self.transport.write_eof()
            self._await(LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _await(self, seconds: float, then: Callable[[], None]) -> None:
        self._await_nothing()
        self._late = self.loop.call_later(seconds, then)

    def _await_nothing(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
