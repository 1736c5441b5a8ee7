"""What a connection's requests use of its transport."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Final

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

MAX_STATED: Final = 1 << 60
"""A longer answer is one whose length is not stated."""


class Flow(FlowControl):
    """Whether a connection is read: while it is held it is not, whatever uvicorn wants."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._held = False
        self._unwanted = False

    def pause_reading(self) -> None:
        """No more is wanted for now."""
        self._unwanted = True
        super().pause_reading()

    def resume_reading(self) -> None:
        """More is wanted again."""
        self._unwanted = False
        if not self._held:
            super().resume_reading()

    def hold(self) -> None:
        """Read nothing until ``release``."""
        self._held = True
        super().pause_reading()

    def release(self) -> None:
        """Read on, if more is wanted."""
        self._held = False
        if not self._unwanted:
            super().resume_reading()


class Outlet:
    """What a request's cycle uses of its transport; whether closing waits for the client is up to the connection."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class UnframedCycle(RequestResponseCycle):
    """An answer in HTTP/1.0, which knows no chunks: where its length is not stated, it ends with the connection."""

    async def send(self, message: ASGISendEvent) -> None:
        """Send a part of the answer."""
        if message["type"] == "http.response.start":
            if not any(name == b"content-length" for name, _ in message.get("headers", ())):
                self.chunked_encoding = False
                self.expected_content_length = sys.maxsize
        elif (
            message["type"] == "http.response.body"
            and self.expected_content_length > MAX_STATED
            and not message.get("more_body", False)
        ):
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)
