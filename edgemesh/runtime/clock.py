"""Time as data: actors ask their port, and only a port asks the system."""

import time
from typing import Protocol

monotonic_ns = time.monotonic_ns
wall_ns = time.time_ns


class Clock(Protocol):
    """Where nanoseconds come from."""

    def now(self) -> int:
        """Monotonic nanoseconds."""
        ...

    def wall(self) -> int:
        """Nanoseconds since 1970."""
        ...


class SystemClock:
    """The machine's own clocks; the monotonic one is shared by all processes of a host."""

    __slots__ = ()

    def now(self) -> int:
        """Monotonic nanoseconds."""
        return monotonic_ns()

    def wall(self) -> int:
        """Nanoseconds since 1970."""
        return wall_ns()


class VirtualClock:
    """A clock that stands still until it is moved; never backwards."""

    __slots__ = ("_now",)

    def __init__(self, now: int = 0) -> None:
        self._now = now

    def now(self) -> int:
        """Virtual nanoseconds."""
        return self._now

    def wall(self) -> int:
        """The same virtual nanoseconds."""
        return self._now

    def move_to(self, now: int) -> None:
        """Advance to ``now``; raises ``ValueError`` for a time that has passed."""
        if now < self._now:
            message = f"time {now} is before {self._now}"
            raise ValueError(message)
        self._now = now
