"""The tools of ``/v1/responses``, and which of them are called."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from edgemesh.api.formats import Regex
from edgemesh.api.tool_types import MAX_TOOLS, FunctionName

Description = Annotated[str, Meta(max_length=1 << 16)]


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A parameter of several fields."""


class _Tool(Setting, frozen=True, kw_only=True, tag_field="type"):
    """What the model may call, and is told of at once."""

    allowed_callers: Annotated[list[Literal["direct"]], Meta(max_length=1)] | UnsetType | None = UNSET
    defer_loading: Literal[False] | UnsetType | None = UNSET
    is_async: Literal[False] | UnsetType | None = msgspec.field(default=UNSET, name="async")


class FunctionTool(_Tool, frozen=True, kw_only=True, tag="function"):
    """A function that the model may call."""

    name: FunctionName
    description: Description | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: UnsetType | None = UNSET


class TextInput(Setting, frozen=True, tag_field="type", tag="text"):
    """Any text."""


class GrammarInput(Setting, frozen=True, tag_field="type", tag="grammar"):
    """A text that a regular expression (Rust's ``regex``) matches as a whole."""

    syntax: Literal["regex"]
    definition: Regex


class CustomTool(_Tool, frozen=True, kw_only=True, tag="custom"):
    """A tool that the model calls with a text."""

    name: FunctionName
    description: Description | None = None
    format: TextInput | GrammarInput | None = None


class NamespaceTool(Setting, frozen=True, tag_field="type", tag="namespace"):
    """Tools under one name: the model reads ``namespace__tool``, and a call says both."""

    name: FunctionName
    description: Description
    tools: Annotated[list[FunctionTool | CustomTool], Meta(min_length=1, max_length=MAX_TOOLS)]


ResponseTool = FunctionTool | CustomTool | NamespaceTool


class FunctionChoice(Setting, frozen=True, tag_field="type", tag="function"):
    """The function that must be called."""

    name: FunctionName


class CustomChoice(Setting, frozen=True, tag_field="type", tag="custom"):
    """The custom tool that must be called."""

    name: FunctionName


class AllowedTools(Setting, frozen=True, tag_field="type", tag="allowed_tools"):
    """Those of ``tools`` that may (auto) or of which one must (required) be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice | CustomChoice], Meta(min_length=1, max_length=MAX_TOOLS)]
