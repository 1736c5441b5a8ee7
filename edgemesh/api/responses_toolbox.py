"""The tools of ``/v1/responses`` as a chat has them: functions all, each under one name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from edgemesh.api.errors import invalid
from edgemesh.api.responses_tools import (
    AllowedTools,
    CustomChoice,
    CustomTool,
    FunctionChoice,
    FunctionTool,
    GrammarInput,
    NamespaceTool,
    ResponseTool,
)
from edgemesh.api.tool_types import MAX_NAME, MAX_TOOLS
from edgemesh.api.translation import Renames, renames

INPUT: Final = "input"
"""The only argument of a function that stands for a custom tool."""

_JOINT: Final = "__"


class Known(msgspec.Struct, frozen=True):
    """One tool: where it stands in the request, and what it is called there."""

    place: str
    name: str
    custom: bool
    function: dict[str, Any]
    namespace: str | None = None


class Toolbox:
    """The tools of one request. Raises ``ApiError`` for too many of them, and for names that are too long together."""

    def __init__(self, tools: Sequence[ResponseTool]) -> None:
        self._known: dict[str, Known] = {}
        self.chat: list[dict[str, Any]] = []
        """What a chat asks for."""

        self.places: list[str] = []
        """Where each of those stands in the request."""

        self._forms: list[tuple[str, str]] = []
        for index, tool in enumerate(tools):
            place = f"tools[{index}]"
            if not isinstance(tool, NamespaceTool):
                self._add(place, tool, None)
                continue
            for at, inner in enumerate(tool.tools):
                self._add(f"{place}.tools[{at}]", inner, tool, first=at == 0)
        if len(self.chat) > MAX_TOOLS:
            message = f"`tools` holds {len(self.chat)} tools, those of its namespaces included; the most is {MAX_TOOLS}"
            raise invalid(message, "tools", "invalid_value")

    @property
    def names(self) -> Renames:
        """What a chat's parameters of custom tools are called."""
        return renames(*self._forms)

    def find(self, name: str) -> Known | None:
        """The tool that a chat knows by this name."""
        return self._known.get(name)

    def choose(self, choice: FunctionChoice | CustomChoice, param: str) -> str:
        """The chat's name of a tool that is chosen. Raises ``ApiError`` for one that is not there."""
        known = self._known.get(choice.name)
        if known is None or known.custom != isinstance(choice, CustomChoice):
            kind = "custom tool" if isinstance(choice, CustomChoice) else "function"
            message = f"`{param}` names the {kind} `{choice.name}`, which is not in `tools`"
            raise invalid(message, param, "invalid_value")
        return choice.name

    def allowed(self, choice: AllowedTools) -> list[dict[str, Any]]:
        """What a chat asks for where only some tools may be called: the others are not shown to the model."""
        return [self._known[self.choose(each, "tool_choice.tools")].function for each in choice.tools]

    def _add(
        self, place: str, tool: FunctionTool | CustomTool, space: NamespaceTool | None, *, first: bool = False
    ) -> None:
        name = tool.name if space is None else joined(space.name, tool.name)
        if len(name) > MAX_NAME:
            message = (
                f"`{place}.name` and its namespace have {len(name)} characters as `{name}`; the most is {MAX_NAME}"
            )
            raise invalid(message, f"{place}.name", "invalid_value")
        about = [space.description] if space is not None and first else []
        function = _custom(tool, about) if isinstance(tool, CustomTool) else _function(tool, about)
        chat = {"type": "function", "function": {"name": name} | function}
        known = Known(place, tool.name, isinstance(tool, CustomTool), chat, None if space is None else space.name)
        self._known.setdefault(name, known)
        self.chat.append(chat)
        self.places.append(place)
        if known.custom:
            self._forms.append((re.escape(f"{place}.parameters"), f"{place}.format.definition"))


def joined(namespace: str | None, name: str) -> str:
    """What a chat calls a tool of a namespace."""
    return name if namespace is None else namespace + _JOINT + name


def _function(tool: FunctionTool, about: list[str]) -> dict[str, Any]:
    fields = {
        "description": _described([*about, tool.description]),
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _custom(tool: CustomTool, about: list[str]) -> dict[str, Any]:
    """A function of one text; one whose form is given keeps to it."""
    text: dict[str, Any] = {"type": "string", "description": "The tool's whole input, as free text."}
    texts = [*about, tool.description]
    if isinstance(tool.format, GrammarInput):
        text["pattern"] = f"^(?:{tool.format.definition})$"
        texts.append(f"Its input matches the regular expression {tool.format.definition}")
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    function: dict[str, Any] = {"parameters": schema, "strict": isinstance(tool.format, GrammarInput)}
    described = _described(texts)
    return function if described is None else function | {"description": described}


def _described(texts: Sequence[str | None]) -> str | None:
    return "\n\n".join(text for text in texts if text) or None
