"""``/v1/responses``: every parameter, typed and bounded.

The server keeps nothing between requests: what would need a stored response is refused by its name.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from edgemesh.api.openai import AnyInteger, Label, Length, Metadata, Neutral
from edgemesh.api.responses_tools import AllowedTools, CustomChoice, FunctionChoice, ResponseTool, Setting
from edgemesh.api.tool_types import MAX_TOOLS, CallId, DirectCaller, FunctionName
from edgemesh.api.translation import Kind

ClientMetadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=4096)]], Meta(max_length=32)
]
"""What a client says of itself, for the traces."""

ItemId = Annotated[str, Meta(min_length=1, max_length=128)]
Status = Literal["in_progress", "completed", "incomplete"]


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """A piece of an item."""


class Breakpoint(Setting, frozen=True):
    """Where a prompt that may be kept ends; prompts are kept by themselves."""

    mode: Literal["explicit"]


class InputText(_Part, frozen=True, tag="input_text"):
    """A text for the model."""

    text: str
    prompt_cache_breakpoint: Breakpoint | None = None


class OutputText(_Part, frozen=True, tag="output_text"):
    """A text that a model gave; what stands beside it in an answer may be sent back empty."""

    text: str
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Meta(max_length=0)] | None = None


class ResultText(Setting, frozen=True):
    """A text that a function returned."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: Breakpoint | None = None


class ReasoningText(Setting, frozen=True):
    """What a model thought."""

    type: Literal["reasoning_text"]
    text: str


class SummaryText(Setting, frozen=True):
    """What a model thought, as its summary."""

    type: Literal["summary_text"]
    text: str


class MessageItem(_Part, frozen=True, tag="message"):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputText | OutputText], Meta(min_length=1, max_length=1024)]
    id: ItemId | None = None
    status: Status | None = None
    phase: None = None


NotAsync = Literal[False] | None
"""No answer goes on beside a call. Python's clients may name this as they do themselves, ``async_``."""


class CallItem(_Part, frozen=True, tag="function_call"):
    """A function that the model called."""

    name: FunctionName
    arguments: Annotated[str, Meta(max_length=1 << 24)]
    call_id: CallId
    namespace: FunctionName | None = None
    caller: DirectCaller | None = None
    async_: NotAsync = None
    is_async: NotAsync = msgspec.field(default=None, name="async")
    id: ItemId | None = None
    status: Status | None = None


class CustomCallItem(_Part, frozen=True, tag="custom_tool_call"):
    """A custom tool that the model called."""

    name: FunctionName
    input: Annotated[str, Meta(max_length=1 << 24)]
    call_id: CallId
    namespace: FunctionName | None = None
    caller: DirectCaller | None = None
    async_: NotAsync = None
    is_async: NotAsync = msgspec.field(default=None, name="async")
    id: ItemId | None = None
    status: Status | None = None


class OutputItem(_Part, frozen=True, tag="function_call_output"):
    """What a called function returned."""

    call_id: CallId
    output: str | Annotated[list[ResultText], Meta(min_length=1, max_length=1024)]
    name: FunctionName | None = None
    namespace: FunctionName | None = None
    caller: DirectCaller | None = None
    id: ItemId | None = None
    status: Status | None = None


class CustomOutputItem(OutputItem, frozen=True, tag="custom_tool_call_output"):
    """What a called custom tool returned."""


class ReasoningItem(_Part, frozen=True, tag="reasoning"):
    """What the model thought before it answered: sealed by this server, as a text, or as its summary."""

    id: ItemId | None = None
    summary: Annotated[list[SummaryText], Meta(max_length=1024)] = []
    content: Annotated[list[ReasoningText], Meta(max_length=1024)] | None = None
    status: Status | None = None
    encrypted_content: Annotated[str, Meta(max_length=1 << 24)] | None = None


Item = MessageItem | CallItem | OutputItem | CustomCallItem | CustomOutputItem | ReasoningItem


class PlainFormat(Setting, frozen=True, omit_defaults=True, tag_field="type", tag="text"):
    """Any text."""


class ObjectFormat(Setting, frozen=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class SchemaFormat(Setting, frozen=True, tag_field="type", tag="json_schema"):
    """JSON of a schema, which is enforced whatever ``strict`` says; ``description`` is for the client's own readers."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any]
    description: Annotated[str, Meta(max_length=4096)] | None = None
    strict: bool | None = None


class TextSetting(Setting, frozen=True):
    """The form of the answer's text."""

    format: PlainFormat | ObjectFormat | SchemaFormat = PlainFormat()
    verbosity: Any = None


class ReasoningSetting(Setting, frozen=True):
    """How much to think, and whether what was thought comes as a summary (which is all of it) or as a text."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "detailed"] | None = None
    generate_summary: Any = None
    context: Any = None
    mode: Any = None


class ResponseStreamOptions(Setting, frozen=True):
    """What a stream holds beside its events."""

    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Setting, frozen=True):
    """``/v1/responses``."""

    model: Annotated[str, Meta(max_length=512)]
    input: str | Annotated[list[Item], Meta(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: Length | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | CustomChoice | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextSetting | None = None
    reasoning: ReasoningSetting | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Meta(max_length=16)] | None = None
    metadata: Metadata | None = None
    client_metadata: ClientMetadata | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None

    seed: AnyInteger | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    session: Label | None = None
    group: Annotated[int, Meta(ge=0)] | None = None
    request_id: Label | None = None
    chat_template_kwargs: Annotated[dict[Label, Any], Meta(max_length=32)] | None = None

    store: Any = None
    background: Any = None
    background_options: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    truncation: Any = None
    top_logprobs: Any = None
    max_tool_calls: Any = None
    service_tier: Any = None
    prompt: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    context_management: Any = None
    moderation: Any = None
    access_programs: Any = None
    image: Any = None


RESPONSES_NEUTRAL: Final[dict[str, Neutral]] = {
    "ResponsesRequest": {
        "store": ((False,), "false"),
        "background": ((False,), "false"),
        "background_options": ((), "null"),
        "previous_response_id": ((), "null"),
        "conversation": ((), "null"),
        "truncation": (("disabled",), '"disabled"'),
        "top_logprobs": ((0,), "0"),
        "max_tool_calls": ((), "null"),
        "service_tier": (("auto", "default"), '"auto" or "default"'),
        "prompt": ((), "null"),
        "prompt_cache_retention": ((), "null"),
        "prompt_cache_options": ((), "null"),
        "context_management": ((), "null"),
        "moderation": ((), "null"),
        "access_programs": ((), "null"),
        "image": ((), "null"),
    },
    "ReasoningSetting": {
        "generate_summary": ((), "null"),
        "context": (("auto",), '"auto"'),
        "mode": (("standard",), '"standard"'),
    },
    "TextSetting": {"verbosity": (("medium",), '"medium"')},
}
"""Parameters of OpenAI's clients that nothing acts on: the values that ask for nothing, in words too."""


ALLOWED_TYPES: Final = {
    "input": "message, function_call, custom_tool_call, the output of either, and reasoning",
    "input.content": "input_text and output_text",
    "input.output": "input_text",
    "tools": "function, custom and namespace (tools that the server itself would run are not supported)",
    "tools.tools": "function and custom",
    "tools.format": "text and grammar",
    "tool_choice": "function, custom and allowed_tools",
    "tool_choice.tools": "function and custom",
    "text.format": "text, json_object and json_schema",
}
"""What the ``type`` inside a parameter may be."""


def normalise(body: Any) -> Any:  # noqa: ANN401 - any JSON
    """``body`` with the type that an item of ``input`` may leave out: it is a message then."""
    items = body.get("input") if isinstance(body, dict) else None
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and "role" in item:
            item.setdefault("type", "message")
    return body


RESPONSES: Final = Kind(RESPONSES_NEUTRAL, ALLOWED_TYPES, normalise)
"""What requests are decoded by."""
