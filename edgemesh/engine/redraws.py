"""Rows whose last draw gave no token: they go on with other noise, though the row leaves or its chunk is planned again."""

from collections.abc import Iterable
from typing import Final

from edgemesh.engine.sampler import NO_TOKEN, Row
from edgemesh.engine.shaping import Shaper
from edgemesh.wire.messages import Sampling

MAX_REDRAWS: Final = 4096
"""Sequences that are remembered; beyond it the oldest is forgotten."""


class Redraws:
    """By request: the position that gave no token, and how often."""

    def __init__(self) -> None:
        self._failed: dict[str, tuple[int, int]] = {}

    def row(self, request: str, sampling: Sampling, position: int, emitted: int, shape: Shaper | None) -> Row:
        """The row that draws the token at ``position``."""
        drew, attempt = self._failed.get(request, (position, 0))
        return Row(sampling, position, emitted, shape, attempt if drew == position else 0)

    def remember(self, drawn: Iterable[tuple[str, Row, int]]) -> None:
        """What rows, not yet moved on, have drawn."""
        for request, row, token in drawn:
            self._failed.pop(request, None)
            if token == NO_TOKEN:
                self._failed[request] = (row.position, row.attempt + 1)
        while len(self._failed) > MAX_REDRAWS:
            del self._failed[next(iter(self._failed))]
