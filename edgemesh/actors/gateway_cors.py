"""Which web pages' scripts may call this server: cross-origin requests as the Fetch standard has them.

A browser asks before it sends JSON or a key to another origin (a preflight), and lets a script read the answer only if
that names the script's origin. Without any allowed origin nothing is said, and browsers keep scripts of other pages out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from starlette.types import Message, Scope, Send

from edgemesh.actors.gateway_http import header
from edgemesh.api.errors import ApiError

ANY: Final = "*"
MAX_AGE_S: Final = 600
MAX_NAMES_BYTES: Final = 2048
"""Header names of one preflight."""

READABLE: Final = b"x-request-id, retry-after"
"""Headers of an answer that a script may read beside those that it always may."""

_NAMES: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_, ")

Headers = list[tuple[bytes, bytes]]


class Origins:
    """The allowed origins (``scheme://host[:port]``, or ``*`` for all)."""

    def __init__(self, allowed: Collection[str] = ()) -> None:
        self._any = ANY in allowed
        self._allowed = frozenset(each.encode() for each in allowed)

    def __bool__(self) -> bool:
        return bool(self._allowed)

    def granted(self, scope: Scope) -> Headers:
        """What an answer to this request says of origins; nothing where no origin is allowed."""
        if not self._allowed:
            return []
        origin = header(scope, b"origin")
        readable = (b"access-control-expose-headers", READABLE)
        if self._any:
            return [(b"access-control-allow-origin", b"*"), readable] if origin else []
        vary = (b"vary", b"Origin")
        return [(b"access-control-allow-origin", origin), readable, vary] if origin in self._allowed else [vary]

    def answering(self, scope: Scope, send: Send) -> Send:
        """The same ``send``, with this request's headers on the answer that goes through it."""
        granted = self.granted(scope)
        if not granted:
            return send

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *granted]}
            await send(message)

        return with_headers

    def options(self, scope: Scope, methods: Iterable[str]) -> Headers:
        """The headers of the answer to ``OPTIONS``, a preflight or not. Raises ``ApiError`` (403) for a stranger's."""
        allow = ", ".join(sorted({*methods, "OPTIONS"})).encode()
        headers = [(b"allow", allow)]
        if not header(scope, b"access-control-request-method"):
            return headers
        granted = self.granted(scope)
        if not any(name == b"access-control-allow-origin" for name, _ in granted):
            message = "this origin may not call this server; `gateway.allowed_origins` names those that may"
            raise ApiError(403, message, kind="permission_error", code="origin_not_allowed")
        asked = header(scope, b"access-control-request-headers")
        if asked and len(asked) <= MAX_NAMES_BYTES and _NAMES.issuperset(asked):
            headers.append((b"access-control-allow-headers", asked))
        headers += [(b"access-control-allow-methods", allow), (b"access-control-max-age", b"%d" % MAX_AGE_S)]
        return headers
