"""One choice's way from token ids to the events of its message."""

from __future__ import annotations

from collections.abc import Sequence

from edgemesh.api.events import Event
from edgemesh.api.parser import MessageParser
from edgemesh.api.stream import TextStream
from edgemesh.wire.messages import Logprob


class Telling:
    """Reads a choice's tokens into its parser, one by one where it matters which token brings what.

    ``feed`` stops early where the message is over, or its reasoning has taken all the tokens that it may; the tokens
    that were read are ``text.tokens``.
    """

    __slots__ = ("_budget", "_parser", "_text", "reasoning_tokens")

    def __init__(self, text: TextStream, parser: MessageParser, budget: int = 0) -> None:
        self._text = text
        self._parser = parser
        self._budget = budget
        self.reasoning_tokens = 0
        """Tokens of the reasoning so far, its tags included."""

    @property
    def overdrawn(self) -> bool:
        """Whether the reasoning goes on though it has taken all the tokens that it may."""
        return self._parser.inside and 0 < self._budget <= self.reasoning_tokens

    @property
    def done(self) -> bool:
        """Whether nothing may follow any more."""
        return self._parser.done

    def reason(self, reason: str) -> str:
        """The finish reason of a text that ended for ``reason``."""
        return "tool_calls" if reason == "stop" and self._parser.called else reason

    def feed(self, tokens: Sequence[int], logprobs: Sequence[Logprob] = ()) -> tuple[list[Event], list[Logprob]]:
        """The events that these tokens add, and the log-probabilities of their text."""
        events: list[Event] = []
        shown: list[Logprob] = []
        at = 0
        while at < len(tokens) and not (self._text.stopped or self.done or self.overdrawn):
            end = at + 1 if self._parser.exact else len(tokens)
            before = self._text.tokens
            events += self._parser.feed(self._text.feed(tokens[at:end], logprobs[at:end]))
            shown += self._text.shown
            self._count(self._text.tokens - before)
            at = end
        return events, shown

    def release(self) -> None:
        """The tokens that close the reasoning follow: nothing of it is held against them."""
        self._budget = 0

    def finish(self, stop_token: int | None = None) -> tuple[list[Event], list[Logprob]]:
        """The events that were held back, now that no more tokens come."""
        if self.done:
            return self._parser.finish(), []
        events = self._parser.feed(self._text.finish(stop_token))
        events += self._parser.finish()
        self._count(0)
        return events, self._text.shown

    def _count(self, tokens: int) -> None:
        if self._parser.thinking:
            self.reasoning_tokens += tokens
        elif not self._parser.thought:
            self.reasoning_tokens = 0
