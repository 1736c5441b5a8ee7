"""Tools for models whose chat template knows none: described in the system prompt, calls and their answers as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from edgemesh.api.chat import plain_tool
from edgemesh.api.openai import ChatMessage
from edgemesh.api.tool_types import FunctionCall, Tool, ToolForm
from edgemesh.api.turns import text_of

_CALL: Final[dict[ToolForm, str]] = {
    "hermes": '<tool_call>\n{"name": "the tool\'s name", "arguments": {"the argument\'s name": "its value"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=the tool's name>\n<parameter=the parameter's name>\nits value, as it is if it is a text,"
    " else as JSON\n</parameter>\n</function>\n</tool_call>",
    "llama": '{"name": "the tool\'s name", "parameters": {"the parameter\'s name": "its value"}}',
}


def with_tools(
    messages: Sequence[ChatMessage], tools: Sequence[Tool] | None, form: ToolForm, *, system: bool
) -> list[ChatMessage]:
    """The same conversation for a template that knows neither ``tools`` nor the role ``tool``.

    Without ``system`` the template has no such role either, and the first user's message begins with the description.
    """
    turns: list[ChatMessage] = []
    answers: list[str] = []
    for message in messages:
        if message.role == "tool":
            answers.append(f"<tool_response>\n{text_of(message)}\n</tool_response>")
            continue
        _answer(turns, answers)
        turns.append(_spoken(message, form))
    _answer(turns, answers)
    return _described(turns, description(tools, form), system=system) if tools else turns


def description(tools: Sequence[Tool], form: ToolForm) -> str:
    """What the model must know of the tools."""
    listed = "\n".join(json.dumps(plain_tool(tool), ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\nThese tools are at your disposal, each described by a line of JSON:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "To use one, write exactly this, with arguments that match its schema:\n"
        f"{_CALL[form]}\n"
        "What it returns comes back to you in <tool_response> tags. Without need of a tool, answer directly."
    )


def written(call: FunctionCall, form: ToolForm) -> str:
    """A call as the model writes it."""
    name = json.dumps(call.name)
    if form == "llama":
        return f'{{"name": {name}, "parameters": {call.arguments}}}'
    if form == "qwen3_coder":
        return _tagged(call)
    return f'<tool_call>\n{{"name": {name}, "arguments": {call.arguments}}}\n</tool_call>'


def _tagged(call: FunctionCall) -> str:
    """A call whose arguments have tags; what is no object has none."""
    try:
        found = msgspec.json.decode(call.arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        found = {}
    parts = [
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n</parameter>\n"
        for key, value in found.items()
    ]
    return f"<tool_call>\n<function={call.name}>\n{''.join(parts)}</function>\n</tool_call>"


def _spoken(message: ChatMessage, form: ToolForm) -> ChatMessage:
    """A message whose calls are part of its text."""
    if not message.tool_calls:
        return message
    parts = [text_of(message), *(written(call.function, form) for call in message.tool_calls)]
    return msgspec.structs.replace(message, content="\n".join(part for part in parts if part), tool_calls=None)


def _answer(turns: list[ChatMessage], answers: list[str]) -> None:
    """What tools returned, one after another, is one turn of the user."""
    if answers:
        turns.append(ChatMessage(role="user", content="\n".join(answers)))
        answers.clear()


def _described(turns: list[ChatMessage], text: str, *, system: bool) -> list[ChatMessage]:
    first = turns[0]
    if system and first.role in {"system", "developer"}:
        return [msgspec.structs.replace(first, content=f"{text_of(first)}\n\n{text}"), *turns[1:]]
    if system:
        return [ChatMessage(role="system", content=text), *turns]
    for index, turn in enumerate(turns):
        if turn.role == "user":
            merged = msgspec.structs.replace(turn, content=f"{text}\n\n{text_of(turn)}")
            return [*turns[:index], merged, *turns[index + 1 :]]
    return [ChatMessage(role="user", content=text), *turns]
