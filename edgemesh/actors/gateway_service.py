"""One gateway's state, and the way of one request through it: checked, tokenised, submitted, answered."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

import anyio.to_thread
import msgspec
from anyio import CapacityLimiter
from starlette.types import Receive, Scope, Send

from edgemesh.actors.gateway_answer import Answer
from edgemesh.actors.gateway_constraints import Constraints, constrained
from edgemesh.actors.gateway_http import Bodies, ClientGoneError, credentials, external_id, respond
from edgemesh.actors.gateway_keys import ApiKeys
from edgemesh.actors.gateway_metrics import Metrics
from edgemesh.actors.gateway_outbox import Sender
from edgemesh.actors.gateway_quota import Quotas
from edgemesh.actors.gateway_scores import ScoreRoom
from edgemesh.actors.gateway_streams import Flight, Stream, Streams
from edgemesh.actors.gateway_weights import BODY_BYTES, INLINE_CHARS, TOKENS, TOOL_CHARS, WORD_CHARS, of_chat
from edgemesh.api.asking import Asked, ask
from edgemesh.api.calling import with_calls
from edgemesh.api.check import Prompt, check_chat, check_completion
from edgemesh.api.decode import BodyDecoder
from edgemesh.api.detokenize import IdPieces, Pieces
from edgemesh.api.errors import ApiError, timed_out, too_busy, unavailable
from edgemesh.api.extent import SMALL_BYTES
from edgemesh.api.forms import ChatForm, CompletionForm, Form
from edgemesh.api.limits import Limits
from edgemesh.api.openai import ChatRequest, CompletionRequest, Request
from edgemesh.api.parser import MessageParser
from edgemesh.api.resolve import Job, resolve_chat, resolve_completion
from edgemesh.api.stream import TextStream
from edgemesh.api.telling import Telling
from edgemesh.api.text import ModelText
from edgemesh.api.turns import text_of
from edgemesh.api.words import bad_words
from edgemesh.runtime.clock import monotonic_ns, wall_ns

WORKERS: Final = 4
T = TypeVar("T")
Prepared = tuple[str, Job, Form]
"""The client's own name of its request, if any, and what came of its body; the body itself is not kept."""


class Model(msgspec.Struct, frozen=True):
    """What is served, once it is known."""

    text: ModelText
    limits: Limits
    fingerprint: str | None = None
    """Changes with whatever may change the tokens that a seed gives."""

    constraints: Constraints | None = None
    """Tries grammars out; without it none are taken."""


Prepare = Callable[[Model, str, Scope, bytes], Awaitable[Prepared]]


class Service:
    """Everything that requests share in one gateway process."""

    def __init__(
        self,
        port: Sender,
        *,
        index: int,
        metrics: Metrics,
        keys: ApiKeys,
        quotas: Quotas,
        bodies: Bodies,
        max_streams: int,
        timeout_s: float = 0,
    ) -> None:
        self.port = port
        self.metrics = metrics
        self.streams = Streams(port, index, metrics)
        self.keys = keys
        self.quotas = quotas
        self.bodies = bodies
        self.decoder = BodyDecoder()
        self.model: Model | None = None
        self.serving = False
        self.reason = "starting"
        self.scores = ScoreRoom()
        self._max_streams = max_streams
        self._timeout_s = timeout_s
        self._requests = 0
        self._workers = CapacityLimiter(WORKERS)
        metrics.watch("edgemesh_open_requests", "Requests being answered.", lambda: self._requests)
        metrics.watch("edgemesh_open_streams", "Choices being answered.", lambda: len(self.streams))

    @property
    def idle(self) -> bool:
        """Whether no request is open."""
        return self._requests == 0

    def loaded(self) -> Model:
        """The model, if it is known yet. Raises ``ApiError`` (503)."""
        if self.model is None:
            raise self._not_now()
        return self.model

    def ready(self) -> Model:
        """The model, if requests may come now. Raises ``ApiError`` (503)."""
        if not self.serving:
            raise self._not_now()
        return self.loaded()

    def _not_now(self) -> ApiError:
        return unavailable(f"this server does not take requests now: {self.reason}")

    async def work(self, size: int, call: Callable[[], T]) -> T:
        """Run ``call`` here if the text it reads is short, else in a worker thread."""
        if size <= INLINE_CHARS:
            return call()
        return await anyio.to_thread.run_sync(call, limiter=self._workers)

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        """``/v1/chat/completions``."""
        await self.generate(scope, receive, send, "chatcmpl-", self._prepare_chat)

    async def completion(self, scope: Scope, receive: Receive, send: Send) -> None:
        """``/v1/completions``."""
        await self.generate(scope, receive, send, "cmpl-", self._prepare_completion)

    @contextmanager
    def visited(self, scope: Scope) -> Iterator[Model]:
        """The model, for a caller whose work counts as a request of its key. Raises ``ApiError`` (401, 429, 503)."""
        caller, model = self.keys.check(credentials(scope)), self.loaded()
        visit = self.quotas.enter(caller)
        try:
            yield model
        finally:
            visit.leave(0)

    async def generate(self, scope: Scope, receive: Receive, send: Send, prefix: str, prepare: Prepare) -> None:
        """Answer one request, from its key to its last byte; its id begins with ``prefix``. Raises ``ApiError``."""
        started = monotonic_ns()
        caller = self.keys.check(credentials(scope))
        model = self.ready()
        if self._requests >= self._max_streams:
            raise _full(self._max_streams)
        name = prefix + uuid.uuid4().hex
        visit = self.quotas.enter(caller)
        self._requests += 1
        flight = None
        try:
            outer, job, form = await self._prepared(prepare, model, name, scope, receive)
            if job.grammar:
                await self._constrainable(model, name, job)
            if caller.id:
                tenant = f"{caller.id}/{job.tenant}" if job.tenant else caller.id
                job = msgspec.structs.replace(job, key=caller.id, tenant=tenant)
            visit.prompt(job.prompt_tokens)
            flight = self._flight(name, job, model, started)
            headers = (b"x-request-id", (outer or name).encode(), *visit.headers)
            with self.scores.room(job):
                await self._answer(flight, form, model, receive, send, headers)
        except ClientGoneError:
            self.metrics.aborted()
            self.port.trace.event("request.aborted", request=name)
        except ApiError as error:
            self._failed(name, error)
            error.headers = error.headers or visit.headers
            raise
        finally:
            self._requests -= 1
            visit.leave(flight.used_tokens if flight is not None else 0)

    async def _prepared(self, prepare: Prepare, model: Model, name: str, scope: Scope, receive: Receive) -> Prepared:
        async with self.bodies.read(scope, receive) as body:
            return await prepare(model, name, scope, body)

    async def _prepare_chat(self, model: Model, name: str, scope: Scope, body: bytes) -> Prepared:
        request = await self.read(body, lambda: self.decoder.decode(body, ChatRequest))
        outer, job = await self.conversation(model, name, "chat", scope, request, body)
        opening = text_of(request.messages[-1]) if request.echo else ""
        return outer, job, ChatForm(_pieces(model.text, request), metadata=request.metadata, opening=opening)

    async def conversation(
        self,
        model: Model,
        name: str,
        endpoint: str,
        scope: Scope,
        request: ChatRequest,
        body: bytes,
        client: dict[str, str] | None = None,
    ) -> tuple[str, Job]:
        """The client's own name of a chat, and its job, whichever endpoint it came by. Raises ``ApiError``.

        ``client`` is what the client says of itself.
        """
        outer = self._received(name, endpoint, scope, request, client)
        start = monotonic_ns()
        asked = await self.ask(model, request, body)
        self._tokenised(name, len(asked.ids), start)
        words = await self._bad_words(model.text, request)
        seed = secrets.randbits(63)
        size = len(asked.ids) // TOKENS
        job = await self.work(size, lambda: resolve_chat(request, asked.ids, model.limits, seed, words))
        job = await constrained(request, job, large=len(body) > SMALL_BYTES)
        job = msgspec.structs.replace(job, parsing=asked.parsing)
        size = TOOL_CHARS * len(request.tools or ()) if job.parsing is not None else 0
        return outer, await self.work(size, lambda: with_calls(request, job, model.text.added))

    async def ask(self, model: Model, request: ChatRequest, body: bytes) -> Asked:
        """A chat, that came in this body, as the model is asked. Raises ``ApiError``."""
        check_chat(request, model.limits)
        return await self.work(of_chat(request, body), lambda: ask(model.text, request))

    async def read(self, body: bytes, call: Callable[[], T]) -> T:
        """Run ``call``, which decodes a body, here if that is small, else in a worker thread."""
        return await self.work(len(body) // BODY_BYTES, call)

    async def _prepare_completion(self, model: Model, name: str, scope: Scope, body: bytes) -> Prepared:
        request = await self.read(body, lambda: self.decoder.decode(body, CompletionRequest))
        outer = self._received(name, "completions", scope, request)
        prompts = await self.read(body, lambda: check_completion(request, model.limits))
        size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        special = request.add_special_tokens is not False
        start = monotonic_ns()
        ids = await self.work(size, lambda: [_encode(model.text, prompt, special=special) for prompt in prompts])
        tokens = sum(map(len, ids))
        self._tokenised(name, tokens, start)
        words = await self._bad_words(model.text, request)
        seed = secrets.randbits(63)
        job = await self.work(tokens // TOKENS, lambda: resolve_completion(request, ids, model.limits, seed, words))
        job = await constrained(request, job, large=len(body) > SMALL_BYTES)
        echoes = await self.work(tokens, lambda: _echoes(model.text, request, prompts, job)) if request.echo else []
        return outer, job, CompletionForm(_pieces(model.text, request), echoes)

    async def _bad_words(self, text: ModelText, request: Request) -> tuple[tuple[int, ...], ...]:
        words = request.bad_words or []
        return await self.work(sum(WORD_CHARS + len(word) for word in words), lambda: bad_words(text, words))

    def _flight(self, name: str, job: Job, model: Model, started: int) -> Flight:
        if len(self.streams) + len(job.choices) > self._max_streams:
            raise _full(self._max_streams)
        flight = Flight(name, job, started)
        parsing = job.parsing
        for choice in job.choices:
            text = TextStream(
                model.text.pieces if parsing is None else model.text.marked_pieces,
                job.stops,
                skip_special=job.skip_special_tokens,
                min_tokens=choice.sampling.min_tokens,
                include_stop=job.extras.stop_text,
            )
            wire = f"{name}/{choice.index}" if choice.index else name
            telling = None
            if parsing is not None:
                telling = Telling(text, MessageParser(parsing, _call_id), parsing.budget)
            flight.streams.append(Stream(flight, wire, choice, text, telling))
        return flight

    async def _answer(
        self, flight: Flight, form: Form, model: Model, receive: Receive, send: Send, headers: tuple[bytes, ...]
    ) -> None:
        """Submit a flight and answer its client; whatever happens, nothing of it stays behind."""
        head = msgspec.structs.replace(
            form.head(flight.id, wall_ns() // 1_000_000_000, model.limits.model),
            system_fingerprint=model.fingerprint,
            service_tier=flight.job.extras.service_tier,
        )
        answer = Answer(flight, self.streams, form, head)
        watch = asyncio.create_task(_watch(receive, flight))
        timer = self._timer(flight)
        try:
            await self.streams.submit(flight)
            self.metrics.prompt(flight.job.prompt_tokens)
            await answer.admitted()
            failure = None
            if flight.job.stream:
                failure = await answer.events(send, headers)
            else:
                await respond(send, 200, await answer.whole(), headers=headers)
            if failure is None:
                self._finished(flight, answer)
            else:
                self._failed(flight.id, failure)
        finally:
            watch.cancel()
            if timer is not None:
                timer.cancel()
            for stream in flight.streams:
                self.streams.close(stream)

    def _timer(self, flight: Flight) -> asyncio.TimerHandle | None:
        """Ends the flight when its request has taken too long, since its arrival."""
        if not self._timeout_s:
            return None
        left = self._timeout_s - (monotonic_ns() - flight.started_ns) / 1e9
        error = timed_out(f"the request was not complete after {self._timeout_s:g} s, the most that this server allows")
        return asyncio.get_running_loop().call_later(max(0.0, left), self.streams.expire, flight, error)

    def _received(
        self, name: str, endpoint: str, scope: Scope, request: Request, client: dict[str, str] | None = None
    ) -> str:
        outer = external_id(scope, request.request_id)
        extra: dict[str, object] = {"external": outer} if outer else {}
        if isinstance(request, ChatRequest) and request.metadata:
            extra["metadata"] = request.metadata
        if client:
            extra["client"] = client
        stream = bool(request.stream)
        self.port.trace.event("request.received", request=name, endpoint=endpoint, stream=stream, **extra)
        return outer

    async def _constrainable(self, model: Model, name: str, job: Job) -> None:
        """Raise ``ApiError`` unless outputs can be made after the job's grammar."""
        if model.constraints is None:
            raise self._not_now()
        start = monotonic_ns()
        for param, source in job.trials:
            await model.constraints.check(msgspec.structs.replace(job, grammar=source, grammar_of=param))
        await model.constraints.check(job)
        ns = monotonic_ns() - start
        self.port.trace.event("request.constrained", request=name, characters=len(job.grammar), ns=ns)

    def _tokenised(self, name: str, tokens: int, start: int) -> None:
        ns = monotonic_ns() - start
        self.port.trace.event("request.tokenised", request=name, prompt_tokens=tokens, ns=ns)

    def _failed(self, name: str, error: ApiError) -> None:
        status, detail = error.status, error.detail
        self.port.trace.event("request.failed", request=name, status=status, code=detail.code, reason=detail.message)

    def _finished(self, flight: Flight, answer: Answer) -> None:
        now = monotonic_ns()
        sent = sum(stream.text.tokens for stream in flight.streams)
        self.port.trace.event("request.sent", request=flight.id, tokens=sent, ns=answer.work_ns)
        for stream in flight.streams:
            self.metrics.finished(now - flight.started_ns, stream.cached_tokens)
            self.port.trace.event(
                "request.finished",
                request=stream.id,
                finish=answer.endings[stream.id].reason,
                prompt_tokens=stream.prompt_tokens,
                output_tokens=stream.text.tokens,
                ttft_ns=max(0, stream.first_ns - flight.started_ns),
                e2e_ns=now - flight.started_ns,
                group=stream.group,
            )


async def _watch(receive: Receive, flight: Flight) -> None:
    """Tell the flight when its client hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass
    flight.hang_up()


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _full(limit: int) -> ApiError:
    return too_busy(f"this server answers {limit} requests already, the most that it takes at once", 1)


def _pieces(text: ModelText, request: Request) -> Pieces:
    """How log-probabilities name tokens."""
    return IdPieces(text.pieces) if request.return_tokens_as_token_ids else text.pieces


def _encode(text: ModelText, prompt: Prompt, *, special: bool) -> list[int]:
    return text.encode(prompt, add_special_tokens=special) if isinstance(prompt, str) else prompt


def _echoes(text: ModelText, request: CompletionRequest, prompts: Sequence[Prompt], job: Job) -> list[str]:
    """The text of each prompt, or of what was left of it."""
    if request.truncate_prompt_tokens is not None:
        prompts = [prompt.tolist() for prompt in job.prompts]
    return [prompt if isinstance(prompt, str) else text.decode(prompt, skip_special_tokens=True) for prompt in prompts]
