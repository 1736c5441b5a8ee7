"""HTTP at the outermost line: bodies read within bounds, answers and errors written, nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from starlette.types import Receive, Scope, Send

from edgemesh.api.errors import ApiError, invalid, too_busy

TOGETHER: Final = 16
"""Bodies of the largest size that may be read, or wait for the tokenizer, at once."""

JSON: Final = b"application/json"

PIECE: Final = 1 << 18
"""Bytes of an answer that are sent in one go: others have their turn before the next ones."""

ErrorForm = Callable[[ApiError], bytes]
"""Makes an error's body."""


def openai_body(error: ApiError) -> bytes:
    """An error's body as OpenAI's clients read it."""
    return error.body


class ClientGoneError(Exception):
    """The client hung up before its answer was complete."""


def header(scope: Scope, name: bytes) -> bytes:
    """The first header of this (lower-case) name; empty if there is none."""
    for key, value in scope["headers"]:
        if key == name:
            found: bytes = value
            return found
    return b""


def credentials(scope: Scope) -> bytes:
    """What an ``Authorization`` header says, or would say of the key in ``X-Api-Key``; empty if there is neither."""
    given = header(scope, b"authorization")
    key = b"" if given else header(scope, b"x-api-key")
    return b"Bearer " + key if key else given


class Bodies:
    """Reads bodies: each of at most ``most`` bytes in ``within_s``, and all that are held at once of at most ``together``."""

    def __init__(self, most: int, together: int, within_s: float = 60.0) -> None:
        self._most = most
        self._together = together
        self._within_s = within_s
        self.held = 0

    @asynccontextmanager
    async def read(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
        """A whole body, which counts as held until the end of the block.

        Raises ``ApiError`` (408, 413, 415, 429) and ``ClientGoneError``.
        """
        _check_type(scope)
        stated = header(scope, b"content-length")
        if stated.isdigit() and int(stated[:20]) > self._most:
            raise self._too_large()
        parts: list[bytes] = []
        try:
            try:
                async with asyncio.timeout(self._within_s):
                    await self._collect(receive, parts)
            except TimeoutError as error:
                message = f"the body was not complete after {self._within_s:g} s"
                raise ApiError(408, message, code="body_timeout") from error
            parts[:] = [b"".join(parts)]
            yield parts[0]
        finally:
            self.held -= sum(map(len, parts))

    async def _collect(self, receive: Receive, parts: list[bytes]) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientGoneError
            part = message.get("body", b"")
            size += len(part)
            if size > self._most:
                raise self._too_large()
            if self.held + len(part) > self._together:
                text = f"this server reads {self._together} bytes of bodies already, the most that it takes at once"
                raise too_busy(text, 1)
            self.held += len(part)
            parts.append(part)
            more = message.get("more_body", False)

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self._most} bytes, the most that this server takes"
        return ApiError(413, message, code="body_too_large")


def _check_type(scope: Scope) -> None:
    """Raise ``ApiError`` (415) for a body that says it is no JSON; one that says nothing is taken for JSON.

    A web page's script may send other types to any server without asking; it must not reach this one by them.
    """
    kind = header(scope, b"content-type").decode("latin-1").lower()
    media, *parameters = (each.strip() for each in kind.split(";"))
    charsets = [each.removeprefix("charset=").strip('"') for each in parameters if each.startswith("charset=")]
    message = ""
    if media not in {"", "application/json"}:
        message = f"`Content-Type` is `{media[:64]}`; bodies are `application/json`"
    elif not {"utf-8", "utf8", "us-ascii"}.issuperset(charsets):
        message = f"`Content-Type` has the charset `{charsets[0][:64]}`; bodies are UTF-8"
    coding = header(scope, b"content-encoding").decode("latin-1").strip().lower()
    if coding not in {"", "identity"}:
        message = f"`Content-Encoding` is `{coding[:64]}`; bodies are not compressed"
    if message:
        raise ApiError(415, message, code="unsupported_media_type")


async def respond(send: Send, status: int, body: bytes, kind: bytes = JSON, headers: tuple[bytes, ...] = ()) -> None:
    """A whole answer; ``headers`` are names and values in turn."""
    pairs = list(zip(headers[::2], headers[1::2], strict=True))
    pairs += [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    for at in range(0, len(body) - PIECE, PIECE):
        await send({"type": "http.response.body", "body": body[at : at + PIECE], "more_body": True})
        await asyncio.sleep(0)
    rest = max(0, len(body) - 1) // PIECE * PIECE
    await send({"type": "http.response.body", "body": body[rest:]})


async def refuse(send: Send, error: ApiError, form: ErrorForm = openai_body, headers: tuple[bytes, ...] = ()) -> None:
    """An error's answer; ``form`` makes its body."""
    headers = (*headers, *error.headers)
    if error.retry_after_s:
        headers = (*headers, b"retry-after", b"%d" % error.retry_after_s)
    if error.status == 401:
        headers = (*headers, b"www-authenticate", b"Bearer")
    if error.status in {408, 413, 415}:
        # The rest of the body is not read, so the connection cannot carry another request.
        headers = (*headers, b"connection", b"close")
    await respond(send, error.status, form(error), headers=headers)


async def begin_events(send: Send, headers: tuple[bytes, ...]) -> None:
    """The head of a stream of server-sent events."""
    pairs = list(zip(headers[::2], headers[1::2], strict=True))
    pairs += [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": pairs})


def external_id(scope: Scope, given: str | None) -> str:
    """The client's own name for its request ("" for none). Raises ``ApiError``."""
    name = given or header(scope, b"x-request-id").decode("latin-1")
    if len(name) > 128 or not name.isascii() or not name.isprintable():
        param = "request_id" if given else "X-Request-Id"
        message = f"`{param}` may have at most 128 printable ASCII characters"
        raise invalid(message, param)
    return name
