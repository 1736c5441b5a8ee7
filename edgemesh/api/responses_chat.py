"""A request of ``/v1/responses`` to the chat that asks for the same."""

from __future__ import annotations

import json
from typing import Any, Final

from edgemesh.api.errors import invalid
from edgemesh.api.responses import (
    CallItem,
    CustomCallItem,
    InputText,
    Item,
    MessageItem,
    ObjectFormat,
    OutputItem,
    OutputText,
    ReasoningItem,
    ResponsesRequest,
    ResultText,
    SchemaFormat,
    TextSetting,
)
from edgemesh.api.responses_sealed import unsealed
from edgemesh.api.responses_toolbox import INPUT, Toolbox, joined
from edgemesh.api.responses_tools import AllowedTools, CustomChoice, FunctionChoice
from edgemesh.api.translation import Translation, renames

_SHARED: Final = (
    "model",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "stream",
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "seed",
    "top_k",
    "min_p",
    "ignore_eos",
    "priority",
    "session",
    "group",
    "request_id",
    "chat_template_kwargs",
    "metadata",
)
"""Parameters that a chat has by the same name."""

_NAMES: Final = renames(
    (r"messages", "input"),
    (r"max_completion_tokens", "max_output_tokens"),
    (r"response_format(\.json_schema)?", "text.format"),
    (r"reasoning_effort", "reasoning.effort"),
    (r"tool_choice\.function", "tool_choice"),
    (r"(input\[\d+\])\.tool_call_id", r"\1.call_id"),
)
"""What a chat's parameters are called here."""


def chat_of_response(request: ResponsesRequest, box: Toolbox) -> Translation:
    """The chat that asks for the same, with the tools that are in the box. Raises ``ApiError``."""
    chat = {name: value for name in _SHARED if (value := getattr(request, name)) is not None}
    places, chat["messages"] = _messages(request)
    if request.max_output_tokens is not None:
        chat["max_completion_tokens"] = request.max_output_tokens
    if request.reasoning is not None and request.reasoning.effort is not None:
        chat["reasoning_effort"] = request.reasoning.effort
    if request.text is not None:
        chat["response_format"] = _format(request.text)
    # Where only some tools are allowed, a chat's tools are others than the box's.
    named = () if isinstance(request.tool_choice, AllowedTools) else box.places
    return Translation(chat | _tools(request, box), places, _NAMES + box.names, named)


def _messages(request: ResponsesRequest) -> tuple[list[str], list[dict[str, Any]]]:
    """Turns, and where each began: what the model thought, said and called in a row is one."""
    turns = _Turns()
    if request.instructions is not None:
        turns.add("instructions", {"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        turns.add("input", {"role": "user", "content": request.input})
        return turns.places, turns.turns
    for index, item in enumerate(request.input):
        turns.take(f"input[{index}]", item)
    if not turns.turns:
        message = "`input` says nothing; give at least one message"
        raise invalid(message, "input", "invalid_value")
    return turns.places, turns.turns


_ORDER: Final = ("reasoning_content", "content", "tool_calls")


class _Turns:
    """Makes turns of items."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self.turns: list[dict[str, Any]] = []

    def take(self, place: str, item: Item) -> None:
        """Add an item, to the last turn where it belongs there."""
        match item:
            case MessageItem(role="assistant"):
                self._assistant(place, "content")["content"] = _text(item.content)
            case MessageItem():
                self.add(place, {"role": item.role, "content": _text(item.content)})
            case ReasoningItem():
                if thoughts := _thoughts(place, item):
                    self._assistant(place, "reasoning_content")["reasoning_content"] = thoughts
            case CallItem():
                self._call(place, item, item.arguments)
            case CustomCallItem():
                self._call(place, item, json.dumps({INPUT: item.input}, ensure_ascii=False))
            case OutputItem():
                turn = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
                named = {} if item.name is None else {"name": joined(item.namespace, item.name)}
                self.add(place, turn | named)

    def add(self, place: str, turn: dict[str, Any]) -> dict[str, Any]:
        """A turn of its own."""
        self.places.append(place)
        self.turns.append(turn)
        return turn

    def _call(self, place: str, item: CallItem | CustomCallItem, arguments: str) -> None:
        function = {"name": joined(item.namespace, item.name), "arguments": arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        self._assistant(place, None).setdefault("tool_calls", []).append(call)

    def _assistant(self, place: str, field: str | None) -> dict[str, Any]:
        """The assistant's turn that gets ``field`` (None: a call): the last one, unless that is past it already."""
        last = self.turns[-1] if self.turns else {"role": ""}
        later = _ORDER[_ORDER.index(field) :] if field else ()
        if last["role"] == "assistant" and not any(each in last for each in later):
            return last
        return self.add(place, {"role": "assistant"})


def _thoughts(place: str, item: ReasoningItem) -> str:
    if item.encrypted_content is not None:
        return unsealed(item.encrypted_content, f"{place}.encrypted_content")
    return "\n".join(part.text for part in item.content or item.summary)


def _text(content: str | list[InputText | OutputText] | list[ResultText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _format(text: TextSetting) -> dict[str, Any]:
    match text.format:
        case SchemaFormat() as form:
            fields = {"name": form.name, "schema": form.schema, "description": form.description, "strict": form.strict}
            schema = {name: value for name, value in fields.items() if value is not None}
            return {"type": "json_schema", "json_schema": schema}
        case ObjectFormat():
            return {"type": "json_object"}
        case _:
            return {"type": "text"}


def _tools(request: ResponsesRequest, box: Toolbox) -> dict[str, Any]:
    tools, choice = box.chat, request.tool_choice
    chosen: Any = choice
    if isinstance(choice, AllowedTools):
        tools, chosen = box.allowed(choice), choice.mode
    elif isinstance(choice, FunctionChoice | CustomChoice):
        chosen = {"type": "function", "function": {"name": box.choose(choice, "tool_choice.name")}}
    return ({"tools": tools} if tools else {}) | ({} if chosen is None else {"tool_choice": chosen})
