"""Every open choice of one gateway: submitted to the router, followed at its group, cancelled when nobody wants it.

A ``Stream`` is one choice; a ``Flight`` is one client's request with all its choices. Messages of the mesh only append to
streams and wake the flight's owner, which turns tokens into text when it runs: so a client that reads slowly gets
several ticks in one chunk, and holds no more than the tokens that its credit allows.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from edgemesh.actors.gateway_metrics import Metrics
from edgemesh.actors.gateway_outbox import Outbox, Sender
from edgemesh.api.errors import ApiError, from_mesh
from edgemesh.api.prompt_scores import PromptScores
from edgemesh.api.resolve import Choice, Job
from edgemesh.api.stream import TextStream
from edgemesh.api.telling import Telling
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.ids import Finish
from edgemesh.wire.messages import Accepted, Cancel, Credit, Emit, Failed, Item, Logprob, Rejected, Submit

CREDIT: Final = 512
"""Tokens that may be under way to a client that has not read those before, where each has no more than its text."""

LEAST_CREDIT: Final = 32

TURN_NS: Final = 4_000_000
"""After so long with one request's choices, all others have their turn."""

UNLIMITED: Final = 1 << 20
ORPHANS: Final = 1 << 16
"""Cancelled choices whose group is not known yet, of which a gateway remembers the latest."""


class Stream:
    """One choice, from its submission to its last token."""

    __slots__ = (
        "attempt",
        "cached_tokens",
        "choice",
        "dirty",
        "failure",
        "finish",
        "first_ns",
        "flight",
        "group",
        "id",
        "logprobs",
        "prompt_tokens",
        "read",
        "scores",
        "stop_token",
        "telling",
        "text",
        "tokens",
        "upto",
        "window",
        "work_ns",
    )

    def __init__(
        self, flight: Flight, name: str, choice: Choice, text: TextStream, telling: Telling | None = None
    ) -> None:
        self.flight = flight
        self.id = name
        self.choice = choice
        self.text = text
        self.telling = telling
        """What reads the text as a message, where it may be more than content."""

        self.prompt_tokens = len(flight.job.prompts[choice.prompt])
        self.attempt = 0
        self.group: int | None = None
        self.tokens: array[int] = array("i")
        self.logprobs: list[Logprob] = []
        """Those of tokens that are not turned into text yet."""

        self.scores = PromptScores(flight.job.prompts[choice.prompt]) if choice.prompt_logprobs >= 0 else None
        self.read = 0
        """Tokens already turned into text."""

        self.window = max(LEAST_CREDIT, CREDIT // (1 + max(0, choice.sampling.logprobs)))
        """Tokens that may be under way: those with alternatives are that much larger."""

        self.upto = self.window if flight.job.stream else UNLIMITED
        self.finish = Finish.NONE
        self.stop_token = -1
        self.failure: ApiError | None = None
        self.cached_tokens = 0
        self.first_ns = 0
        self.work_ns = 0
        self.dirty = False

    @property
    def done(self) -> bool:
        """Whether nothing more will come from the mesh."""
        return self.finish is not Finish.NONE or self.failure is not None

    def take(self, item: Item) -> int:
        """Append what is new of an item; returns how many tokens that was. A repeated one changes nothing."""
        have = len(self.tokens)
        skip = have - item.index
        if skip < 0:
            self._lost(f"tokens {have} to {item.index - 1}")
            return 0
        if self.scores is not None:
            self._score(self.scores, item)
        new = item.tokens[skip:] if skip else item.tokens
        self.tokens.extend(new)
        if item.logprobs:
            self.logprobs.extend(item.logprobs[skip:])
        if not self.attempt:  # what this stream has drawn itself is nothing that was found
            self.cached_tokens = max(self.cached_tokens, item.cached_tokens)
        if item.finish is not Finish.NONE and skip <= len(item.tokens):
            self.finish = item.finish
            self.stop_token = item.stop_token
            if item.finish is Finish.ABORT:
                reason = "the group cancelled the request: its client did not read for too long"
                self.failure = from_mesh(503, "aborted", reason)
        return len(new)

    def _score(self, scores: PromptScores, item: Item) -> None:
        """Log-probabilities of the prompt come before all else."""
        missing = "" if item.prompt_logprobs is None else scores.take(item.prompt_logprobs)
        if not scores.whole and (item.tokens or item.finish in {Finish.STOP, Finish.LENGTH}):
            missing = f"prompt log-probabilities from {scores.count} on"
        if missing:
            self._lost(missing)

    def _lost(self, what: str) -> None:
        self.failure = from_mesh(503, "tokens_lost", f"{what} of {self.id} never came")


class Flight:
    """One client's request: its streams, and what its owner waits for."""

    __slots__ = ("_dirty", "_waiter", "gone", "id", "job", "started_ns", "streams")

    def __init__(self, name: str, job: Job, started_ns: int) -> None:
        self.id = name
        self.job = job
        self.started_ns = started_ns
        self.streams: list[Stream] = []
        self.gone = False
        """The client has hung up."""

        self._dirty: list[Stream] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def used_tokens(self) -> int:
        """Tokens that the mesh got and gave: each prompt that a group has taken once, and all output."""
        taken = {each.choice.prompt: each.prompt_tokens for each in self.streams if each.group is not None}
        return sum(taken.values()) + sum(len(each.tokens) for each in self.streams)

    def touch(self, stream: Stream) -> None:
        """Something of this stream changed."""
        if not stream.dirty:
            stream.dirty = True
            self._dirty.append(stream)
        self._wake()

    def hang_up(self) -> None:
        """The client is gone."""
        self.gone = True
        self._wake()

    async def changed(self) -> list[Stream]:
        """Wait until streams changed, or the client is gone; returns those streams."""
        while not self._dirty and not self.gone:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        dirty, self._dirty = self._dirty, []
        for stream in dirty:
            stream.dirty = False
        return dirty

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Streams:
    """All open streams by the id that they have on the wire."""

    def __init__(self, port: Sender, gateway: int, metrics: Metrics) -> None:
        self._port = port
        self._gateway = gateway
        self._metrics = metrics
        self._open: dict[str, Stream] = {}
        self._orphans: OrderedDict[str, int] = OrderedDict()
        self._outbox = Outbox(port)

    def __len__(self) -> int:
        return len(self._open)

    async def submit(self, flight: Flight) -> None:
        """Send every choice to the router. Raises ``ApiError`` where it cannot take them.

        Where there are many, or a choice says much, others have their turn in between.
        """
        job, start = flight.job, self._port.now()
        for stream in flight.streams:
            self._submit(stream, job.pin)
            if self._port.now() - start > TURN_NS:
                await asyncio.sleep(0)
                start = self._port.now()

    def force(self, stream: Stream, tokens: Sequence[int]) -> None:
        """Put tokens behind what was read of a stream, and have it go on from there; what it drew beyond that is dropped.

        A stream without room for them and a token more ends there for its length.
        """
        self.close(stream)
        del stream.tokens[stream.read :]
        stream.logprobs.clear()
        stream.finish = Finish.NONE
        stream.flight.touch(stream)
        if len(stream.tokens) + len(tokens) >= stream.choice.max_tokens:
            stream.finish = Finish.LENGTH
            return
        stream.tokens.extend(tokens)
        if stream.choice.sampling.logprobs >= 0:
            stream.logprobs.extend(Logprob(token, 0.0) for token in tokens)
        stream.upto = max(stream.upto, len(stream.tokens) + stream.window)
        stream.attempt += 1
        group, stream.group = stream.group, None
        try:
            self._submit(stream, group)
        except ApiError as error:
            stream.failure = error

    def _submit(self, stream: Stream, pin: int | None) -> None:
        choice, job = stream.choice, stream.flight.job
        submit = Submit(
            request=stream.id,
            attempt=stream.attempt,
            gateway=self._gateway,
            prompt=job.prompts[choice.prompt],
            sampling=choice.sampling,
            max_tokens=choice.max_tokens,
            emitted=TokenArray.of(stream.tokens),
            key=job.key,
            session=job.session,
            pin=pin,
            priority=job.priority,
            credit=stream.upto,
            tenant=job.tenant,
            grammar=job.grammar,
            prompt_logprobs=choice.prompt_logprobs,
            scored=stream.scores.count if stream.scores else 0,
        )
        self._outbox.submit(submit)
        self._open[stream.id] = stream
        fields = {"request": stream.id, "attempt": stream.attempt, "choice": choice.index}
        self._port.trace.event("request.submitted", **fields)

    def receive(self, message: Emit | Accepted | Failed | Rejected) -> None:
        """What the router or a group says about streams of this gateway."""
        if isinstance(message, Emit):
            self._emit(message)
            return
        self._outbox.arrived(message.request)
        stream = self._open.get(message.request)
        if stream is None or stream.attempt != message.attempt:
            self._orphan(message)
            return
        if isinstance(message, Accepted):
            self._place(stream, message.group)
        else:
            retry = message.retry_after_s if isinstance(message, Rejected) else 0
            stream.failure = from_mesh(message.status, message.code, message.reason, retry)
        stream.flight.touch(stream)

    def credit(self, stream: Stream) -> None:
        """Let the group go on once half of what the client may hold is read."""
        if stream.read + stream.window // 2 > stream.upto and not stream.done and stream.group is not None:
            stream.upto = stream.read + stream.window
            self._outbox.steer(Credit(stream.group, stream.id, stream.attempt, stream.upto), stream.group)

    def close(self, stream: Stream) -> None:
        """Forget a stream; cancel it where it still runs."""
        if self._open.pop(stream.id, None) is None or stream.done:
            return
        if stream.group is not None:
            self._outbox.steer(Cancel(stream.group, stream.id, stream.attempt), stream.group)
            return
        self._orphans[stream.id] = stream.attempt
        if len(self._orphans) > ORPHANS:
            self._orphans.popitem(last=False)

    def expire(self, flight: Flight, error: ApiError) -> None:
        """End what still runs of a flight with this error, here and in its groups."""
        for stream in flight.streams:
            if not stream.done:
                self.close(stream)
                stream.failure = error
                flight.touch(stream)

    def fail_all(self, error: ApiError) -> None:
        """End every open stream with this error."""
        for stream in self._open.values():
            if not stream.done:
                stream.failure = error
                stream.flight.touch(stream)

    def retry(self) -> None:
        """Send what a full link did not take."""
        self._outbox.retry()

    def _emit(self, emit: Emit) -> None:
        now = self._port.now()
        count = 0
        streams = self._open
        for item in emit.items:
            stream = streams.get(item.request)
            if stream is None or stream.attempt != item.attempt:
                self._orphan_item(item, emit.group)
                continue
            if stream.group is None:
                self._place(stream, emit.group)
            count += stream.take(item)
            if not stream.first_ns and item.tokens:
                stream.first_ns = now
                ttft = now - stream.flight.started_ns
                self._port.trace.event("request.first_token", request=stream.id, ttft_ns=ttft)
                self._metrics.ttft(ttft)
            stream.flight.touch(stream)
        self._metrics.generated(count)

    def _place(self, stream: Stream, group: int) -> None:
        stream.group = group
        self._port.trace.event("request.accepted", request=stream.id, group=group)

    def _orphan(self, message: Accepted | Failed | Rejected) -> None:
        """A choice that was cancelled before its group was known."""
        if self._orphans.get(message.request) != message.attempt:
            return
        del self._orphans[message.request]
        if isinstance(message, Accepted):
            self._outbox.steer(Cancel(message.group, message.request, message.attempt), message.group)

    def _orphan_item(self, item: Item, group: int) -> None:
        if self._orphans and self._orphans.get(item.request) == item.attempt:
            del self._orphans[item.request]
            if item.finish is Finish.NONE:
                self._outbox.steer(Cancel(group, item.request, item.attempt), group)
