"""What each API key has open and has used, and the refusal of what goes beyond its limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from edgemesh.api.errors import ApiError, invalid, too_busy
from edgemesh.api.keys import ApiKey, KeyLimits
from edgemesh.api.quota import charge, duration, remaining, wait_ns
from edgemesh.runtime.ledger import Ledger, Row

Headers = tuple[bytes, ...]
"""Names and values in turn."""

OPEN: Final = "max_requests"
RETRY_MS: Final = 1000
"""When to come again where one of the own requests must end first."""


class Quotas:
    """Every key's, over all gateways of the mesh; ``limited`` hears which limit refused a request."""

    def __init__(self, ledger: Ledger, now: Callable[[], int], limited: Callable[[str], None]) -> None:
        self._ledger = ledger
        self._now = now
        self._limited = limited

    def enter(self, key: ApiKey) -> Visit:
        """A request of this caller begins; its body is not read yet. Raises ``ApiError`` (429)."""
        limits, visit = key.limits, Visit(self, key)
        if not limits.any:
            return visit
        with self._ledger.row(key.digest) as row:
            now = self._now()
            if limits.max_requests and row.open >= limits.max_requests:
                what = f"{limits.max_requests} requests of this API key are open, the most that it may have at once"
                raise self._refusal(OPEN, what, RETRY_MS, _headers(limits, row, now))
            self._check(limits, row, now, 1)
            if limits.requests_per_minute:
                row.requests_due_ns = charge(row.requests_due_ns, now, 1, limits.requests_per_minute)
            row.opened(1)
            visit.headers = _headers(limits, row, now)
        return visit

    def prompt(self, visit: Visit, tokens: int) -> None:
        """The request's prompts are known: their tokens are taken. Raises ``ApiError`` (400, 429)."""
        limits = visit.key.limits
        if not limits.tokens_per_minute:
            return
        if tokens > limits.tokens_per_minute:
            message = (
                f"the prompt has {tokens} tokens; this API key may use {limits.tokens_per_minute} tokens per minute"
            )
            raise invalid(message, None, "tokens_per_minute_exceeded")
        with self._ledger.row(visit.key.digest) as row:
            now = self._now()
            self._check(limits, row, now, tokens, asked=False)
            row.tokens_due_ns = charge(row.tokens_due_ns, now, tokens, limits.tokens_per_minute)
            visit.charged = tokens
            visit.headers = _headers(limits, row, now)

    def leave(self, visit: Visit, used: int) -> None:
        """The request is over, and used so many tokens in all; what its prompt took beyond that is given back."""
        limits = visit.key.limits
        if not limits.any:
            return
        with self._ledger.row(visit.key.digest) as row:
            row.opened(-1)
            if limits.tokens_per_minute:
                more = used - visit.charged
                row.tokens_due_ns = charge(row.tokens_due_ns, self._now(), more, limits.tokens_per_minute)

    def _check(self, limits: KeyLimits, row: Row, now: int, tokens: int, *, asked: bool = True) -> None:
        """Raise 429 where a rate is used up; ``asked``: also that of requests."""
        waits = []
        if asked and limits.requests_per_minute:
            per_minute = limits.requests_per_minute
            waits.append((wait_ns(row.requests_due_ns, now, 1, per_minute), "requests_per_minute", per_minute))
        if limits.tokens_per_minute:
            per_minute = limits.tokens_per_minute
            waits.append((wait_ns(row.tokens_due_ns, now, tokens, per_minute), "tokens_per_minute", per_minute))
        wait, limit, per_minute = max(waits, default=(0, "", 0))
        if wait:
            left = (
                f"{remaining(row.tokens_due_ns, now, per_minute)} left, {tokens} needed; " if "tokens" in limit else ""
            )
            what = f"this API key has used up its {per_minute} {limit.replace('_', ' ')} ({left}try again in {duration(wait)})"
            raise self._refusal(limit, what, -(-wait // 1_000_000), _headers(limits, row, now))

    def _refusal(self, limit: str, what: str, retry_ms: int, headers: Headers) -> ApiError:
        self._limited(limit)
        error = too_busy(what, -(-retry_ms // 1000))
        error.headers = (*headers, b"retry-after-ms", b"%d" % retry_ms)
        return error


class Visit:
    """One request of a caller, from its admission to its end."""

    def __init__(self, quotas: Quotas, key: ApiKey) -> None:
        self._quotas = quotas
        self.key = key
        self.charged = 0
        """Tokens taken so far."""

        self.headers: Headers = ()
        """What the caller may still have, as OpenAI's clients read it."""

    def prompt(self, tokens: int) -> None:
        """Take the prompts' tokens. Raises ``ApiError`` (400, 429)."""
        self._quotas.prompt(self, tokens)

    def leave(self, used: int) -> None:
        """The request is over."""
        self._quotas.leave(self, used)


def _headers(limits: KeyLimits, row: Row, now: int) -> Headers:
    found: list[bytes] = []
    rates = (
        (b"requests", limits.requests_per_minute, row.requests_due_ns),
        (b"tokens", limits.tokens_per_minute, row.tokens_due_ns),
    )
    for unit, per_minute, due in rates:
        if per_minute:
            found += [b"x-ratelimit-limit-" + unit, b"%d" % per_minute]
            found += [b"x-ratelimit-remaining-" + unit, b"%d" % remaining(due, now, per_minute)]
            found += [b"x-ratelimit-reset-" + unit, duration(due - now).encode()]
    return tuple(found)
