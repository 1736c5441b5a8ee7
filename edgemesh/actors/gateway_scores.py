"""Room for the log-probabilities of prompts that wait in a gateway for their answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from edgemesh.api.errors import invalid, too_busy
from edgemesh.api.resolve import Job

MOST: Final = 1 << 20
"""Log-probabilities that a gateway holds at once, alternatives included: 8 bytes each packed, and some sixty as JSON."""


class ScoreRoom:
    """Counts what the open requests may come to hold, before any of it comes."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self.held = 0

    @contextmanager
    def room(self, job: Job) -> Iterator[None]:
        """Room for one request until the end of the block. Raises ``ApiError`` (400, 429)."""
        wanted = job.prompt_logprobs
        if wanted > self._most:
            param = "prompt_logprobs" if job.extras.prompt_logprobs >= 0 else "logprobs"
            message = (
                f"`{param}` asks for {wanted} log-probabilities of prompts; the most in one request is {self._most}"
            )
            raise invalid(message, param)
        if self.held + wanted > self._most:
            message = f"this server holds {self.held} log-probabilities of prompts, of at most {self._most}"
            raise too_busy(message, 1)
        self.held += wanted
        try:
            yield
        finally:
            self.held -= wanted
