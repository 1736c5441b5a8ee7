"""Every route of the HTTP API, declared once.

The router finds its handlers by it, and the OpenAPI document is written from it: no route can be in one alone.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from edgemesh.api.chunks import ChatCompletionChunk, CompletionChunk
from edgemesh.api.errors import ErrorBody
from edgemesh.api.messages import CountTokensRequest, MessagesRequest
from edgemesh.api.messages_replies import AnswerMessage, MessageError, TokenCount
from edgemesh.api.messages_stream import MESSAGE_EVENTS
from edgemesh.api.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from edgemesh.api.replies import (
    ChatCompletion,
    Completion,
    Detokenized,
    Healthy,
    Load,
    ModelCard,
    ModelList,
    Tokenized,
    TokenizerInfo,
    Version,
)
from edgemesh.api.responses import ResponsesRequest
from edgemesh.api.responses_replies import Response
from edgemesh.api.responses_stream import RESPONSE_EVENTS

Kind = type[msgspec.Struct]

READ: Final = (400, 408, 413, 415, 429)
"""How any body may be refused: its content, its pace, its size, its type, too many at once."""

GENERATE: Final = (*READ, 404, 422, 503, 504)
"""How a request that generates may be refused, too: no such model, the template, not now, not in time."""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path, and everything that its answers can be."""

    path: str
    """With parameters as Starlette writes them: ``/v1/models/{model:path}``."""

    name: str
    """Names its handler, its metrics, and its entry in the document."""

    summary: str
    method: Literal["GET", "POST"] = "GET"
    body: Kind | None = None
    """The JSON body it takes."""

    answer: Kind | str
    """The JSON body of a 200, or the content type of one that is not JSON."""

    events: tuple[Kind, ...] = ()
    """What an event of its stream may hold, where it can stream."""

    done: bool = True
    """Whether a last event ``[DONE]`` ends its stream."""

    failures: tuple[int, ...] = ()
    """Statuses of ``error`` beside those that any route can have (401 where it asks for a key, and 500)."""

    error: Kind = ErrorBody
    unwell: Kind | None = None
    """The body of a 503 that is no error."""

    keyed: bool = True
    """Whether it asks for an API key where keys are set."""


ROUTES: Final = (
    Operation(
        path="/v1/chat/completions",
        method="POST",
        name="chat",
        summary="Answer a conversation",
        body=ChatRequest,
        answer=ChatCompletion,
        events=(ChatCompletionChunk,),
        failures=GENERATE,
    ),
    Operation(
        path="/v1/completions",
        method="POST",
        name="completions",
        summary="Continue a text",
        body=CompletionRequest,
        answer=Completion,
        events=(CompletionChunk,),
        failures=GENERATE,
    ),
    Operation(
        path="/v1/responses",
        method="POST",
        name="responses",
        summary="Answer a conversation, in the form of OpenAI's responses",
        body=ResponsesRequest,
        answer=Response,
        events=RESPONSE_EVENTS,
        failures=GENERATE,
    ),
    Operation(
        path="/v1/messages",
        method="POST",
        name="messages",
        summary="Answer a conversation, in the form of Anthropic's messages",
        body=MessagesRequest,
        answer=AnswerMessage,
        events=MESSAGE_EVENTS,
        failures=GENERATE,
        error=MessageError,
    ),
    Operation(
        path="/v1/messages/count_tokens",
        method="POST",
        name="count_tokens",
        summary="How many tokens the prompt of a message has",
        body=CountTokensRequest,
        answer=TokenCount,
        failures=GENERATE,
        error=MessageError,
    ),
    Operation(path="/v1/models", name="models", summary="The models served", answer=ModelList, failures=(503,)),
    Operation(path="/v1/models/{model:path}", name="model", summary="One model", answer=ModelCard, failures=(404, 503)),
    Operation(
        path="/tokenize",
        method="POST",
        name="tokenize",
        summary="The token ids of a text or a conversation",
        body=TokenizeRequest,
        answer=Tokenized,
        failures=GENERATE,
    ),
    Operation(
        path="/detokenize",
        method="POST",
        name="detokenize",
        summary="The text of token ids",
        body=DetokenizeRequest,
        answer=Detokenized,
        failures=(*READ, 404, 503),
    ),
    Operation(
        path="/tokenizer_info",
        name="tokenizer_info",
        summary="The tokenizer's special tokens and chat template",
        answer=TokenizerInfo,
        failures=(503,),
    ),
    Operation(
        path="/health",
        name="health",
        summary="Whether requests may come now",
        answer=Healthy,
        unwell=Healthy,
        keyed=False,
    ),
    Operation(
        path="/ping",
        name="ping",
        summary="The same as /health, where hosting services look for it",
        answer=Healthy,
        unwell=Healthy,
        keyed=False,
    ),
    Operation(path="/load", name="load", summary="How much every gateway is answering", answer=Load, keyed=False),
    Operation(path="/version", name="version", summary="The server's version", answer=Version, keyed=False),
    Operation(
        path="/metrics",
        name="metrics",
        summary="Counters and gauges for Prometheus",
        answer="text/plain",
        keyed=False,
    ),
    Operation(path="/openapi.json", name="openapi", summary="This document", answer="application/json", keyed=False),
)
