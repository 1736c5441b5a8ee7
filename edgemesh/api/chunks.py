"""What the events of a stream hold, as ``sse`` writes them: for the API's document, and for whoever reads a stream."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from edgemesh.api.replies import ChatLogprobs, CompletionLogprobs, Reply, Usage


class FunctionDelta(Reply, frozen=True, omit_defaults=True):
    """What a chunk adds to a call: its name, once, then pieces of its arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(Reply, frozen=True, omit_defaults=True):
    """What a chunk adds to the ``index``-th call of a message; the first has its id."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Reply, frozen=True, omit_defaults=True):
    """What a chunk adds to a choice's message; the first names the role."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(Reply, frozen=True):
    """What a chunk adds to one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Reply, frozen=True):
    """One event of a streamed chat; without choices, it tells the whole request's usage."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChunkChoice(Reply, frozen=True):
    """More of one choice's text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(Reply, frozen=True):
    """One event of a streamed completion; without choices, it tells the whole request's usage."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET
