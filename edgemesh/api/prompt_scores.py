"""Log-probabilities of a prompt: gathered from the pieces in which they come, and in the forms in which clients read them.

They stay packed until an answer needs them, and become JSON row by row: a long prompt with many alternatives is a few megabytes
packed, and hundreds as objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol, cast, runtime_checkable

import msgspec

from edgemesh.api.detokenize import Detokenizer, Pieces
from edgemesh.api.logprobs import FLOOR, named
from edgemesh.api.replies import CompletionLogprobs, PromptLogprob, PromptTable
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.messages import PromptLogprobs

_encode = msgspec.json.Encoder().encode
_NULL: Final = msgspec.Raw(b"null")


class Entry(NamedTuple):
    """One prompt token: how likely it was after those before it, its rank (from 1), and the likeliest ones there."""

    token: int
    logprob: float
    rank: int
    top: Sequence[tuple[int, float]]


class PromptScores:
    """What is known of one prompt so far; the first token has no log-probability."""

    __slots__ = ("_pieces", "count", "prompt")

    def __init__(self, prompt: TokenArray) -> None:
        self.prompt = prompt
        self.count = 0
        """Tokens whose log-probabilities are here."""
        self._pieces: list[PromptLogprobs] = []

    @property
    def whole(self) -> bool:
        """Whether those of all tokens are here."""
        return self.count >= len(self.prompt) - 1

    @property
    def size(self) -> int:
        """Log-probabilities, alternatives included."""
        return sum(piece.count * (1 + piece.top) for piece in self._pieces)

    def take(self, piece: PromptLogprobs) -> str:
        """Add what is new of a piece; a repeated one changes nothing. Says what is missing before it, if anything is."""
        skip = self.count - piece.start
        if skip < 0:
            return f"prompt log-probabilities {self.count} to {piece.start - 1}"
        if skip < piece.count:
            rows = piece.rows.slice(skip * piece.width, len(piece.rows)) if skip else piece.rows
            piece = PromptLogprobs(piece.start + skip, piece.top, rows)
            self._pieces.append(piece)
            self.count += piece.count
        return ""

    def entries(self, most: int) -> Iterator[Entry]:
        """All tokens but the first, each with up to ``most`` alternatives."""
        for piece in self._pieces:
            numbers, values = piece.rows, piece.rows.buffer.cast("f")
            shown = 2 + 2 * min(most, piece.top)
            for row in range(piece.count):
                at = row * piece.width
                top = [(numbers[each], values[each + 1]) for each in range(at + 2, at + shown, 2)]
                yield Entry(self.prompt[piece.start + row + 1], values[at], numbers[at + 1], top)


class Shown(msgspec.Struct, frozen=True):
    """What an answer shows of one prompt: ``table`` in vLLM's form, ``echoed`` in that of an echo."""

    table: PromptTable | None = None
    echoed: CompletionLogprobs | None = None


@runtime_checkable
class ScoredForm(Protocol):
    """An endpoint whose answers may show log-probabilities of prompts."""

    def shown(self, prompt: int, scores: PromptScores, table: int, echo: int) -> Shown:
        """What an answer shows of the ``prompt``-th prompt: so many alternatives in each form (-1: not that form)."""


def prompt_table(scores: PromptScores, most: int, pieces: Pieces) -> PromptTable:
    """For each prompt token its own entry and those of the likeliest, by id; null for the first."""
    rows = [_NULL, *(msgspec.Raw(_encode(_row(entry, pieces))) for entry in scores.entries(most))]
    # Rows that are JSON already take a tenth of the room.
    return cast("PromptTable", rows)


def _row(entry: Entry, pieces: Pieces) -> dict[str, PromptLogprob]:
    row = {str(entry.token): PromptLogprob(max(FLOOR, entry.logprob), entry.rank, _text(entry.token, pieces))}
    for place, (token, value) in enumerate(entry.top, 1):
        row.setdefault(str(token), PromptLogprob(max(FLOOR, value), place, _text(token, pieces)))
    return row


def _text(token: int, pieces: Pieces) -> str:
    return pieces.bytes_of(token).decode(errors="replace")


def echo_columns(scores: PromptScores, most: int, pieces: Pieces, echo: str) -> CompletionLogprobs:
    """The prompt's part of a completion's log-probabilities; of its first token nothing is known but its text."""
    values: list[float | None] = [None]
    tops: list[Any] = [None]
    for entry in scores.entries(most):
        values.append(max(FLOOR, entry.logprob))
        tops.append(msgspec.Raw(_encode(named((*entry.top, (entry.token, entry.logprob)), pieces))))
    return CompletionLogprobs(
        tokens=[pieces.name_of(token) for token in scores.prompt],
        token_logprobs=values,
        top_logprobs=tops,
        text_offset=offsets(scores.prompt, echo, pieces),
    )


def offsets(tokens: Iterable[int], text: str, pieces: Pieces) -> list[int]:
    """At which character of ``text`` each token begins; one that the text does not show begins where the next one does."""
    found: list[list[int]] = []
    for skip_special in (True, False):
        starts, whole = _starts(tokens, pieces, skip_special=skip_special)
        if whole.endswith(text):
            # What the tokenizer put before the text (a first blank, a beginning of sequence) is no part of it.
            before = len(whole) - len(text)
            return [max(0, start - before) for start in starts]
        found.append(starts)
    return [min(start, len(text)) for start in found[0]]


def _starts(tokens: Iterable[int], pieces: Pieces, *, skip_special: bool) -> tuple[list[int], str]:
    detokenizer = Detokenizer(pieces.plain, skip_special=skip_special)
    starts: list[int] = []
    parts: list[str] = []
    at = 0
    for token in tokens:
        starts.append(at)
        parts.append(detokenizer.feed((token,)))
        at += len(parts[-1])
    parts.append(detokenizer.finish())
    return starts, "".join(parts)


def joined(before: CompletionLogprobs | None, after: CompletionLogprobs | None) -> CompletionLogprobs | None:
    """The columns of an echoed prompt and of what comes after it."""
    if before is None or after is None:
        return before or after
    return CompletionLogprobs(
        tokens=before.tokens + after.tokens,
        token_logprobs=before.token_logprobs + after.token_logprobs,
        top_logprobs=before.top_logprobs + after.top_logprobs,
        text_offset=before.text_offset + after.text_offset,
    )
