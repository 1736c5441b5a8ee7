"""uvicorn's HTTP/1.1 protocol with bounds on what comes before a body: how large it may be, and how long it may take."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES: Final = 64 << 10
HEAD_S: Final = 30.0
"""How long a client may take to send a request line and its headers."""


class BoundedProtocol(HttpToolsProtocol):
    """One client's connection."""

    head_s = HEAD_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as uvicorn has it
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._heads = 0
        self._in_head = True
        self._too_late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """A client connected."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """A client is gone."""
        self._cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a client; a request's head is refused once it is too large."""
        if self._in_head and self._too_late is None:
            self._await_head()
        before = self._in_head, self._heads
        super().data_received(data)
        # What also held the end of a body, or a whole head, is not counted: it was read at once, and so is bounded.
        if before != (True, self._heads) or not self._in_head:
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of the request is larger than {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._in_head = False
        self._heads += 1
        self._head_bytes = 0
        self._cancel()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is whole; another head may follow."""
        self._in_head = True
        super().on_message_complete()

    def _await_head(self) -> None:
        self._too_late = asyncio.get_running_loop().call_later(self.head_s, self._give_up)

    def _cancel(self) -> None:
        if self._too_late is not None:
            self._too_late.cancel()
            self._too_late = None

    def _give_up(self) -> None:
        self._too_late = None
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()
