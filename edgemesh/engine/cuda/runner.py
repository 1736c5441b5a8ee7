"""Executes plans on one GPU, in order and ahead of the host: a step is enqueued while the one before it runs.

Decode steps that the verdict wants as graphs are replayed over the persistent batch; all others run eagerly. Tokens stay on
the device for the next step, and come to the host when their copy is through. Rows that are cut are drawn after the others, on the device
too; a row with penalties, bias, log-probabilities or a mask makes its step wait for the sampler.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from edgemesh.engine.collectives import Collectives
from edgemesh.engine.cuda.afterwards import Afterwards
from edgemesh.engine.cuda.attention import PagedAttention
from edgemesh.engine.cuda.drawing import Drawer
from edgemesh.engine.cuda.flights import Drawing, Flight
from edgemesh.engine.cuda.graphs import Graphs
from edgemesh.engine.cuda.nccl import settle
from edgemesh.engine.cuda.network import CudaNetwork
from edgemesh.engine.cuda.packing import Packed, pack
from edgemesh.engine.cuda.rows import DeviceBatch, StepRows
from edgemesh.engine.cuda.staging import Inbox, Outbox
from edgemesh.engine.layout import Split
from edgemesh.engine.sampler import Row
from edgemesh.engine.scores import Scorer, asked, most_of, scorings, targets_of
from edgemesh.engine.shape import ModelShape
from edgemesh.engine.streams import Stream, across, stream
from edgemesh.engine.turns import Limits, Station, StepRefusedError, Turns
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.ids import Plane
from edgemesh.wire.messages import Chunk, Decode, Done, IdleDone, IdlePlan, Plan, Prefill, Sampling, Scoring

MAX_FLYING: Final = 4
"""Steps that may be enqueued at once; a group plans two ahead."""

WIDTHS: Final = (16, 64)
"""Block tables (in pages) that small batches have graphs of their own for, beside the widest."""

_OUTBOX_BYTES: Final = 1 << 16


class CudaRunner:
    """One rank's network, memory and batch; everything runs on the stream that is current when it is made.

    ``sizes`` are the padded batch sizes that verdicts may ask graphs for.
    """

    def __init__(
        self,
        station: Station,
        limits: Limits,
        shape: ModelShape,
        split: Split,
        tensors: Mapping[str, Tensor],
        collectives: Collectives,
        attention: PagedAttention,
        sizes: Sequence[int],
    ) -> None:
        self._turns = Turns(station, limits)
        self._limits = limits
        self._collectives = collectives
        self._attention = attention
        self._network = CudaNetwork(shape, split, tensors, limits.positions)
        self._kv_heads = self._network.sizes.kv_local
        device = tensors["kv"].device
        start, width = self._network.sizes.vocab_start, self._network.sizes.vocab_count
        self._width, self._device = width, device
        widest = max((*sizes, limits.slots))
        self._outbox = Outbox(device, _OUTBOX_BYTES)
        self._batch = DeviceBatch(limits, widest, device, self._outbox)
        self._drawer = Drawer(start, width, collectives.attn, self._batch.last, self._batch.position)
        self._after = Afterwards(start, width, shape.vocab, collectives, self._batch, self._outbox, device)
        self._scorer = Scorer(start, width, shape.vocab, collectives.attn, device)
        self._rows = StepRows.empty(widest, widest, widest, limits.row_pages, device)
        self._tokens = torch.zeros(widest, dtype=torch.int32, device=device)
        self._logits = torch.empty((widest, width), dtype=tensors["lm_head"].dtype, device=device)
        self._graphs = Graphs(sizes, self._table_widths, self._decode_step)
        self._inboxes = [Inbox(device, widest) for _ in range(MAX_FLYING)]
        self._flying: deque[Flight] = deque()
        self._freed_ns = 0

    @property
    def collective_ns(self) -> int:
        """Time spent on the host in issuing collectives since the start."""
        return self._collectives.spent_ns

    @property
    def flying(self) -> int:
        """Steps enqueued whose answers have not been taken."""
        return len(self._flying)

    def allow(self, wait_ns: int) -> None:
        """Collectives from now on end ``wait_ns`` from now."""
        self._collectives.deadline.allow(wait_ns)

    @torch.inference_mode()
    def warm_up(self, chunk_tokens: int, say: Callable[[str], None]) -> None:
        """Compile and load every kernel, and capture the graphs; all ranks of the set do this together."""
        if self._turns.station.plane is not Plane.DECODE:
            for length in sorted({1, min(17, chunk_tokens), chunk_tokens}):
                self._prompt_step(length)
            torch.cuda.current_stream().synchronize()
        self._after.warm_up(self._logits, self._tokens)
        if self._graphs.sizes:
            began = time.perf_counter()
            count = self._graphs.capture()
            say(f"captured {count} decode graphs in {time.perf_counter() - began:.1f} s")

    @torch.inference_mode()
    def submit(self, plan: Plan | IdlePlan) -> None:
        """Enqueue one step; ``StepRefusedError`` before anything is changed or exchanged."""
        began = time.perf_counter_ns()
        self._turns.check(plan, self._count)
        self._refuse(plan)
        self._turns.tick += 1
        flight = Flight(plan, began, self._inboxes[plan.tick % MAX_FLYING])
        if isinstance(plan, IdlePlan):
            self._batch.idle()
            self._run(flight, None, [])
        else:
            ran = self._delta(plan.decode) if plan.decode else []
            flight.ran = tuple(ran)
            self._run(flight, plan.prefill, ran)
        self._flying.append(flight)

    def finished(self) -> Done | IdleDone | None:
        """The answer of the oldest step under way, if it is through; raises ``CollectiveError`` if it never will be."""
        if not self._flying:
            return None
        if not self._flying[0].inbox.query():
            if self._collectives.deadline.passed:
                settle(self._flying[0].inbox, self._collectives)
            return None
        flight = self._flying.popleft()
        now = time.perf_counter_ns()
        step_ns = now - max(flight.began_ns, self._freed_ns)
        self._freed_ns = now
        return flight.answer(self._after.landed(flight), step_ns)

    def execute(self, plan: Plan | IdlePlan) -> Done | IdleDone:
        """Run one step to its end."""
        self.submit(plan)
        answer = None
        while answer is None:
            self._flying[0].inbox.wait()
            answer = self.finished()
        return answer

    def replay(self, rows: int, pages: int) -> None:
        """Enqueue a recorded step over the batch as it stands, to measure it; its tokens move the rows on."""
        self._graphs.replay(rows, pages)

    # --- a step ---

    def _refuse(self, plan: Plan | IdlePlan) -> None:
        verdict = plan.verdict
        fault = ""
        if len(self._flying) >= MAX_FLYING:
            fault = f"{len(self._flying)} steps are under way; the most is {MAX_FLYING}"
        elif verdict.graph and verdict.bucket not in self._graphs.sizes:
            fault = f"verdict: no graph of {verdict.bucket} rows; there are {sorted(self._graphs.sizes)}"
        elif verdict.graph and isinstance(plan, Plan) and plan.prefill is not None:
            fault = "verdict: a graph for a step with prompts"
        if fault:
            raise StepRefusedError(fault)

    def _run(self, flight: Flight, prefill: Prefill | None, ran: list[int]) -> None:
        """Enqueue the step and the copy of its tokens."""
        plan = flight.plan
        drawings = self._after.drawings(prefill, ran)
        flight.firsts = len(drawings) - len(ran)
        if plan.verdict.graph:
            self._batch.flush()
            self._graphs.replay(plan.verdict.bucket, self._pages(ran))
            tokens, logits = self._tokens, self._logits
        else:
            tokens, logits = self._eager(flight, prefill, drawings[: flight.firsts], ran)
        self._after.draw(flight, drawings, logits, tokens, self._flying)
        flight.inbox.fetch(tokens[: len(drawings)])

    def _delta(self, decode: Decode) -> list[int]:
        """Take the delta of a decode step; the slots that run, ascending."""
        return self._batch.apply(decode, map(self._after.joined, decode.joins), self._after.masks(decode))

    def _pages(self, ran: Sequence[int]) -> int:
        """Pages of the longest running row."""
        seats, page_tokens = self._batch.slots.seats, self._limits.page_tokens
        return max((seats[slot].position // page_tokens + 1 for slot in ran), default=1)

    def _table_widths(self, rows: int) -> list[int]:
        most = self._limits.row_pages
        narrow = [pages for pages in WIDTHS if pages < most]
        return [*narrow, most] if self._attention.width_matters(rows, self._kv_heads) else [most]

    def _decode_step(self, rows: int, pages: int) -> None:
        """What a graph records: rows, network, draw, and the batch moved on."""
        step = self._rows.first(rows, pages)
        self._batch.gather(step, rows)
        batch = step.attention

        def attend(q: Tensor, layer: Tensor) -> Tensor:
            return self._attention.rows(q, layer, batch)

        flow = self._whole(rows)
        hidden = self._network.forward(step.tokens, step.positions, step.places, flow, attend)
        self._drawer.draw(self._network.logits(hidden, self._logits), step.draws, self._tokens[:rows])

    def _whole(self, rows: int) -> Stream:
        """The stream of a step that every group pads to ``rows``."""
        return across(self._collectives, (rows,) * self._turns.station.groups)

    def _eager(
        self, flight: Flight, prefill: Prefill | None, firsts: Sequence[Drawing], ran: list[int]
    ) -> tuple[Tensor, Tensor]:
        """A step of prompts, of rows, of both or of neither: (tokens, logits) of the rows that draw."""
        flow = stream(self._collectives, flight.plan.verdict)
        self._batch.flush()
        packed = pack(
            prefill, [each.row for each in firsts], len(ran), flow.rows, self._limits, self._batch, self._outbox
        )
        hidden = self._forward(packed, flow)
        flight.scoring = scorings(prefill)
        if prefill is not None and flight.scoring:
            flight.scores = self._score(hidden, prefill, flight.scoring)
        return self._draw(packed, hidden)

    def _score(self, hidden: Tensor, prefill: Prefill, wanted: Sequence[Scoring]) -> Tensor:
        """Enqueue the scoring of prompt positions, and its copy to the host, which is through when the step's tokens are here."""
        places = asked(prefill)
        rows = np.array(places.rows, np.int64)[places.scored]
        index, targets = self._outbox.send((rows, targets_of(wanted)))

        def logits(part: Tensor) -> Tensor:
            return self._network.logits(part, self._logits.new_empty((len(part), self._width)))

        found = self._scorer.score(hidden.index_select(0, index), targets, logits, most_of(wanted))
        host = torch.empty(found.shape, dtype=found.dtype, pin_memory=found.device.type == "cuda")
        return host.copy_(found, non_blocking=True)

    def _forward(self, packed: Packed, flow: Stream) -> Tensor:
        """Hidden states of all rows of the step."""
        rows, prompts, cut = packed.rows, packed.prompts, packed.computed

        def attend(q: Tensor, layer: Tensor) -> Tensor:
            parts = []
            if prompts is not None:
                parts.append(self._attention.prompts(q[:cut], layer, prompts))
            if cut < len(q):
                parts.append(self._attention.rows(q[cut:], layer, rows.attention))
            return torch.cat(parts) if len(parts) > 1 else parts[0]

        return self._network.forward(rows.tokens, rows.positions, rows.places, flow, attend)

    def _draw(self, packed: Packed, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and logits of the rows that draw."""
        rows = packed.rows
        count = len(rows.draws)
        tokens = torch.empty(count, dtype=torch.int32, device=self._device)
        logits = self._logits
        if count:
            if count > len(logits):
                logits = logits.new_empty((count, self._width))
            self._drawer.draw(self._network.logits(hidden.index_select(0, packed.wanted), logits), rows.draws, tokens)
        return tokens, logits

    def _prompt_step(self, tokens: int) -> None:
        """Prompts of so many tokens in all, in the scratch page."""
        limits = self._limits
        lengths = [min(limits.positions, tokens - start) for start in range(0, tokens, limits.positions)]
        chunks = tuple(
            Chunk("warm-up", 0, length, (0,) * -(-length // limits.page_tokens), final=True, sampling=Sampling())
            for length in lengths
        )
        prefill = Prefill(chunks, TokenArray.of([0] * tokens))
        rows = [Row(Sampling(), length, 0) for length in lengths]
        packed = pack(prefill, rows, 0, tokens, limits, self._batch, self._outbox)
        self._draw(packed, self._forward(packed, self._whole(tokens)))

    def _count(self, plan: Plan) -> int:
        if plan.decode is None:
            return 0
        rows, fault = self._batch.slots.count(plan.decode)
        if fault:
            raise StepRefusedError(fault)
        return rows
