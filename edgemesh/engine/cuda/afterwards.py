"""Rows that a step draws after the others: cut ones on the device, those that need the host with the sampler.

Both leave the row's slot on the device as the step's own kernels would have left it.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from edgemesh.engine.collectives import Collectives
from edgemesh.engine.cuda.cutting import CutRow, Cutter, cut_alone
from edgemesh.engine.cuda.flights import Drawing, Flight
from edgemesh.engine.cuda.nccl import settle
from edgemesh.engine.cuda.rows import DeviceBatch, heat
from edgemesh.engine.cuda.staging import Inbox, Outbox
from edgemesh.engine.redraws import Redraws
from edgemesh.engine.sampler import NO_TOKEN, Row, Sampler
from edgemesh.engine.shaping import masks_of, shaper
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.messages import Decode, Join, Prefill, Sampling


class Afterwards:
    """One rank's part; its logits are those of ids ``[start, start + width)``."""

    def __init__(
        self,
        start: int,
        width: int,
        vocab: int,
        collectives: Collectives,
        batch: DeviceBatch,
        outbox: Outbox,
        device: torch.device,
    ) -> None:
        self._start, self._width, self._device = start, width, device
        self._batch = batch
        self._collectives = collectives
        self._here = Inbox(device, 1)
        group = collectives.attn
        self._cutter = Cutter(start, width, group, batch.last, batch.position, batch.attempt, outbox)
        self._sampler = Sampler(start, width, vocab, group, device)
        self._redraws = Redraws()

    def warm_up(self, logits: Tensor, tokens: Tensor) -> None:
        """Compile the kernels of cut rows."""
        row = Row(Sampling(top_p=0.5), 1, 0)
        self._cutter.draw(logits, [CutRow(0, -1, row)], tokens)

    def joined(self, join: Join) -> Row:
        """The row of a slot that is joined."""
        return self._row(join.request, join.sampling, join.position + 1, join.emitted, join.history)

    def masks(self, part: Prefill | Decode) -> dict[int, Tensor]:
        """What grammars allow in a step, by chunk or slot."""
        return masks_of(part.masked, part.masks, self._start, self._width, self._device)

    def drawings(self, prefill: Prefill | None, ran: Sequence[int]) -> list[Drawing]:
        """All rows that draw: ends of prompts, then the slots that run."""
        found: list[Drawing] = []
        masks = self.masks(prefill) if prefill else {}
        for number, chunk in enumerate(prefill.chunks if prefill else ()):
            if chunk.sampling is not None:
                position = chunk.start + chunk.length
                row = self._row(chunk.request, chunk.sampling, position, chunk.emitted, chunk.history)
                row.mask = masks.get(number)
                found.append(Drawing(len(found), chunk.request, row))
        for slot in ran:
            seat = self._batch.slots.seats[slot]
            found.append(Drawing(len(found), seat.request, self._batch.rows[slot], slot, seat))
        return found

    def draw(
        self, flight: Flight, drawings: Sequence[Drawing], logits: Tensor, tokens: Tensor, before: Iterable[Flight]
    ) -> None:
        """Fill in ``tokens`` of cut rows, and wait for what the sampler draws; ``before`` are the steps still under way."""
        waiting: list[Drawing] = []
        for each in drawings:
            if heat(each.row) < 0:
                (flight.cuts if cut_alone(each.row) else waiting).append(each)
        if flight.cuts:
            self._cutter.draw(logits, [CutRow(each.number, each.slot, each.row) for each in flight.cuts], tokens)
        if waiting:
            # All that is enqueued, this step's network included, and no longer than ranks may wait for each other.
            self._here.fetch(tokens[:0])
            settle(self._here, self._collectives)
            for earlier in before:
                self.landed(earlier)
            self._sample(flight, logits, waiting)
        self._move(flight, drawings)

    def landed(self, flight: Flight) -> list[int]:
        """The step's tokens, which are here; its cut rows get to know theirs, once."""
        tokens = flight.inbox.tokens(flight.firsts + len(flight.ran))
        for each in flight.cuts:
            token = tokens[each.number]
            self._redraws.remember(((each.request, each.row, token),))
            each.row.took(token)
            if each.seat is not None and token == NO_TOKEN:
                each.seat.position -= 1
        flight.cuts = []
        return tokens

    def _move(self, flight: Flight, drawings: Sequence[Drawing]) -> None:
        """Rows are where they will be when the step is through; where a cut row yields nothing, ``landed`` takes that back."""
        cuts = {each.number for each in flight.cuts}
        for each in drawings:
            token = flight.patch.get(each.number, 0)
            if each.number not in cuts:
                # What the device drew matters to the host's row only in that it is a token.
                each.row.took(token)
            if each.seat is not None and token != NO_TOKEN:
                each.seat.position += 1

    def _sample(self, flight: Flight, logits: Tensor, drawings: Sequence[Drawing]) -> None:
        """Draw these rows with the sampler, on all ranks of the group alike."""
        chosen = logits[[each.number for each in drawings]]
        drawn = self._sampler.draw(chosen, [each.row for each in drawings])
        self._redraws.remember(
            (each.request, each.row, token) for each, token in zip(drawings, drawn.tokens, strict=True)
        )
        for each, token, logprob in zip(drawings, drawn.tokens, drawn.logprobs, strict=True):
            flight.patch[each.number] = token
            if logprob is not None:
                flight.logprobs[each.number] = logprob
            if each.slot >= 0 and token != NO_TOKEN:
                self._batch.put(each.slot, token, each.row.position)

    def _row(self, request: str, sampling: Sampling, position: int, emitted: int, history: TokenArray) -> Row:
        shape = shaper(sampling, self._start, self._width, history.tolist(), emitted, self._device)
        return self._redraws.row(request, sampling, position, emitted, shape)
