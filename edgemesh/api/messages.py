"""``/v1/messages``, Anthropic's form: every parameter, typed and bounded.

``cache_control`` asks for what is done anyway: the beginning that a prompt shares with an earlier one is not computed
again.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from edgemesh.api.openai import MAX_STOPS, AnyInteger, Label, Length, Neutral, Stop
from edgemesh.api.tool_types import MAX_TOOLS, CallId, DirectCaller, FunctionName
from edgemesh.api.translation import Kind


class CacheControl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a prompt that may be kept ends."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A parameter of several fields."""


class Text(_Setting, frozen=True):
    """A text where nothing else may stand."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class _Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """A piece of a message."""

    cache_control: CacheControl | None = None


class TextBlock(_Block, frozen=True, tag="text"):
    """A text."""

    text: str
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class ThinkingBlock(_Block, frozen=True, tag="thinking"):
    """What the model thought; the signature is not looked at, for nothing here depends on who wrote it."""

    thinking: str
    signature: str = ""


class ToolUseBlock(_Block, frozen=True, tag="tool_use"):
    """A tool that the model used."""

    id: CallId
    name: FunctionName
    input: dict[str, Any]
    caller: DirectCaller | None = None
    toolset_name: None = None


class ToolResultBlock(_Block, frozen=True, tag="tool_result"):
    """What a used tool returned; one that failed says so before its text."""

    tool_use_id: CallId
    content: str | Annotated[list[Text], Meta(max_length=1024)] = ""
    is_error: bool = False
    toolset_name: None = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class Turn(_Setting, frozen=True):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Meta(min_length=1, max_length=1024)]


class ClientTool(_Setting, frozen=True):
    """A tool that the model may use, and that the client runs; arguments are always streamed as they come."""

    name: FunctionName
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: Annotated[str, Meta(max_length=1 << 16)] | None = None
    strict: bool | None = None
    input_examples: Annotated[list[dict[str, Any]], Meta(max_length=32)] | None = None
    eager_input_streaming: Literal[True] | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Meta(max_length=1)] | None = None
    defer_loading: Literal[False] | None = None
    cache_control: CacheControl | None = None


class Choosing(_Setting, frozen=True, kw_only=True, tag_field="type"):
    """Whether the model uses tools."""

    disable_parallel_tool_use: bool = False


class AutoChoice(Choosing, frozen=True, tag="auto"):
    """The model decides whether it uses a tool."""


class AnyChoice(Choosing, frozen=True, tag="any"):
    """The model must use a tool."""


class ToolChoice(Choosing, frozen=True, kw_only=True, tag="tool"):
    """The model must use this tool."""

    name: FunctionName


class NoChoice(_Setting, frozen=True, tag_field="type", tag="none"):
    """The model may use no tool."""


class ThinkingOn(_Setting, frozen=True, tag_field="type", tag="enabled"):
    """The model thinks first, for so many tokens at most; what it thinks may be left out of the answer."""

    budget_tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    display: Literal["summarized", "omitted"] | None = None


class ThinkingFree(_Setting, frozen=True, tag_field="type", tag="adaptive"):
    """The model thinks as it likes; what it thinks may be left out of the answer."""

    display: Literal["summarized", "omitted"] | None = None


class ThinkingOff(_Setting, frozen=True, tag_field="type", tag="disabled"):
    """The model does not think first."""


class SchemaOutput(_Setting, frozen=True):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(_Setting, frozen=True):
    """The form of the answer's text, and how much to think: ``high`` is as good as saying nothing."""

    format: SchemaOutput | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class AllTurns(_Setting, frozen=True):
    """Those of every turn."""

    type: Literal["all"]


class KeepThinking(_Setting, frozen=True):
    """Which turns' thoughts are kept: all, for what a model is shown of them is its chat template's business."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | AllTurns


class ContextManagement(_Setting, frozen=True):
    """What is done about a conversation before the model reads it: nothing may be asked for but to leave it whole."""

    edits: Annotated[list[KeepThinking], Meta(max_length=16)] = []


class Caller(_Setting, frozen=True):
    """Who asks: requests of one user are scheduled as one user's."""

    user_id: Annotated[str, Meta(max_length=512)] | None = None


class CountTokensRequest(_Setting, frozen=True, kw_only=True):
    """``/v1/messages/count_tokens``: what makes up a prompt."""

    model: Annotated[str, Meta(max_length=512)]
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=4096)]
    system: str | Annotated[list[Text], Meta(min_length=1, max_length=1024)] | None = None
    tools: Annotated[list[ClientTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoChoice | None = None
    thinking: ThinkingOn | ThinkingFree | ThinkingOff | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: Annotated[dict[Label, Any], Meta(max_length=32)] | None = None

    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """``/v1/messages``."""

    max_tokens: Length
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    metadata: Caller | None = None

    seed: AnyInteger | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    session: Label | None = None
    group: Annotated[int, Meta(ge=0)] | None = None
    request_id: Label | None = None

    service_tier: Any = None
    container: Any = None
    mcp_servers: Any = None
    inference_geo: Any = None
    diagnostics: Any = None


_PLACE: Final[Neutral] = {
    "speed": (("standard",), '"standard"'),
    "user_profile_id": ((), "null"),
    "workspace_id": ((), "null"),
}
MESSAGES_NEUTRAL: Final[dict[str, Neutral]] = {
    "CountTokensRequest": _PLACE,
    "MessagesRequest": {
        **_PLACE,
        "service_tier": (("auto", "standard_only"), '"auto" or "standard_only"'),
        "container": ((), "null"),
        "mcp_servers": (([],), "an empty list"),
        "inference_geo": ((), "null"),
        "diagnostics": ((), "null"),
    },
}
"""Parameters of Anthropic's clients that nothing acts on: the values that ask for nothing, in words too."""

ALLOWED_TYPES: Final = {
    "messages.content": "text, thinking, tool_use and tool_result",
    "messages.content.content": "text",
    "system": "text",
    "tools": "custom (tools that the server itself would run are not supported)",
    "tool_choice": "auto, any, tool and none",
    "thinking": "enabled, adaptive and disabled",
    "output_config.format": "json_schema",
    "context_management.edits": 'clear_thinking_20251015 with `keep` "all"',
    "context_management.edits.keep": "all",
}
"""What the ``type`` inside a parameter may be."""

MESSAGES: Final = Kind(MESSAGES_NEUTRAL, ALLOWED_TYPES)
"""What requests are decoded by."""
