"""Executes plans on one rank, in order: take the delta, run the network, draw, answer."""

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from edgemesh.engine.attention.sdpa import SdpaAttention
from edgemesh.engine.batch import Batch
from edgemesh.engine.collectives import Collectives, alone
from edgemesh.engine.inputs import DecodeRows, build
from edgemesh.engine.layout import Split
from edgemesh.engine.model import Network
from edgemesh.engine.redraws import Redraws
from edgemesh.engine.sampler import Drawn, Row, Sampler
from edgemesh.engine.scores import Scorer, asked, most_of, packed, scorings, targets_of
from edgemesh.engine.shape import ModelShape
from edgemesh.engine.shaping import masks_of, shaper
from edgemesh.engine.streams import Whole, stream
from edgemesh.engine.turns import Limits, Station, StepRefusedError, Turns
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.messages import (
    Chunk,
    Decode,
    Done,
    IdleDone,
    IdlePlan,
    Join,
    Logprob,
    Plan,
    Prefill,
    PromptLogprobs,
    Sampling,
)


class Runner:
    """One rank's network, memory and batch."""

    def __init__(
        self,
        station: Station,
        limits: Limits,
        shape: ModelShape,
        split: Split,
        tensors: Mapping[str, Tensor],
        collectives: Collectives,
    ) -> None:
        self._turns = Turns(station, limits)
        self._limits = limits
        self._collectives = collectives
        self._network = Network(shape, split, tensors, SdpaAttention(tensors["kv"]), limits.positions)
        sizes = self._network.sizes
        self._start, self._width = sizes.vocab_start, sizes.vocab_count
        self._sampler = Sampler(self._start, self._width, shape.vocab, collectives.attn)
        self._scorer = Scorer(self._start, self._width, shape.vocab, collectives.attn)
        self._batch = Batch(limits)
        self._redraws = Redraws()

    @property
    def collective_ns(self) -> int:
        """Time spent in collectives since the start."""
        return self._collectives.spent_ns

    def allow(self, wait_ns: int) -> None:
        """Collectives from now on end ``wait_ns`` from now."""
        self._collectives.deadline.allow(wait_ns)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """A prompt and a row through every kernel, in the scratch page and without the other ranks."""
        place = torch.zeros(1, dtype=torch.int64)
        rows = DecodeRows(place, place, torch.zeros((1, 1), dtype=torch.int64), 1)
        prefill = Prefill((Chunk("warm-up", 0, 1, (0,), final=True),), TokenArray.of([0]))
        step = build(Whole(alone().attn, 2), self._limits.page_tokens, prefill, rows)
        self._network.logits(self._network.forward(step))

    @torch.inference_mode()
    def execute(self, plan: Plan | IdlePlan) -> Done | IdleDone:
        """Run one step; ``StepRefusedError`` before anything is changed or exchanged."""
        began = time.perf_counter_ns()
        self._turns.check(plan, self._count)
        self._turns.tick += 1
        head = (plan.group, plan.plane, plan.epoch, plan.tick)
        if isinstance(plan, IdlePlan):
            self._forward(plan, None, [])
            return IdleDone(*head, time.perf_counter_ns() - began)
        ran = self._batch.apply(plan.decode, map(self._joined, plan.decode.joins)) if plan.decode else []
        hidden = self._forward(plan, plan.prefill, ran)
        for slot, mask in self._masks(plan.decode).items() if plan.decode else ():
            self._batch.rows[slot].mask = mask
        firsts = self._firsts(plan.prefill)
        cut = len(firsts)
        hidden, scores = self._scored(hidden, plan.prefill)
        rows = [*(row for _, row in firsts), *(self._batch.rows[slot] for slot in ran)]
        requests = [*(request for request, _ in firsts), *(self._batch.slots.seats[slot].request for slot in ran)]
        drawn = self._draw(hidden, rows)
        self._redraws.remember(zip(requests, rows, drawn.tokens, strict=True))
        if ran:
            self._batch.advance(drawn.tokens[cut:])
        tokens, logprobs = tuple(drawn.tokens), drawn.logprobs
        return Done(
            *head,
            tuple(ran),
            tokens[cut:],
            tokens[:cut],
            _asked(logprobs[cut:]),
            _asked(logprobs[:cut]),
            time.perf_counter_ns() - began,
            scores,
        )

    def _count(self, plan: Plan) -> int:
        if plan.decode is None:
            return 0
        rows, fault = self._batch.slots.count(plan.decode)
        if fault:
            raise StepRefusedError(fault)
        return rows

    def _forward(self, plan: Plan | IdlePlan, prefill: Prefill | None, ran: Sequence[int]) -> Tensor:
        """Hidden states of the rows that draw or are scored; the same collectives on every rank of the set."""
        flow = stream(self._collectives, plan.verdict)
        rows = None
        if ran:
            longest = 1 + max(self._batch.slots.seats[slot].position for slot in ran)
            rows = DecodeRows(*self._batch.inputs(), longest)
        return self._network.forward(build(flow, self._limits.page_tokens, prefill, rows))

    def _scored(self, hidden: Tensor, prefill: Prefill | None) -> tuple[Tensor, tuple[PromptLogprobs, ...]]:
        """The hidden states of the rows that draw, and the log-probabilities of the positions that are asked for."""
        wanted = scorings(prefill)
        if prefill is None or not wanted:
            return hidden, ()
        rows = asked(prefill)
        targets = torch.from_numpy(targets_of(wanted))
        found = self._scorer.score(hidden[rows.scored], targets, self._network.logits, most_of(wanted))
        return torch.cat((hidden[rows.draws], hidden[len(rows.rows) :])), packed(found, wanted)

    def _draw(self, hidden: Tensor, rows: Sequence[Row]) -> Drawn:
        """A token for each row."""
        return self._sampler.draw(self._network.logits(hidden), rows) if rows else Drawn([], [])

    def _firsts(self, prefill: Prefill | None) -> list[tuple[str, Row]]:
        """The rows of final chunks, with their requests."""
        if prefill is None:
            return []
        masks = self._masks(prefill)
        found = []
        for number, chunk in enumerate(prefill.chunks):
            if chunk.sampling is not None:
                position = chunk.start + chunk.length
                row = self._row(chunk.request, chunk.sampling, position, chunk.emitted, chunk.history)
                row.mask = masks.get(number)
                found.append((chunk.request, row))
        return found

    def _masks(self, part: Prefill | Decode) -> dict[int, Tensor]:
        return masks_of(part.masked, part.masks, self._start, self._width)

    def _joined(self, join: Join) -> Row:
        return self._row(join.request, join.sampling, join.position + 1, join.emitted, join.history)

    def _row(self, request: str, sampling: Sampling, position: int, emitted: int, history: TokenArray) -> Row:
        shape = shaper(sampling, self._start, self._width, history.tolist(), emitted)
        return self._redraws.row(request, sampling, position, emitted, shape)


def _asked(logprobs: Sequence[Logprob | None]) -> tuple[Logprob | None, ...]:
    """No entries at all where nobody asked."""
    return tuple(logprobs) if any(each is not None for each in logprobs) else ()
