"""The null engine: answers every plan at once with made-up tokens, to size gateways and groups without a model.

The same sequence gets the same tokens on any rank, and none of them ends it that need not. It checks plans as the real engine does, and imports no torch.
"""

import time
import zlib
from array import array
from collections.abc import Collection
from dataclasses import dataclass
from struct import pack
from typing import Final

from edgemesh.engine.slots import Slots
from edgemesh.engine.turns import Limits, Station, StepRefusedError, Turns
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.messages import Chunk, Decode, Done, IdleDone, IdlePlan, Join, Plan, Prefill, PromptLogprobs, Scoring

EVEN: Final = int.from_bytes(pack("<f", -5.0), "little", signed=True)
"""The bits of the log-probability that this engine gives every prompt token."""


@dataclass(slots=True)
class _Voice:
    """What one sequence says: tokens of a checksum over its request and position, but for ``stops``."""

    seed: int
    position: int
    stops: Collection[int]


class NullEngine:
    """One rank that computes nothing."""

    collective_ns = 0

    def __init__(self, station: Station, limits: Limits, eos: Collection[int]) -> None:
        self._turns = Turns(station, limits)
        self._slots = Slots(limits)
        self._vocab = limits.vocab
        self._eos = frozenset(eos)
        self._voices: dict[int, _Voice] = {}

    def allow(self, wait_ns: int) -> None:
        """There is nobody to wait for."""

    def execute(self, plan: Plan | IdlePlan) -> Done | IdleDone:
        """Answer; ``StepRefusedError`` for a plan that a real rank would refuse."""
        began = time.perf_counter_ns()
        self._turns.check(plan, self._count)
        self._turns.tick += 1
        head = (plan.group, plan.plane, plan.epoch, plan.tick)
        if isinstance(plan, IdlePlan):
            return IdleDone(*head, time.perf_counter_ns() - began)
        firsts: list[int] = []
        if plan.prefill:
            masks = _masks(plan.prefill)
            for at, chunk in enumerate(plan.prefill.chunks):
                if chunk.final:
                    firsts.append(self._say(self._first(chunk), masks.get(at, 0)))
        ran: list[int] = []
        tokens: list[int] = []
        if plan.decode:
            for slot in plan.decode.leaves:
                del self._voices[slot]
            self._voices |= {join.slot: self._joined(join) for join in plan.decode.joins}
            ran = self._slots.apply(plan.decode)
            masks = _masks(plan.decode)
            tokens = [self._say(self._voices[slot], masks.get(slot, 0)) for slot in ran]
            self._slots.advance(tokens)
        scores = (
            tuple(self._scored(chunk.scoring) for chunk in plan.prefill.chunks if chunk.scoring) if plan.prefill else ()
        )
        spent = time.perf_counter_ns() - began
        return Done(*head, tuple(ran), tuple(tokens), tuple(firsts), step_ns=spent, prompt_logprobs=scores)

    def _count(self, plan: Plan) -> int:
        if plan.decode is None:
            return 0
        rows, fault = self._slots.count(plan.decode)
        if fault:
            raise StepRefusedError(fault)
        return rows

    def _first(self, chunk: Chunk) -> _Voice:
        stops = chunk.sampling.stop_token_ids if chunk.sampling else ()
        return _Voice(zlib.crc32(chunk.request.encode()), chunk.start + chunk.length, self._eos | set(stops))

    def _joined(self, join: Join) -> _Voice:
        stops = self._eos | set(join.sampling.stop_token_ids)
        return _Voice(zlib.crc32(join.request.encode()), join.position + 1, stops)

    def _say(self, voice: _Voice, mask: int) -> int:
        """The next token; the first one that does not stop, from a place that the checksum chooses.

        Under a ``mask`` (0: none) the first one that is allowed, and one that stops only if there is no other.
        """
        token = zlib.crc32(voice.position.to_bytes(4, "little"), voice.seed) % self._vocab
        voice.position += 1
        if mask:
            stops = sum(1 << stop for stop in set(voice.stops))
            allowed = mask & ~stops or mask
            later = allowed >> token << token or allowed
            return (later & -later).bit_length() - 1
        for _ in range(len(voice.stops)):
            if token not in voice.stops:
                break
            token = (token + 1) % self._vocab
        return token

    def _scored(self, scoring: Scoring) -> PromptLogprobs:
        """Each target is as likely as the ids after it."""
        rows = array("i")
        for target in scoring.targets:
            rows.extend((EVEN, 1))
            for place in range(scoring.top):
                rows.extend(((target + place) % self._vocab, EVEN))
        return PromptLogprobs(scoring.first, scoring.top, TokenArray(rows))


def _masks(part: Prefill | Decode) -> dict[int, int]:
    """Every mask of a plan's part as one number, by its chunk or slot."""
    words = len(part.masks) // len(part.masked) if part.masked else 0
    rows = (part.masks.slice(at * words, (at + 1) * words).buffer for at in range(len(part.masked)))
    return {key: int.from_bytes(row, "little") for key, row in zip(part.masked, rows, strict=True)}
