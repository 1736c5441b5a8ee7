"""Every parameter of the endpoints, typed and bounded.

A field here is acted upon, or it is in ``NEUTRAL``: known to OpenAI's clients or to other servers, and accepted only
with a value that asks for nothing. Anything else is an unknown parameter, and refused by its name.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from edgemesh.api.formats import Choices, Grammar, Regex, ResponseFormat, Schema, StructuredOutputs
from edgemesh.api.tool_types import MAX_CALLS, MAX_TOOLS, CallId, Tool, ToolCall, ToolChoice

MAX_STOPS: Final = 16
MAX_CHOICES: Final = 256
"""Choices of one request: prompts times ``n``."""

TokenNumber = Annotated[int, Meta(ge=0, lt=1 << 31)]
AnyInteger = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""Prompt ids are checked against the vocabulary later, where the message can say how large it is."""

Length = Annotated[int, Meta(ge=1, le=1 << 20)]
LengthOrNone = Annotated[int, Meta(ge=0, le=1 << 20)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Stop = Annotated[str, Meta(min_length=1, max_length=512)]
Label = Annotated[str, Meta(max_length=128)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Salt = Annotated[str, Meta(min_length=1, max_length=1024)]
BadWord = Annotated[str, Meta(min_length=1, max_length=128)]
Document = dict[Label, Annotated[str, Meta(max_length=1 << 20)]]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream holds beside the text."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: bool | None = None


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What chat and completions share."""

    model: Annotated[str, Meta(max_length=512)]
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: AnyInteger | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[TokenNumber, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=1024)] | None
    ) = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenNumber], Meta(max_length=128)] | None = None
    allowed_token_ids: Annotated[list[TokenNumber], Meta(min_length=1, max_length=4096)] | None = None
    min_tokens: LengthOrNone | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    session: Label | None = None
    prompt_cache_key: Label | None = None
    group: Annotated[int, Meta(ge=0)] | None = None
    request_id: Label | None = None
    add_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=128)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    spaces_between_special_tokens: bool | None = None
    cache_salt: Salt | None = None
    session_id: Label | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    length_penalty: Any = None
    use_beam_search: Any = None
    watermarking: Any = None
    logprob_token_ids: Any = None
    logits_processors: Any = None
    repetition_detection: Any = None
    stream_interval: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None
    routed_experts_prompt_start: Any = None
    return_token_offsets: Any = None
    return_mm_kwargs: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None


class ContentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of a message; only text is served."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One turn of a conversation; ``reasoning`` is another name of ``reasoning_content``."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Meta(min_length=1, max_length=1024)] | None = None
    name: Label | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: CallId | None = None

    refusal: Any = None
    function_call: Any = None
    audio: Any = None
    annotations: Any = None


class ChatRequest(Request, frozen=True, kw_only=True):
    """``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    documents: Annotated[list[Document], Meta(max_length=256)] | None = None
    metadata: Metadata | None = None
    chat_template_kwargs: Annotated[dict[Label, Any], Meta(max_length=32)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None

    functions: Any = None
    function_call: Any = None
    chat_template: Any = None
    store: Any = None
    service_tier: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    moderation: Any = None
    return_prompt_text: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None


class CompletionRequest(Request, frozen=True, kw_only=True):
    """``/v1/completions``."""

    prompt: str | list[str | AnyInteger | list[AnyInteger]]
    max_tokens: LengthOrNone | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None

    suffix: Any = None
    prompt_embeds: Any = None
    thinking_token_budget: Any = None


class TokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``/tokenize``: a text, or a conversation as the chat template renders it."""

    model: Annotated[str, Meta(max_length=512)] | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Annotated[list[Document], Meta(max_length=256)] | None = None
    chat_template_kwargs: Annotated[dict[Label, Any], Meta(max_length=32)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``/detokenize``."""

    model: Annotated[str, Meta(max_length=512)] | None = None
    tokens: Annotated[list[AnyInteger], Meta(max_length=1 << 20)]
    skip_special_tokens: bool | None = None


Neutral = dict[str, tuple[tuple[Any, ...], str]]

_NEUTRAL: Final[Neutral] = {
    "length_penalty": ((1, 1.0), "1"),
    "use_beam_search": ((False,), "false"),
    "watermarking": ((False,), "false"),
    "logprob_token_ids": ((), "null"),
    "logits_processors": (([],), "an empty list"),
    "repetition_detection": ((), "null"),
    "stream_interval": ((1,), "1"),
    "kv_transfer_params": ((), "null"),
    "ec_transfer_params": ((), "null"),
    "vllm_xargs": (({},), "an empty object"),
    "routed_experts_prompt_start": ((0,), "0"),
    "return_token_offsets": ((False,), "false"),
    "return_mm_kwargs": ((True,), "true"),
    "guided_decoding_backend": ((), "null"),
    "guided_whitespace_pattern": ((), "null"),
}
NEUTRAL: Final[dict[str, Neutral]] = {
    "CompletionRequest": {
        **_NEUTRAL,
        "suffix": (("",), "an empty string"),
        "prompt_embeds": ((), "null"),
        "thinking_token_budget": ((-1,), "-1"),
    },
    "ChatRequest": {
        **_NEUTRAL,
        "functions": (([],), "an empty list"),
        "function_call": (("none",), '"none"'),
        "chat_template": ((), "null"),
        "store": ((False,), "false"),
        "service_tier": (("auto", "default"), '"auto" or "default"'),
        "modalities": ((["text"],), '["text"]'),
        "audio": ((), "null"),
        "prediction": ((), "null"),
        "verbosity": (("medium",), '"medium"'),
        "web_search_options": ((), "null"),
        "prompt_cache_retention": (("in_memory", "in-memory"), '"in_memory"'),
        "prompt_cache_options": ((), "null"),
        "moderation": ((), "null"),
        "return_prompt_text": ((False,), "false"),
        "mm_processor_kwargs": (({},), "an empty object"),
        "media_io_kwargs": (({},), "an empty object"),
    },
    "ChatMessage": {
        "refusal": ((), "null"),
        "function_call": ((), "null (`tool_calls` is what took its place)"),
        "audio": ((), "null"),
        "annotations": (([],), "an empty list"),
    },
}
"""Known parameters that nothing acts on, by struct: the values that ask for nothing (null always does), in words too."""
