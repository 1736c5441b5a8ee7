"""``/v1/responses`` and ``/v1/messages``: chats that are asked for, and answered, in the forms of other APIs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import msgspec
from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from edgemesh.actors.gateway_http import respond
from edgemesh.actors.gateway_service import Model, Prepared, Service
from edgemesh.api.errors import ApiError
from edgemesh.api.made import MadeForm, Maker
from edgemesh.api.messages import MESSAGES, CountTokensRequest, MessagesRequest
from edgemesh.api.messages_chat import chat_of_messages
from edgemesh.api.messages_events import MessageMaker
from edgemesh.api.messages_replies import OriginalTokens, TokenCount
from edgemesh.api.openai import ChatRequest
from edgemesh.api.responses import RESPONSES, ResponsesRequest
from edgemesh.api.responses_chat import chat_of_response
from edgemesh.api.responses_events import ResponseMaker
from edgemesh.api.responses_replies import begun
from edgemesh.api.responses_toolbox import Toolbox
from edgemesh.api.sse import Head
from edgemesh.api.translation import Translation, request_of
from edgemesh.runtime.clock import wall_ns

SECOND: Final = 1_000_000_000
Read = tuple[Translation, ChatRequest, Callable[[Head], Maker], dict[str, str] | None]
"""What a body asks for, as a chat, what makes the answer, and what the client says of itself."""


class Surfaces:
    """The handlers of both APIs."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def responses(self, scope: Scope, receive: Receive, send: Send) -> None:
        """``/v1/responses``."""
        await self._service.generate(scope, receive, send, "resp_", self._prepare_response)

    async def messages(self, scope: Scope, receive: Receive, send: Send) -> None:
        """``/v1/messages``."""
        await self._service.generate(scope, receive, send, "msg_", self._prepare_message)

    async def count_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        """``/v1/messages/count_tokens``."""
        service = self._service
        with service.visited(scope) as model:
            async with service.bodies.read(scope, receive) as body:
                asked, translation, chat = await service.read(body, lambda: _counted(body, model))
                with _named(translation):
                    prompt = await service.ask(model, chat, body)
        count = len(prompt.ids)
        original = UNSET if asked.context_management is None else OriginalTokens(original_input_tokens=count)
        await respond(send, 200, msgspec.json.encode(TokenCount(input_tokens=count, context_management=original)))

    async def _prepare_response(self, model: Model, name: str, scope: Scope, body: bytes) -> Prepared:
        def read() -> Read:
            request = request_of(body, ResponsesRequest, RESPONSES)
            box = Toolbox(request.tools or ())
            return _read(
                chat_of_response(request, box), partial(_response_maker, request, box), request.client_metadata
            )

        return await self._prepared(model, name, "responses", scope, body, read)

    async def _prepare_message(self, model: Model, name: str, scope: Scope, body: bytes) -> Prepared:
        def read() -> Read:
            request = request_of(body, MessagesRequest, MESSAGES)
            return _read(chat_of_messages(request, model.text.dialect), partial(_message_maker, request))

        return await self._prepared(model, name, "messages", scope, body, read)

    async def _prepared(
        self,
        model: Model,
        name: str,
        endpoint: str,
        scope: Scope,
        body: bytes,
        read: Callable[[], Read],
    ) -> Prepared:
        translation, chat, make, client = await self._service.read(body, read)
        with _named(translation):
            outer, job = await self._service.conversation(model, name, endpoint, scope, chat, body, client)
        trials = tuple((translation.name(param), source) for param, source in job.trials)
        job = msgspec.structs.replace(job, grammar_of=translation.name(job.grammar_of), trials=trials)
        return outer, job, MadeForm(make)


@contextmanager
def _named(translation: Translation) -> Iterator[None]:
    """What is refused of a chat is refused by the names that its request has."""
    try:
        yield
    except ApiError as error:
        raise translation.back(error) from error


def _read(translation: Translation, make: Callable[[Head], Maker], client: dict[str, str] | None = None) -> Read:
    with _named(translation):
        return translation, translation.request(), make, client


def _counted(body: bytes, model: Model) -> tuple[CountTokensRequest, Translation, ChatRequest]:
    asked = request_of(body, CountTokensRequest, MESSAGES)
    translation = chat_of_messages(asked, model.text.dialect)
    with _named(translation):
        return asked, translation, translation.request()


def _response_maker(request: ResponsesRequest, box: Toolbox, head: Head) -> ResponseMaker:
    reasoning = request.reasoning
    return ResponseMaker(
        begun(request, head.id, head.created, head.model),
        lambda: wall_ns() // SECOND,
        box=box,
        seal=bool(request.include),
        summarise=reasoning is not None and reasoning.summary is not None,
    )


def _message_maker(request: MessagesRequest, head: Head) -> MessageMaker:
    return MessageMaker(head.id, head.model, managed=request.context_management is not None)
