"""The bodies of successful answers, as OpenAI's clients read them."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from edgemesh.api.tool_types import ToolCall


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A body, or a part of one."""


class PromptTokensDetails(Reply, frozen=True):
    """How much of the prompt was not computed again."""

    cached_tokens: int = 0
    audio_tokens: int = 0


class CompletionTokensDetails(Reply, frozen=True):
    """How much of the completion was thought, not said."""

    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(Reply, frozen=True):
    """What a request cost, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int = 0) -> Usage:
    """The usage of a request whose choices together drew ``completion_tokens``."""
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=reasoning_tokens),
    )


class TopLogprob(Reply, frozen=True):
    """A token that might have been drawn."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Reply, frozen=True):
    """The token that was drawn, and the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply, frozen=True):
    """A chat choice's log-probabilities."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Reply, frozen=True):
    """A completion choice's log-probabilities, a column each."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    """A token at one place of a prompt, as vLLM tells it; ``rank`` counts from 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptTable = list[dict[str, PromptLogprob] | None]
"""For each prompt token the entries of itself and of the likeliest ones, by token id; null for the first."""


class AssistantMessage(Reply, frozen=True):
    """What the model said; ``content`` is None where it only thought, or only called tools."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Reply, frozen=True):
    """One answer of a chat."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Reply, frozen=True):
    """The whole answer of a chat."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | None = None
    service_tier: str | UnsetType = UNSET
    metadata: dict[str, str] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptTable | UnsetType = UNSET


class CompletionChoice(Reply, frozen=True):
    """One answer of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptTable | UnsetType = UNSET


class Completion(Reply, frozen=True):
    """The whole answer of a completion."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None


class ModelCard(Reply, frozen=True):
    """The model that is served."""

    id: str
    created: int
    max_model_len: int | None
    object: Literal["model"] = "model"
    owned_by: str = "edgemesh"


class ModelList(Reply, frozen=True):
    """Every model that is served."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Tokenized(Reply, frozen=True):
    """The answer of ``/tokenize``."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None


class Detokenized(Reply, frozen=True):
    """The answer of ``/detokenize``."""

    prompt: str


class TokenizerInfo(Reply, frozen=True):
    """The answer of ``/tokenizer_info``: with it, ``/tokenize`` and ``/detokenize``, a client needs no tokenizer."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    model_max_length: int


class Healthy(Reply, frozen=True):
    """The answer of ``/health``."""

    status: Literal["ok", "unavailable"]
    reason: str


class GatewayLoad(Reply, frozen=True):
    """What one gateway process is answering."""

    gateway: str
    open_requests: int
    open_streams: int


class Load(Reply, frozen=True):
    """The answer of ``/load``; ``server_load`` is how many requests are open in all gateways."""

    server_load: int
    gateways: list[GatewayLoad]


class Version(Reply, frozen=True):
    """The answer of ``/version``."""

    version: str
