"""Tools as clients describe them, and calls as models make them."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

MAX_TOOLS: Final = 128
MAX_CALLS: Final = 128
"""Calls of one assistant message."""

ToolForm = Literal["hermes", "llama", "qwen3_coder"]
"""How a model writes calls."""

MAX_NAME: Final = 128
"""Characters of a tool's name."""

FunctionName = Annotated[str, Meta(pattern=rf"^[a-zA-Z0-9_-]{{1,{MAX_NAME}}}(?![\s\S])")]
CallId = Annotated[str, Meta(min_length=1, max_length=128)]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What stands inside a request."""


class Function(Part, frozen=True, omit_defaults=True):
    """What a tool does: ``parameters`` is a JSON schema of its arguments; without one it takes none."""

    name: FunctionName
    description: Annotated[str, Meta(max_length=1 << 16)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Part, frozen=True):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionReference(Part, frozen=True):
    """The name of a tool that the request holds."""

    name: FunctionName


class NamedTool(Part, frozen=True):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionReference


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class FunctionCall(Part, frozen=True):
    """Which function, and its arguments as JSON text, as the model wrote them."""

    name: FunctionName
    arguments: Annotated[str, Meta(max_length=1 << 24)]


class ToolCall(Part, frozen=True):
    """One call of a tool."""

    id: CallId
    function: FunctionCall
    type: Literal["function"] = "function"


class DirectCaller(Part, frozen=True):
    """The model itself, which called a tool."""

    type: Literal["direct"]
