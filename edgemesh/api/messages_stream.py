"""The events of a streamed message in Anthropic's form."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from edgemesh.api.messages_replies import (
    UNSIGNED,
    AnswerMessage,
    AppliedEdits,
    MessageError,
    MessageUsage,
    SaidBlocks,
    StopReason,
)
from edgemesh.api.replies import Reply


class MessageStart(Reply, frozen=True, tag_field="type", tag="message_start"):
    """The message before its content."""

    message: AnswerMessage


class Ping(Reply, frozen=True, tag_field="type", tag="ping"):
    """Nothing; that the connection stands."""


class BlockStart(Reply, frozen=True, tag_field="type", tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: SaidBlocks


class TextDelta(Reply, frozen=True, tag_field="type", tag="text_delta"):
    """More of a text."""

    text: str


class ThinkingDelta(Reply, frozen=True, tag_field="type", tag="thinking_delta"):
    """More of what the model thinks."""

    thinking: str


class InputDelta(Reply, frozen=True, tag_field="type", tag="input_json_delta"):
    """More of the JSON of a tool's arguments."""

    partial_json: str


class SignatureDelta(Reply, frozen=True, tag_field="type", tag="signature_delta"):
    """What stands for the signature of a thought that is complete."""

    signature: Literal["unsigned"] = UNSIGNED


BlockDeltas = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockDelta(Reply, frozen=True, tag_field="type", tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: BlockDeltas


class BlockStop(Reply, frozen=True, tag_field="type", tag="content_block_stop"):
    """A block is complete."""

    index: int


class MessageEnding(Reply, frozen=True):
    """How the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Reply, frozen=True, tag_field="type", tag="message_delta"):
    """How the message ended, and what it cost altogether."""

    delta: MessageEnding
    usage: MessageUsage
    context_management: AppliedEdits | UnsetType = UNSET


class MessageStop(Reply, frozen=True, tag_field="type", tag="message_stop"):
    """The end of the stream."""


MESSAGE_EVENTS = (MessageStart, Ping, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop, MessageError)
"""All of them, about in the order in which they come; an error is the last."""
