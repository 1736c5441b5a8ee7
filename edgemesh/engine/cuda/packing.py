"""An eager step's rows as tensors on the device: prompt chunks, then decode rows, then padding; one copy brings them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from edgemesh.engine.cuda.attention import Prompts
from edgemesh.engine.cuda.drawing import Draws
from edgemesh.engine.cuda.rows import DeviceBatch, StepRows, heat
from edgemesh.engine.cuda.staging import Outbox
from edgemesh.engine.noise import row_stem
from edgemesh.engine.sampler import Row
from edgemesh.engine.turns import Limits
from edgemesh.wire.messages import Chunk, Prefill


@dataclass(frozen=True, slots=True)
class Packed:
    """``computed`` prompt tokens come first; ``wanted`` (int64) are the rows that draw: ends of prompts, then decode rows."""

    rows: StepRows
    prompts: Prompts | None
    computed: int
    wanted: Tensor


def pack(
    prefill: Prefill | None,
    firsts: Sequence[Row],
    decoding: int,
    padded: int,
    limits: Limits,
    batch: DeviceBatch,
    outbox: Outbox,
) -> Packed:
    """The step of a plan, or of an idle one; ``padded`` rows in all, ``firsts`` belong to the final chunks."""
    chunks = prefill.chunks if prefill else ()
    computed = sum(chunk.length for chunk in chunks)
    real, cut = computed + decoding, len(firsts)
    device = batch.last.device
    rows = StepRows.empty(padded, decoding, cut + decoding, limits.row_pages, device)
    rows = StepRows(rows.tokens, rows.positions[:real], rows.places[:real], rows.lengths, rows.table, rows.draws)
    wanted = torch.arange(computed - cut, real, device=device)
    prompts = None
    if prefill is not None:
        positions, places = _positions(chunks, limits.page_tokens)
        table = np.zeros((len(chunks), limits.row_pages), np.int32)
        for number, chunk in enumerate(chunks):
            table[number, : len(chunk.pages)] = chunk.pages
        ends = np.fromiter(accumulate(chunk.length for chunk in chunks), np.int32)
        contexts = np.fromiter(accumulate(chunk.start + chunk.length for chunk in chunks), np.int32)
        final = np.fromiter((chunk.final for chunk in chunks), np.bool_)
        sent = outbox.send(
            (
                np.frombuffer(prefill.tokens.buffer, np.int32),
                positions,
                places,
                table,
                np.concatenate((np.zeros(1, np.int32), ends)),
                np.concatenate((np.zeros(1, np.int32), contexts)),
                ends[final].astype(np.int64) - 1,
                np.array([heat(row) for row in firsts], np.float32),
                np.array([row_stem(row.sampling.seed, row.sampling.choice) for row in firsts], np.uint64).view(
                    np.int64
                ),
                np.array([row.position for row in firsts], np.int32),
            )
        )
        rows.tokens[:computed], rows.positions[:computed], rows.places[:computed] = sent[0], sent[1], sent[2]
        wanted[:cut] = sent[6]
        _fill(rows.draws, sent[7:], batch.scratch)
        longest = max(chunk.length for chunk in chunks)
        prompts = Prompts(sent[4], sent[5], sent[3], longest, max(chunk.start + chunk.length for chunk in chunks))
    batch.gather(rows, decoding, computed, cut)
    return Packed(rows, prompts, computed, wanted)


def _fill(draws: Draws, firsts: Sequence[Tensor], scratch: int) -> None:
    """The draws of prompts' ends; no slot takes them."""
    heats, stems, positions = firsts
    count = len(heats)
    draws.heats[:count], draws.stems[:count], draws.positions[:count] = heats, stems, positions
    draws.slots[:count] = scratch


def _positions(chunks: Sequence[Chunk], page_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions (int32) and places in the slab (int64) of all chunks' tokens."""
    positions = [np.arange(chunk.start, chunk.start + chunk.length, dtype=np.int32) for chunk in chunks]
    places = [
        np.asarray(chunk.pages, np.int64)[at // page_tokens] * page_tokens + at % page_tokens
        for chunk, at in zip(chunks, positions, strict=True)
    ]
    return np.concatenate(positions), np.concatenate(places)
