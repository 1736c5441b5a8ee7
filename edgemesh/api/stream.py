"""One choice's way from token ids to text that a client may see: detokenised, and cut at a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from edgemesh.api.detokenize import Detokenizer, Pieces
from edgemesh.api.stop import StopMatcher
from edgemesh.wire.messages import Logprob


class TextStream:
    """The text of one choice.

    ``feed`` returns what may be shown; ``stopped`` says that a stop string ended it. Log-probabilities come out of
    ``shown`` with the text of their tokens: one whose text is held back waits, one behind the cut never comes.
    """

    __slots__ = (
        "_detokenizer",
        "_entries",
        "_matcher",
        "_min_tokens",
        "_produced",
        "_singly",
        "length",
        "shown",
        "tokens",
    )

    def __init__(
        self,
        pieces: Pieces,
        stops: Sequence[str] = (),
        *,
        skip_special: bool = True,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(pieces, skip_special=skip_special)
        self._matcher = StopMatcher(stops, include=include_stop)
        self._min_tokens = min_tokens if stops else 0
        self._singly = bool(stops)
        self.tokens = 0
        """Tokens up to the one that completed a stop string, or all."""
        self._produced = 0
        self._entries: list[tuple[int, Logprob]] = []
        self.length = 0
        """Characters shown so far."""

        self.shown: list[Logprob] = []
        """Log-probabilities of the text that the last call returned."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._matcher.matched is not None

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""
        return self._matcher.matched

    def feed(self, tokens: Sequence[int], logprobs: Sequence[Logprob] = ()) -> str:
        """The text that these tokens add for the client."""
        if logprobs or self._singly:
            return self._feed_singly(tokens, logprobs)
        self.shown = []
        self.tokens += len(tokens)
        text = self._detokenizer.feed(tokens)
        self.length += len(text)
        return text

    def finish(self, stop_token: int | None = None) -> str:
        """What was held back, at the end: an unfinished character, and a beginning that was no stop string.

        Where the text of the ``stop_token`` is shown, it comes last, and counts as no token.
        """
        text = ""
        if not self.stopped:
            last = "" if stop_token is None else self._detokenizer.feed((stop_token,))
            text = self._matcher.feed(last + self._detokenizer.finish())
        if not self.stopped:
            text += self._matcher.finish()
        self.length += len(text)
        self.shown = [entry for start, entry in self._entries if not self.stopped or start < self.length]
        self._entries = []
        return text

    def _feed_singly(self, tokens: Sequence[int], logprobs: Sequence[Logprob]) -> str:
        parts = []
        for place, token in enumerate(tokens):
            start = self._produced
            text = self._detokenizer.feed((token,))
            self._produced += len(text)
            self.tokens += 1
            # Text of the tokens that must come cannot stop the stream.
            parts.append(self._matcher.feed(text) if self.tokens > self._min_tokens else text)
            if logprobs and not self.stopped:
                self._entries.append((start, logprobs[place]))
            if self.stopped:
                break
        text = "".join(parts)
        self.length += len(text)
        split = next((i for i, (start, _) in enumerate(self._entries) if start >= self.length), len(self._entries))
        self.shown = [entry for _, entry in self._entries[:split]]
        del self._entries[:split]
        return text
