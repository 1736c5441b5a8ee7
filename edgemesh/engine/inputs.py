"""One step's rows as tensors: prompt chunks, then decode rows, then padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from edgemesh.engine.attention.batch import AttentionBatch, Span
from edgemesh.engine.model import Step
from edgemesh.engine.scores import asked
from edgemesh.engine.streams import Stream
from edgemesh.wire.messages import Prefill


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Last tokens and positions ``[rows]`` and block tables ``[rows, pages]`` of the rows that run; ``longest`` context."""

    tokens: Tensor
    positions: Tensor
    block_table: Tensor
    longest: int


def build(flow: Stream, page_tokens: int, prefill: Prefill | None, rows: DecodeRows | None) -> Step:
    """The step of a plan, or of an idle one (neither prompts nor rows)."""
    tokens: list[Tensor] = []
    positions: list[Tensor] = []
    places: list[Tensor] = []
    spans: list[Span] = []
    wanted: list[int] = []
    if prefill:
        spans = [Span(chunk.start, chunk.length, torch.tensor(chunk.pages)) for chunk in prefill.chunks]
        tokens.append(torch.from_numpy(np.frombuffer(prefill.tokens.buffer, np.int32).astype(np.int64)))
        positions.extend(torch.arange(span.start, span.stop) for span in spans)
        places.extend(
            span.pages[at // page_tokens] * page_tokens + at % page_tokens
            for span, at in zip(spans, positions, strict=True)
        )
        wanted = asked(prefill).rows
    if rows:
        at = rows.positions
        pages = rows.block_table.gather(1, (at // page_tokens)[:, None])[:, 0]
        tokens.append(rows.tokens)
        positions.append(at)
        places.append(pages * page_tokens + at % page_tokens)
        first = sum(span.length for span in spans)
        wanted.extend(range(first, first + len(at)))
    attention = AttentionBatch(
        spans,
        _joined(places),
        rows.block_table if rows else torch.empty((0, 0), dtype=torch.int64),
        rows.positions + 1 if rows else torch.empty(0, dtype=torch.int64),
        rows.longest if rows else 0,
    )
    return Step(_padded(tokens, flow.rows), _padded(positions, flow.rows), attention, flow, wanted)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(tuple(parts)) if parts else torch.empty(0, dtype=torch.int64)


def _padded(parts: Sequence[Tensor], rows: int) -> Tensor:
    whole = _joined(parts)
    return functional.pad(whole, (0, rows - len(whole))) if len(whole) < rows else whole
