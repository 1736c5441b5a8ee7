"""Log-probabilities in the forms of both APIs."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

import msgspec

from edgemesh.api.detokenize import Pieces
from edgemesh.api.replies import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from edgemesh.wire.messages import Logprob

FLOOR = -9999.0
"""What JSON can say of a probability of zero."""

_encode = msgspec.json.Encoder().encode
_Decoder: Final = getincrementaldecoder("utf-8")


def chat_logprobs(entries: Sequence[Logprob], pieces: Pieces) -> ChatLogprobs:
    """The chat form of these tokens' log-probabilities; each token is JSON already, which takes a tenth of the room."""
    rows = [msgspec.Raw(_encode(_token(entry, pieces))) for entry in entries]
    return ChatLogprobs(content=cast("list[TokenLogprob]", rows))


def completion_logprobs(entries: Sequence[Logprob], pieces: Pieces, offset: int) -> CompletionLogprobs:
    """The completion form; the first token's text begins at character ``offset``."""
    tokens = [pieces.name_of(entry.token) for entry in entries]
    offsets = []
    # The tokens of one character all begin where it does.
    characters = _Decoder("replace")
    for entry in entries:
        offsets.append(offset)
        offset += len(characters.decode(pieces.bytes_of(entry.token)))
    tops: list[Any] = [msgspec.Raw(_encode(named((*each.top, (each.token, each.logprob)), pieces))) for each in entries]
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[max(FLOOR, entry.logprob) for entry in entries],
        top_logprobs=tops,
        text_offset=offsets,
    )


def named(entries: Iterable[tuple[int, float]], pieces: Pieces) -> dict[str, float]:
    """Log-probabilities by the names of their tokens; of tokens with one name the likeliest counts.

    So the largest value is always that of the likeliest token, by which clients tell a greedy choice.
    """
    made: dict[str, float] = {}
    for token, value in entries:
        name = pieces.name_of(token)
        made[name] = max(FLOOR, value, made.get(name, FLOOR))
    return made


def _token(entry: Logprob, pieces: Pieces) -> TokenLogprob:
    piece = pieces.bytes_of(entry.token)
    return TokenLogprob(
        token=pieces.name_of(entry.token),
        logprob=max(FLOOR, entry.logprob),
        bytes=list(piece),
        top_logprobs=[_top(token, value, pieces) for token, value in entry.top],
    )


def _top(token: int, value: float, pieces: Pieces) -> TopLogprob:
    piece = pieces.bytes_of(token)
    return TopLogprob(token=pieces.name_of(token), logprob=max(FLOOR, value), bytes=list(piece))
