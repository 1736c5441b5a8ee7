"""Whose turn it is: a plan is checked against what this rank did last before anything is changed or exchanged."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.ids import Layout, Plane
from edgemesh.wire.messages import Chunk, IdlePlan, Plan, Prefill


class StepRefusedError(ValueError):
    """A plan that this rank will not run; its state is unchanged."""


@dataclass(frozen=True, slots=True)
class Station:
    """Where a rank stands: its group, plane and epoch; ``member`` is the group's index among the ``groups`` of its set."""

    group: int
    plane: Plane
    epoch: int
    member: int = 0
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What a rank's memory holds: pages (the scratch page included), tokens per page, rows, and positions of a row."""

    pages: int
    page_tokens: int
    slots: int
    positions: int
    vocab: int

    @property
    def row_pages(self) -> int:
        """Pages of the longest row."""
        return -(-self.positions // self.page_tokens)

    def page_fault(self, pages: Iterable[int]) -> str:
        """Which page is outside the slab, or nothing."""
        wrong = next((page for page in pages if not 1 <= page < self.pages), None)
        return "" if wrong is None else f"page {wrong} is not among 1 to {self.pages - 1}"

    @property
    def mask_words(self) -> int:
        """32-bit words of a mask over the vocabulary."""
        return -(-self.vocab // 32)

    def mask_fault(self, masked: Sequence[int], masks: TokenArray) -> str:
        """Why these are not the masks of these rows, or nothing."""
        if len(set(masked)) != len(masked):
            return f"a row is masked twice: {sorted(masked)}"
        if len(masks) != len(masked) * self.mask_words:
            return f"{len(masks)} mask words for {len(masked)} rows; {self.mask_words} are one row's"
        return ""


class Turns:
    """The tick that comes next, and the checks that do not depend on the batch."""

    def __init__(self, station: Station, limits: Limits) -> None:
        self.station = station
        self.tick = 0
        self._limits = limits

    def check(self, plan: Plan | IdlePlan, rows: Callable[[Plan], int]) -> None:
        """Raise ``StepRefusedError`` unless this is the next plan; ``rows`` checks its decode part and counts its rows."""
        station = self.station
        for name, has, wants in (
            ("group", plan.group, station.group),
            ("plane", plan.plane, station.plane),
            ("epoch", plan.epoch, station.epoch),
            ("tick", plan.tick, self.tick),
        ):
            if has != wants:
                message = f"{name}: {has}; this rank's next is {wants}"
                raise StepRefusedError(message)
        verdict = plan.verdict
        if len(verdict.tokens) != station.groups:
            message = f"verdict: {len(verdict.tokens)} groups; the coupled set has {station.groups}"
            raise StepRefusedError(message)
        if verdict.layout is Layout.EVEN and verdict.bucket < max(verdict.tokens):
            message = f"verdict: bucket {verdict.bucket} is less than {max(verdict.tokens)} tokens"
            raise StepRefusedError(message)
        if isinstance(plan, Plan):
            self._real(plan, rows(plan))

    def _real(self, plan: Plan, rows: int) -> None:
        computed = self._prefill(plan.prefill) if plan.prefill else 0
        granted = plan.verdict.tokens[self.station.member]
        if not 0 < computed + rows <= granted:
            message = f"{computed} prompt tokens and {rows} rows; the verdict grants 1 to {granted} tokens"
            raise StepRefusedError(message)

    def _prefill(self, prefill: Prefill) -> int:
        total = sum(chunk.length for chunk in prefill.chunks)
        if total != len(prefill.tokens):
            message = f"prefill: {len(prefill.tokens)} tokens for chunks of {total}"
            raise StepRefusedError(message)
        highest = max(prefill.tokens, default=0)
        if highest >= self._limits.vocab or min(prefill.tokens, default=0) < 0:
            message = f"prefill: token {highest} is not among 0 to {self._limits.vocab - 1}"
            raise StepRefusedError(message)
        fault = self._masks(prefill)
        if fault:
            message = f"prefill: {fault}"
            raise StepRefusedError(message)
        for chunk in prefill.chunks:
            fault = self._chunk(chunk)
            if fault:
                message = f"chunk of {chunk.request!r}: {fault}"
                raise StepRefusedError(message)
        return total

    def _masks(self, prefill: Prefill) -> str:
        for at in prefill.masked:
            if at >= len(prefill.chunks) or not prefill.chunks[at].final:
                return f"chunk {at} is masked, but is no final one of {len(prefill.chunks)}"
        return self._limits.mask_fault(prefill.masked, prefill.masks)

    def _chunk(self, chunk: Chunk) -> str:
        limits, stop = self._limits, chunk.start + chunk.length
        if stop > limits.positions:
            return f"ends at position {stop}; the most is {limits.positions}"
        if len(chunk.pages) != -(-stop // limits.page_tokens):
            return f"{len(chunk.pages)} pages of {limits.page_tokens} tokens for {stop} positions"
        if chunk.final != (chunk.sampling is not None):
            return "a final chunk has sampling settings, and no other"
        if chunk.sampling and chunk.sampling.needs_history and len(chunk.history) != stop:
            return f"a history of {len(chunk.history)} tokens at position {stop}"
        return self._scoring(chunk) or limits.page_fault(chunk.pages)

    def _scoring(self, chunk: Chunk) -> str:
        scoring, stop = chunk.scoring, chunk.start + chunk.length
        if scoring is None:
            return ""
        first, count = scoring.first, len(scoring.targets)
        if not (count and chunk.start <= first and first + count <= stop):
            return f"{count} positions from {first} are to be scored; the chunk has {chunk.start} to {stop - 1}"
        if min(scoring.targets) < 0 or max(scoring.targets) >= self._limits.vocab:
            return f"a target that is not among 0 to {self._limits.vocab - 1}"
        return ""
