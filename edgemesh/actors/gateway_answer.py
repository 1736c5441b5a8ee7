"""From a flight's tokens to its client: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Final, TypeVar, cast

import anyio.to_thread
import msgspec
from starlette.types import Send

from edgemesh.actors.gateway_http import ClientGoneError, begin_events
from edgemesh.actors.gateway_streams import TURN_NS, Flight, Stream, Streams
from edgemesh.api.errors import ApiError
from edgemesh.api.events import Content, Event
from edgemesh.api.extras import ranked, with_prompt, with_token_ids, with_usage
from edgemesh.api.forms import Form, Part
from edgemesh.api.prompt_scores import PromptScores, ScoredForm, Shown
from edgemesh.api.replies import CompletionLogprobs, Usage, usage
from edgemesh.api.sse import Chunks, Ending, Events, Head
from edgemesh.api.telling import Telling
from edgemesh.runtime.clock import monotonic_ns
from edgemesh.wire.ids import Finish
from edgemesh.wire.messages import Logprob

REASONS: Final = {Finish.STOP: "stop", Finish.LENGTH: "length"}

INLINE_SCORES: Final = 4096
"""More log-probabilities (or tokens) than this are put into words in a worker thread: they would hold up every other answer."""

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


class Answer:
    """One flight's way out; ``work_ns`` is what detokenising and the socket cost."""

    def __init__(self, flight: Flight, streams: Streams, form: Form, head: Head) -> None:
        self._flight = flight
        self._streams = streams
        self._form = form
        self._head = head
        self._open = len(flight.streams)
        self.work_ns = 0
        self.endings: dict[str, Ending] = {}
        """How each stream ended, by its id."""

        self._shown: dict[int, Shown] = {}
        """What is shown of each prompt's log-probabilities, once all of them are here."""

        self._echoed: dict[int, msgspec.Raw] = {}
        """The columns of each echo as JSON, where they are streamed."""

        self._ids: dict[int, msgspec.Raw] = {}
        """The tokens of each prompt as JSON, where they are shown."""

        self._unopened = {stream.id: stream for stream in flight.streams if flight.job.extras.echo_logprobs >= 0}
        """Streams whose echo waits for those."""

    async def admitted(self) -> None:
        """Wait until every choice has its group, so that a refusal can still be the answer's status.

        Raises the refusal as ``ApiError``, or ``ClientGoneError``.
        """
        flight = self._flight
        seen: list[Stream] = []
        while not all(stream.done or stream.group is not None for stream in flight.streams):
            seen += await flight.changed()
            self._check(flight.streams)
        self._check(flight.streams)
        for stream in seen:
            flight.touch(stream)

    async def whole(self) -> bytes:
        """The body of the whole answer. Raises ``ApiError`` and ``ClientGoneError``."""
        flight, extras = self._flight, self._flight.job.extras
        told = {stream.id: _said(self._form.opening(stream.choice.prompt)) for stream in flight.streams}
        entries: dict[str, list[Logprob]] = {stream.id: [] for stream in flight.streams}
        while self._open:
            changed = await flight.changed()
            self._check(changed)
            start = monotonic_ns()
            for stream in changed:
                more, shown = self._advance(stream)
                told[stream.id] += more
                entries[stream.id] += shown
                if (now := monotonic_ns()) - start > TURN_NS:
                    self.work_ns += now - start
                    await asyncio.sleep(0)
                    start = monotonic_ns()
            self.work_ns += monotonic_ns() - start
        await self._show(flight.streams)
        size = sum(scores.size for stream in flight.streams if (scores := stream.scores) is not None)
        for stream in flight.streams:
            size += len(stream.tokens) * (2 + stream.choice.sampling.logprobs)
            size += stream.prompt_tokens if extras.token_ids else 0
        return await _worked(size, partial(self._reply, told, entries))

    def _reply(self, told: dict[str, list[Event]], entries: dict[str, list[Logprob]]) -> bytes:
        """The whole answer of streams that have ended."""
        flight, extras = self._flight, self._flight.job.extras
        parts = [
            Part(
                index=stream.choice.index,
                told=told[stream.id],
                ending=self.endings[stream.id],
                logprobs=None if stream.choice.sampling.logprobs < 0 else entries[stream.id],
                token_ids=stream.tokens[: stream.text.tokens].tolist() if extras.token_ids else None,
                prompt_token_ids=self._prompt_ids(stream.choice.prompt) if extras.token_ids else None,
                prompt=self._shown.get(stream.choice.prompt, Shown()),
                offset=len(self._form.opening(stream.choice.prompt)),
            )
            for stream in flight.streams
        ]
        parts = ranked(parts, [stream.choice.prompt for stream in flight.streams], extras)
        return self._form.reply(self._head, parts, self._usage())

    def _prompt_ids(self, prompt: int) -> msgspec.Raw:
        ids = self._ids.get(prompt)
        if ids is None:
            ids = self._ids[prompt] = msgspec.Raw(_encode(self._flight.job.prompts[prompt].tolist()))
        return ids

    async def events(self, send: Send, headers: tuple[bytes, ...]) -> ApiError | None:
        """Send everything as events; a failure is the last of them, and returned. Raises ``ClientGoneError``."""
        flight = self._flight
        events = self._form.events(self._head, include_usage=flight.job.include_usage)
        made = {stream.id: events.chunks(stream.choice.index) for stream in flight.streams}
        await begin_events(send, headers)
        firsts = (self._first(stream, made[stream.id]) for stream in flight.streams)
        out = await self._made(send, chain((events.begin(self._usage()),), firsts))
        await self._send(send, self._costed(out))
        while self._open:
            changed = await flight.changed()
            if flight.gone:
                raise ClientGoneError
            if self._unopened:
                await self._show(changed)
                # A choice whose echo has waited has changed, too.
                changed += [stream for stream in self._unopened.values() if stream not in changed]
            told = (self._more(stream, made[stream.id]) for stream in changed if stream.id not in self.endings)
            out = await self._made(send, told)
            failure = next((stream.failure for stream in changed if stream.failure is not None), None)
            out = [*self._costed(out), self._closing(events, failure)]
            await self._send(send, out, more=bool(self._open) and failure is None)
            if failure is not None:
                return failure
            for stream in changed:
                self._streams.credit(stream)
        return None

    async def _made(self, send: Send, events: Iterable[bytes]) -> list[bytes]:
        """Make events; where that takes long they are sent as they come, and others have their turn meanwhile.

        Gives back those that are not sent.
        """
        out: list[bytes] = []
        start = monotonic_ns()
        for event in events:
            out.append(event)
            if (now := monotonic_ns()) - start > TURN_NS:
                self.work_ns += now - start
                await self._send(send, self._costed(out))
                await asyncio.sleep(0)
                out, start = [], monotonic_ns()
        self.work_ns += monotonic_ns() - start
        return out

    def _first(self, stream: Stream, chunks: Chunks) -> bytes:
        """A choice's events before any text of its own."""
        first, job = chunks.first(), self._flight.job
        if job.extras.token_ids:
            first = with_prompt(
                first or chunks.text(""),
                bytes(self._prompt_ids(stream.choice.prompt)),
                chat=self._head.object == "chat.completion.chunk",
            )
        opening = self._form.opening(stream.choice.prompt)
        return first + chunks.text(opening) if opening and stream.id not in self._unopened else first

    async def _show(self, streams: list[Stream]) -> None:
        """Put the log-probabilities of prompts into words, where all are here."""
        for stream in streams:
            prompt, scores = stream.choice.prompt, stream.scores
            if scores is not None and scores.whole and prompt not in self._shown:
                self._shown[prompt] = await self._words(prompt, scores)

    async def _words(self, prompt: int, scores: PromptScores) -> Shown:
        job, form = self._flight.job, self._form
        assert isinstance(form, ScoredForm), f"{type(form).__name__} shows no log-probabilities of prompts"

        def shown() -> Shown:
            found = form.shown(prompt, scores, job.extras.prompt_logprobs, job.extras.echo_logprobs)
            if job.stream:
                self._echoed[prompt] = msgspec.Raw(_encode(found.echoed))
            return found

        return await _worked(scores.size, shown)

    def _more(self, stream: Stream, chunks: Chunks) -> bytes:
        """The events of a stream's new text, and of its end."""
        if stream.id not in self._unopened:
            return self._own(stream, chunks)
        prompt = stream.choice.prompt
        if prompt not in self._shown:
            return b""
        del self._unopened[stream.id]
        echoed = cast("CompletionLogprobs", self._echoed[prompt])
        return chunks.text(self._form.opening(prompt), echoed) + self._own(stream, chunks)

    def _own(self, stream: Stream, chunks: Chunks) -> bytes:
        """The events of new text, after the echo if there is one."""
        offset, at = stream.text.length, stream.text.tokens
        told, shown = self._advance(stream)
        event = b""
        if shown:
            offset += len(self._form.opening(stream.choice.prompt))
        if told or shown:
            event = chunks.tell(told, self._form.logprobs(shown, offset) if shown else None)
        if self._flight.job.extras.token_ids and stream.text.tokens > at:
            event = with_token_ids(event or chunks.text(""), stream.tokens[at : stream.text.tokens])
        if stream.id in self.endings:
            event += chunks.last(self.endings[stream.id])
        return event

    def _costed(self, events: list[bytes]) -> list[bytes]:
        """The same events, each with the usage so far where the client wants it."""
        if not self._flight.job.extras.usage_often:
            return events
        return [with_usage(b"".join(events), self._usage())]

    def _closing(self, events: Events, failure: ApiError | None) -> bytes:
        """What ends the whole answer, if this is its end."""
        if failure is not None:
            return events.fail(failure)
        return b"" if self._open else events.end(self._usage())

    def _advance(self, stream: Stream) -> tuple[list[Event], list[Logprob]]:
        """What is new of a stream's message, and the log-probabilities of its text; notes its end."""
        if stream.id in self.endings:
            return [], []
        at, stream.read = stream.read, len(stream.tokens)
        piped, telling = stream.text, stream.telling
        tokens, logprobs = stream.tokens[at:], stream.logprobs
        stream.logprobs = []  # what has been said is not kept: it is far larger than its tokens
        if telling is None:
            told, shown = _said(piped.feed(tokens, logprobs)), piped.shown
        else:
            told, shown = telling.feed(tokens, logprobs)
            if telling.overdrawn:
                self._force(stream, telling)
                return told, shown
        stopped = piped.stopped or (telling is not None and telling.done)
        if not stopped and stream.finish not in REASONS:
            return told, shown
        more, late = self._finish(stream, stopped=stopped)
        return told + more, shown + late

    def _finish(self, stream: Stream, *, stopped: bool) -> tuple[list[Event], list[Logprob]]:
        """What was held back of a stream that ends now: ``stopped`` here, or by the mesh."""
        piped, telling = stream.text, stream.telling
        ending = Ending("stop", piped.stop)
        last = None
        if not stopped:
            ending = Ending(REASONS[stream.finish], piped.stop, self._stop_token(stream))
            last = stream.stop_token if self._flight.job.extras.stop_text and stream.stop_token >= 0 else None
        if telling is not None:
            told, shown = telling.finish(last)
            ending = msgspec.structs.replace(ending, reason=telling.reason(ending.reason))
        else:
            told, shown = ([], []) if stopped else (_said(piped.finish(last)), piped.shown)
        self._end(stream, msgspec.structs.replace(ending, stop=piped.stop))
        return told, shown

    def _force(self, stream: Stream, telling: Telling) -> None:
        """End the reasoning of a stream, which has taken all the tokens that it may."""
        parsing = self._flight.job.parsing
        assert parsing is not None
        telling.release()
        stream.read = stream.text.tokens
        self._streams.force(stream, parsing.closing)

    def _stop_token(self, stream: Stream) -> int | None:
        """The stop token that ended a stream, if it is one to name: an end of sequence is not."""
        quiet = stream.stop_token < 0 or stream.stop_token in self._flight.job.extras.quiet_stops
        return None if quiet else stream.stop_token

    def _end(self, stream: Stream, ending: Ending) -> None:
        self._open -= 1
        self.endings[stream.id] = ending
        self._streams.close(stream)

    def _check(self, streams: list[Stream]) -> None:
        if self._flight.gone:
            raise ClientGoneError
        for stream in streams:
            if stream.failure is not None:
                raise stream.failure

    async def _send(self, send: Send, parts: list[bytes], *, more: bool = True) -> None:
        body = b"".join(parts)
        if not body and more:
            return
        start = monotonic_ns()
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self.work_ns += monotonic_ns() - start

    def _usage(self) -> Usage:
        """Each prompt counts once, as its first choice met it."""
        drawn = sum(stream.text.tokens for stream in self._flight.streams)
        cached = sum(s.cached_tokens for s in self._flight.streams if not s.choice.sampling.choice)
        thought = sum(s.telling.reasoning_tokens for s in self._flight.streams if s.telling is not None)
        return usage(self._flight.job.prompt_tokens, drawn, cached, thought)


async def _worked(size: int, call: Callable[[], T]) -> T:
    """Run ``call`` here if it puts little into words, else in a worker thread."""
    return call() if size <= INLINE_SCORES else await anyio.to_thread.run_sync(call)


def _said(text: str) -> list[Event]:
    return [Content(text)] if text else []
