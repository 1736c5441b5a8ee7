"""What a list of timed calls amounts to; pure.

The words are the field's: TTFT from sending the request to the first text, ITL between two pieces of text of one stream,
TPOT a stream's mean time per output token after the first, e2e to the end of the response.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct

MS = 1e6
"""Nanoseconds in a millisecond."""


class Call(Struct, frozen=True):
    """One request as the client saw it; times are monotonic nanoseconds.

    ``stamps`` are the arrivals of every piece of text. A call with an ``error`` counts as failed and in nothing else.
    """

    start_ns: int
    end_ns: int
    stamps: tuple[int, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""

    @property
    def ttft_ms(self) -> float:
        """Time to the first text."""
        return (self.stamps[0] - self.start_ns) / MS

    @property
    def e2e_ms(self) -> float:
        """Time to the end."""
        return (self.end_ns - self.start_ns) / MS

    @property
    def itl_ms(self) -> list[float]:
        """Gaps between pieces of text."""
        return [(later - earlier) / MS for earlier, later in zip(self.stamps, self.stamps[1:], strict=False)]

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per output token after the first; None for a single token."""
        if self.output_tokens < 2 or not self.stamps:
            return None
        return (self.end_ns - self.stamps[0]) / MS / (self.output_tokens - 1)


class Spread(Struct, frozen=True):
    """A distribution in five numbers."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Summary(Struct, frozen=True):
    """A whole load in the numbers that engines are compared by."""

    requests: int
    failed: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    e2e_ms: Spread
    ttft_ms: Spread
    itl_ms: Spread
    tpot_ms: Spread


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of an ascending sequence lies, linear between neighbours; NaN if empty."""
    if not ordered:
        return math.nan
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Iterable[float]) -> Spread:
    """The five numbers of these values; all NaN if there are none."""
    ordered = sorted(values)
    return Spread(
        mean=math.fsum(ordered) / len(ordered) if ordered else math.nan,
        p50=percentile(ordered, 0.5),
        p90=percentile(ordered, 0.9),
        p99=percentile(ordered, 0.99),
        max=ordered[-1] if ordered else math.nan,
    )


def summarise(calls: Sequence[Call]) -> Summary:
    """Sum up calls that ran in one load; the duration is from the first start to the last end."""
    good = [call for call in calls if not call.error]
    streamed = [call for call in good if call.stamps]
    duration = (max(call.end_ns for call in good) - min(call.start_ns for call in good)) / 1e9 if good else math.nan
    prompt = sum(call.prompt_tokens for call in good)
    output = sum(call.output_tokens for call in good)
    return Summary(
        requests=len(good),
        failed=len(calls) - len(good),
        duration_s=duration,
        prompt_tokens=prompt,
        output_tokens=output,
        cached_tokens=sum(call.cached_tokens for call in good),
        requests_per_s=len(good) / duration,
        output_tokens_per_s=output / duration,
        total_tokens_per_s=(prompt + output) / duration,
        e2e_ms=spread(call.e2e_ms for call in good),
        ttft_ms=spread(call.ttft_ms for call in streamed),
        itl_ms=spread(gap for call in streamed for gap in call.itl_ms),
        tpot_ms=spread(tpot for call in streamed if (tpot := call.tpot_ms) is not None),
    )
