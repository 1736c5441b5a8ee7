"""Signals as data: counted by handlers that do nothing else, and a descriptor that wakes a poller."""

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, Self

STOPPING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class Signals:
    """While entered: requests to stop are counted in ``stops``, and they and children's changes make ``fd`` readable.

    Only for the main thread. The handlers from before are put back at the end.
    """

    def __init__(self) -> None:
        self.stops = 0
        self.fd, self._write = -1, -1
        self._before: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> Self:
        self.fd, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in STOPPING:
            self._before[number] = signal.signal(number, self._stop)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.fd)
        os.close(self._write)

    def clear(self) -> None:
        """Forget the wake-ups so far; what they were about is seen by looking."""
        try:
            while os.read(self.fd, 4096):
                pass
        except BlockingIOError:
            return

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.stops += 1
