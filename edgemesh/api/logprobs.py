"""Log-probabilities in the forms of both APIs."""

from __future__ import annotations

from collections.abc import Sequence

from edgemesh.api.detokenize import Pieces
from edgemesh.api.replies import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from edgemesh.wire.messages import Logprob

FLOOR = -9999.0
"""What JSON can say of a probability of zero."""


def chat_logprobs(entries: Sequence[Logprob], pieces: Pieces) -> ChatLogprobs:
    """The chat form of these tokens' log-probabilities."""
    return ChatLogprobs(content=[_token(entry, pieces) for entry in entries])


def completion_logprobs(entries: Sequence[Logprob], pieces: Pieces, offset: int) -> CompletionLogprobs:
    """The completion form; the first token's text begins at character ``offset``."""
    tokens = [_text(entry.token, pieces) for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[max(FLOOR, entry.logprob) for entry in entries],
        top_logprobs=[
            {_text(token, pieces): max(FLOOR, value) for token, value in (*entry.top, (entry.token, entry.logprob))}
            for entry in entries
        ],
        text_offset=offsets,
    )


def _token(entry: Logprob, pieces: Pieces) -> TokenLogprob:
    piece = pieces.bytes_of(entry.token)
    return TokenLogprob(
        token=piece.decode(errors="replace"),
        logprob=max(FLOOR, entry.logprob),
        bytes=list(piece),
        top_logprobs=[_top(token, value, pieces) for token, value in entry.top],
    )


def _top(token: int, value: float, pieces: Pieces) -> TopLogprob:
    piece = pieces.bytes_of(token)
    return TopLogprob(token=piece.decode(errors="replace"), logprob=max(FLOOR, value), bytes=list(piece))


def _text(token: int, pieces: Pieces) -> str:
    return pieces.bytes_of(token).decode(errors="replace")
