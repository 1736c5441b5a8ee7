"""Rates per minute as one number each: the time at which all that was taken will have been given back.

The generic cell rate algorithm (ITU-T I.371): a full minute's worth may be taken at once, and comes back evenly. Times are
monotonic nanoseconds; nothing here reads a clock.
"""

from __future__ import annotations

from typing import Final

MINUTE_NS: Final = 60_000_000_000


def charge(due_ns: int, now_ns: int, amount: int, per_minute: int) -> int:
    """The new due time after ``amount`` was taken, allowed or not."""
    return max(due_ns, now_ns) + amount * MINUTE_NS // per_minute


def wait_ns(due_ns: int, now_ns: int, amount: int, per_minute: int) -> int:
    """How long to wait until ``amount`` may be taken; 0: it may now.

    >>> wait_ns(0, 5, 60, 60), wait_ns(charge(0, 5, 60, 60), 5, 1, 60)
    (0, 1000000000)
    """
    return max(0, charge(due_ns, now_ns, amount, per_minute) - now_ns - MINUTE_NS)


def remaining(due_ns: int, now_ns: int, per_minute: int) -> int:
    """How much may be taken now."""
    return max(0, MINUTE_NS - max(0, due_ns - now_ns)) * per_minute // MINUTE_NS


def duration(nanoseconds: int) -> str:
    """A time as ``x-ratelimit-reset`` headers write it.

    >>> duration(0), duration(120_000_000), duration(1_000_000_000), duration(360_000_000_000), duration(61_500_000_000)
    ('0s', '120ms', '1s', '6m0s', '1m1.5s')
    """
    ms = -(-max(0, nanoseconds) // 1_000_000)
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    seconds = f"{ms / 1000:g}s"
    return f"{minutes}m{seconds}" if minutes else seconds
