"""The bodies of ``/v1/messages``: a message, the blocks of its content, and errors."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from edgemesh.api.errors import ApiError
from edgemesh.api.replies import Reply, Usage

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class SaidBlock(Reply, frozen=True, tag_field="type", tag="text"):
    """A text that the model gave."""

    text: str = ""


UNSIGNED: Final = "unsigned"
"""Nobody signs a thought here, but there are clients that send back only those which are signed."""


class ThoughtBlock(Reply, frozen=True, tag_field="type", tag="thinking"):
    """What the model thought; the signature comes when it is complete."""

    thinking: str = ""
    signature: Literal["", "unsigned"] = ""


class UsedBlock(Reply, frozen=True, tag_field="type", tag="tool_use"):
    """A tool that the model uses."""

    id: str
    name: str
    input: dict[str, Any] = msgspec.field(default_factory=dict)


SaidBlocks = SaidBlock | ThoughtBlock | UsedBlock


class MessageUsage(Reply, frozen=True):
    """What a message cost, in tokens; ``input_tokens`` are those that had to be computed."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: Literal[0] = 0


class AppliedEdits(Reply, frozen=True):
    """What was done about the conversation before the model read it: nothing."""

    applied_edits: tuple[()] = ()


class AnswerMessage(Reply, frozen=True):
    """The answer, as far as it has come."""

    id: str
    model: str
    usage: MessageUsage
    content: tuple[SaidBlocks, ...] = ()
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    context_management: AppliedEdits | UnsetType = UNSET
    """There if the request had it."""

    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class OriginalTokens(Reply, frozen=True):
    """The count before anything was done about the conversation."""

    original_input_tokens: int


class TokenCount(Reply, frozen=True):
    """The answer of ``/v1/messages/count_tokens``."""

    input_tokens: int
    context_management: OriginalTokens | UnsetType = UNSET
    """There if the request had it."""


def usage_of(usage: Usage) -> MessageUsage:
    """A chat's usage as a message tells it."""
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=cached,
    )


_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


class MessageErrorDetail(Reply, frozen=True):
    """What went wrong."""

    type: str
    message: str


class MessageError(Reply, frozen=True, tag_field="type", tag="error"):
    """The body of every answer that is not a success."""

    error: MessageErrorDetail


def error_body(error: ApiError) -> bytes:
    """An error as Anthropic's clients read it."""
    fallback = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _KINDS.get(error.status, fallback)
    return msgspec.json.encode(MessageError(error=MessageErrorDetail(type=kind, message=_message(error))))


def _message(error: ApiError) -> str:
    """What went wrong; of a context that is exceeded in words that clients know, which ask for less then."""
    excess = error.excess
    if excess is None:
        return error.detail.message
    if excess.prompt >= excess.limit:
        return f"prompt is too long: {excess.prompt} tokens > {excess.limit - 1} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {excess.prompt} + {excess.wanted} > {excess.limit}, "
        "decrease input length or `max_tokens` and try again"
    )
