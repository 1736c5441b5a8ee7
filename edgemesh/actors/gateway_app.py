"""The routes of a gateway, and how each kind of failure is answered."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection
from typing import Final

import anyio.to_thread
import msgspec
from anyio import CapacityLimiter
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route, Router
from starlette.types import Receive, Scope, Send

from edgemesh import __version__
from edgemesh.actors.gateway_cors import Origins
from edgemesh.actors.gateway_http import ClientGoneError, ErrorForm, credentials, openai_body, refuse, respond
from edgemesh.actors.gateway_metrics import CONTENT_TYPE
from edgemesh.actors.gateway_service import Model, Service
from edgemesh.actors.gateway_surfaces import Surfaces
from edgemesh.api.absent import absent
from edgemesh.api.check import check_detokenize, check_model, check_tokenize
from edgemesh.api.errors import ApiError, ErrorBody
from edgemesh.api.messages_replies import MessageError, error_body
from edgemesh.api.openai import DetokenizeRequest, TokenizeRequest
from edgemesh.api.openapi import document
from edgemesh.api.replies import Detokenized, Healthy, ModelCard, ModelList, Tokenized, TokenizerInfo, Version
from edgemesh.api.routes import ROUTES
from edgemesh.wire.schema import render

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]
MAX_NAMED: Final = 64
ERRORS: Final = {ErrorBody: openai_body, MessageError: error_body}
"""What makes the body of an error, by its struct."""


class Endpoint:
    """One route's handler: refusals become answers, counted by status; a bug is a 500 that says nothing of itself."""

    def __init__(self, service: Service, name: str, handler: Handler, form: ErrorForm = openai_body) -> None:
        self._service = service
        self._name = name
        self._handler = handler
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        status = 200
        try:
            await self._handler(scope, receive, send)
        except ApiError as error:
            status = error.status
            await refuse(send, error, self._form)
        except ClientGoneError:
            status = 499
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets an answer and the trace the cause
            status = 500
            self._service.port.trace.event("request.broken", endpoint=self._name, error=repr(error))
            message = "the server met an unexpected error; it is in the gateway's trace"
            refusal = ApiError(500, message, kind="server_error", code="internal_error")
            # Where an answer has begun, this fails, and the connection is closed.
            await refuse(send, refusal, self._form)
        finally:
            self._service.metrics.answered(self._name, status)


class Application:
    """The whole HTTP side of a gateway: the routes, with nothing in between that each event would pass through."""

    def __init__(self, service: Service, allowed_origins: Collection[str] = ()) -> None:
        pages, surfaces = Pages(service), Surfaces(service)
        self._origins = Origins(allowed_origins)
        handlers: dict[str, Handler] = {
            "chat": service.chat,
            "completions": service.completion,
            "responses": surfaces.responses,
            "messages": surfaces.messages,
            "count_tokens": surfaces.count_tokens,
            "models": pages.models,
            "model": pages.model,
            "tokenize": pages.tokenize,
            "detokenize": pages.detokenize,
            "tokenizer_info": pages.tokenizer_info,
            "health": pages.health,
            "ping": pages.health,
            "load": pages.load,
            "version": pages.version,
            "metrics": pages.metrics,
            "openapi": pages.openapi,
        }
        assert handlers.keys() == {each.name for each in ROUTES}, "a route and its handler come together"
        routes = [
            Route(
                each.path, Endpoint(service, each.name, handlers[each.name], ERRORS[each.error]), methods=[each.method]
            )
            for each in ROUTES
        ]
        self._router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        scope["app"] = self  # with it, the router raises what would else be a plain text
        if scope["path"] != "/":
            scope["path"] = scope["path"].rstrip("/")
        if self._origins:
            send = self._origins.answering(scope, send)
        try:
            if scope["method"] == "OPTIONS":
                await self._options(scope, send)
            else:
                await self._router(scope, receive, send)
        except HTTPException as error:
            allow = (error.headers or {}).get("Allow", "")
            form = error_body if scope["path"].startswith("/v1/messages") else openai_body
            await refuse(send, _no_route(scope, error), form, (b"allow", allow.encode()) if allow else ())

    async def _options(self, scope: Scope, send: Send) -> None:
        """What may be done with a path, and by the scripts of which pages."""
        methods: set[str] = set()
        for method in ("GET", "HEAD", "POST"):
            asked = {**scope, "method": method}
            if any(route.matches(asked)[0] is Match.FULL for route in self._router.routes):
                methods.add(method)
        try:
            if not methods:
                raise absent(scope["method"], scope["path"][:MAX_NAMED])
            headers = self._origins.options(scope, methods)
        except ApiError as error:
            await refuse(send, error)
            return
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body"})


class Pages:
    """The endpoints that generate nothing."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())
        self._document = b""
        self._reading = CapacityLimiter(1)
        """Descriptions of the whole are put together beside the event loop, one at a time: of many gateways they are long."""

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        """``/v1/models``."""
        del receive
        model = self._known(scope)
        await respond(send, 200, msgspec.json.encode(ModelList(data=[self._card(model)])))

    async def model(self, scope: Scope, receive: Receive, send: Send) -> None:
        """``/v1/models/NAME``."""
        del receive
        model = self._known(scope)
        check_model(scope["path_params"]["model"], model.limits)
        await respond(send, 200, msgspec.json.encode(self._card(model)))

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """``/tokenize``."""
        with self._service.visited(scope) as model:
            async with self._service.bodies.read(scope, receive) as body:
                answer = await self._tokenized(body, model)
        await respond(send, 200, answer)

    async def _tokenized(self, body: bytes, model: Model) -> bytes:
        request = await self._service.read(body, lambda: self._service.decoder.decode(body, TokenizeRequest))
        check_tokenize(request, model.limits)
        text = model.text
        messages, prompt = request.messages, request.prompt

        def encode() -> list[int]:
            if messages is None:
                return text.encode(prompt or "", add_special_tokens=request.add_special_tokens is not False)
            generate = request.add_generation_prompt is not False
            rendered = text.render(
                messages,
                add_generation_prompt=generate,
                kwargs=request.chat_template_kwargs,
                tools=request.tools,
                documents=request.documents,
                continue_final_message=request.continue_final_message is True,
            )
            return text.encode(rendered, add_special_tokens=request.add_special_tokens is True, param="messages")

        ids = await self._service.work(1 << 30 if messages else len(prompt or ""), encode)

        def answer() -> bytes:
            strings = None
            if request.return_token_strs:
                strings = [text.pieces.bytes_of(each).decode(errors="replace") for each in ids]
            found = Tokenized(tokens=ids, count=len(ids), max_model_len=model.limits.context, token_strs=strings)
            return msgspec.json.encode(found)

        return await self._service.work(len(ids), answer)

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """``/detokenize``."""
        with self._service.visited(scope) as model:
            async with self._service.bodies.read(scope, receive) as body:
                text = await self._detokenized(body, model)
        await respond(send, 200, msgspec.json.encode(Detokenized(prompt=text)))

    async def _detokenized(self, body: bytes, model: Model) -> str:
        def read() -> DetokenizeRequest:
            request = self._service.decoder.decode(body, DetokenizeRequest)
            check_detokenize(request, model.limits)
            return request

        request = await self._service.read(body, read)
        skip = request.skip_special_tokens is True
        return await self._service.work(
            len(request.tokens), lambda: model.text.decode(request.tokens, skip_special_tokens=skip)
        )

    async def tokenizer_info(self, scope: Scope, receive: Receive, send: Send) -> None:
        """``/tokenizer_info``."""
        del receive
        model = self._known(scope)
        special = model.text.special_tokens
        named = {name: special.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        answer = TokenizerInfo(**named, chat_template=model.text.source, model_max_length=model.limits.context)
        await respond(send, 200, msgspec.json.encode(answer))

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """``/health``: 200 while requests may come, else 503 and why. It waits for nothing."""
        del scope, receive
        service = self._service
        well = service.serving and service.model is not None
        answer = Healthy(status="ok" if well else "unavailable", reason="" if well else service.reason)
        await respond(send, 200 if well else 503, msgspec.json.encode(answer))

    async def load(self, scope: Scope, receive: Receive, send: Send) -> None:
        """``/load``: what is open in this gateway and in those that share its port."""
        del scope, receive
        load = await anyio.to_thread.run_sync(self._service.metrics.load, limiter=self._reading)
        await respond(send, 200, msgspec.json.encode(load))

    async def version(self, scope: Scope, receive: Receive, send: Send) -> None:
        """``/version``."""
        del scope, receive
        await respond(send, 200, msgspec.json.encode(Version(version=__version__)))

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """``/metrics``."""
        del scope, receive
        text = await anyio.to_thread.run_sync(self._service.metrics.text, limiter=self._reading)
        await respond(send, 200, text, CONTENT_TYPE.encode())

    async def openapi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """``/openapi.json``: this API as a document."""
        del scope, receive
        if not self._document:
            keyed = self._service.keys.asked
            self._document = await anyio.to_thread.run_sync(
                lambda: render(document(keyed=keyed)), limiter=self._reading
            )
        await respond(send, 200, self._document)

    def _known(self, scope: Scope) -> Model:
        """The model, for a caller who may ask. Raises ``ApiError`` (401, 503)."""
        self._service.keys.check(credentials(scope))
        return self._service.loaded()

    def _card(self, model: Model) -> ModelCard:
        return ModelCard(id=model.limits.model, created=self._created, max_model_len=model.limits.context)


def _no_route(scope: Scope, error: HTTPException) -> ApiError:
    """No such route, or another method."""
    where = f"{scope['method']} {scope['path'][:MAX_NAMED]}"
    if error.status_code == 405:
        message = f"{where} is not allowed; this path takes {(error.headers or {}).get('Allow', 'another method')}"
        return ApiError(405, message, code="method_not_allowed")
    return absent(scope["method"], scope["path"][:MAX_NAMED])
