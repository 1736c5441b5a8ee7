"""The two forms of an answer, chat and completion: the same text in different bodies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from edgemesh.api.detokenize import Pieces
from edgemesh.api.events import Event, Message, gather
from edgemesh.api.logprobs import chat_logprobs, completion_logprobs
from edgemesh.api.prompt_scores import PromptScores, Shown, echo_columns, joined, prompt_table
from edgemesh.api.replies import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
)
from edgemesh.api.sse import ChatChunks, ChunkEvents, CompletionChunks, Ending, Events, Head
from edgemesh.wire.messages import Logprob


class Part(msgspec.Struct, frozen=True):
    """One choice of a whole answer, told by its events; what is None was not asked for."""

    index: int
    told: Sequence[Event]
    ending: Ending
    logprobs: Sequence[Logprob] | None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw | None = None
    """As JSON already: the choices of a prompt share it."""

    prompt: Shown = Shown()
    """What is shown of its prompt's log-probabilities."""

    offset: int = 0
    """Characters of the text that are the prompt's, echoed."""

    @property
    def message(self) -> Message:
        """The events put together."""
        return gather(self.told)


T = TypeVar("T")


def _set(value: T | None) -> T | UnsetType:
    """A field that is left out of the answer where there is nothing to say."""
    return UNSET if value is None else value


def _ids(part: Part) -> list[int] | UnsetType:
    """Its prompt's tokens, which are JSON already."""
    return cast("list[int] | UnsetType", _set(part.prompt_token_ids))


class Form(Protocol):
    """How one endpoint's answers look."""

    def head(self, name: str, created: int, model: str) -> Head:
        """What each chunk of a stream begins with."""

    def events(self, head: Head, *, include_usage: bool) -> Events:
        """The events of a streamed answer."""

    def opening(self, prompt: int) -> str:
        """Text before a choice's own: the prompt, where it is echoed."""

    def logprobs(self, entries: Sequence[Logprob], offset: int) -> ChatLogprobs | CompletionLogprobs:
        """Log-probabilities of text that begins at character ``offset``."""

    def reply(self, head: Head, parts: Sequence[Part], usage: Usage) -> bytes:
        """The body of a whole answer."""


def _assistant(message: Message) -> AssistantMessage:
    silent = not message.content and bool(message.reasoning or message.calls)
    return AssistantMessage(
        content=None if silent else message.content,
        reasoning_content=message.reasoning or UNSET,
        tool_calls=list(message.calls) or UNSET,
    )


class ChatForm:
    """``/v1/chat/completions``.

    ``metadata`` is the client's own, said back in a whole answer; ``opening`` the message that is continued, where it is echoed.
    """

    def __init__(self, pieces: Pieces, *, metadata: dict[str, str] | None = None, opening: str = "") -> None:
        self._pieces = pieces
        self._metadata = metadata
        self._opening = opening

    def head(self, name: str, created: int, model: str) -> Head:
        """What each chunk begins with."""
        return Head(name, "chat.completion.chunk", created, model)

    def events(self, head: Head, *, include_usage: bool) -> Events:
        """The events of a streamed answer."""
        make = partial(ChatChunks, head, include_usage=include_usage)
        return ChunkEvents(head, make, include_usage=include_usage)

    def opening(self, prompt: int) -> str:
        """The message that is continued, where it is echoed."""
        del prompt
        return self._opening

    def shown(self, prompt: int, scores: PromptScores, table: int, echo: int) -> Shown:
        """The prompt's log-probabilities; a chat echoes none."""
        del prompt, echo
        return Shown(prompt_table(scores, table, self._pieces) if table >= 0 else None)

    def logprobs(self, entries: Sequence[Logprob], offset: int) -> ChatLogprobs:
        """Log-probabilities in the chat form, which has no offsets."""
        del offset
        return chat_logprobs(entries, self._pieces)

    def reply(self, head: Head, parts: Sequence[Part], usage: Usage) -> bytes:
        """The whole answer."""
        choices = [
            ChatChoice(
                index=part.index,
                message=_assistant(part.message),
                logprobs=None if part.logprobs is None else self.logprobs(part.logprobs, 0),
                finish_reason=part.ending.reason,
                stop_reason=part.ending.stop_reason,
                token_ids=_set(part.token_ids),
            )
            for part in parts
        ]
        answer = ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=choices,
            usage=usage,
            system_fingerprint=head.system_fingerprint,
            service_tier=head.service_tier,
            metadata=_set(self._metadata),
            prompt_token_ids=_ids(parts[0]),
            prompt_logprobs=_set(parts[0].prompt.table),
        )
        return msgspec.json.encode(answer)


class CompletionForm:
    """``/v1/completions``; ``echoes`` are the prompts' texts where they are echoed."""

    def __init__(self, pieces: Pieces, echoes: Sequence[str] = ()) -> None:
        self._pieces = pieces
        self._echoes = echoes

    def head(self, name: str, created: int, model: str) -> Head:
        """What each chunk begins with."""
        return Head(name, "text_completion", created, model)

    def events(self, head: Head, *, include_usage: bool) -> Events:
        """The events of a streamed answer."""
        make = partial(CompletionChunks, head, include_usage=include_usage)
        return ChunkEvents(head, make, include_usage=include_usage)

    def opening(self, prompt: int) -> str:
        """The echoed prompt."""
        return self._echoes[prompt] if self._echoes else ""

    def shown(self, prompt: int, scores: PromptScores, table: int, echo: int) -> Shown:
        """The prompt's log-probabilities in both forms."""
        return Shown(
            prompt_table(scores, table, self._pieces) if table >= 0 else None,
            echo_columns(scores, echo, self._pieces, self.opening(prompt)) if echo >= 0 else None,
        )

    def logprobs(self, entries: Sequence[Logprob], offset: int) -> CompletionLogprobs:
        """Log-probabilities in the completion form."""
        return completion_logprobs(entries, self._pieces, offset)

    def reply(self, head: Head, parts: Sequence[Part], usage: Usage) -> bytes:
        """The whole answer."""
        choices = [
            CompletionChoice(
                index=part.index,
                text=part.message.content,
                logprobs=joined(part.prompt.echoed, self._own(part)),
                finish_reason=part.ending.reason,
                stop_reason=part.ending.stop_reason,
                token_ids=_set(part.token_ids),
                prompt_token_ids=_ids(part),
                prompt_logprobs=_set(part.prompt.table),
            )
            for part in parts
        ]
        answer = Completion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=choices,
            usage=usage,
            system_fingerprint=head.system_fingerprint,
        )
        return msgspec.json.encode(answer)

    def _own(self, part: Part) -> CompletionLogprobs | None:
        """Log-probabilities of what comes after the echo."""
        return None if part.logprobs is None else self.logprobs(part.logprobs, part.offset)
