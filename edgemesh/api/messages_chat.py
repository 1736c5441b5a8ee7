"""A request of ``/v1/messages`` to the chat that asks for the same."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final

import msgspec

from edgemesh.api.dialect import Dialect
from edgemesh.api.errors import ApiError, invalid
from edgemesh.api.messages import (
    AnyChoice,
    AutoChoice,
    Block,
    Choosing,
    ClientTool,
    CountTokensRequest,
    MessagesRequest,
    NoChoice,
    OutputConfig,
    Text,
    TextBlock,
    ThinkingBlock,
    ThinkingFree,
    ThinkingOff,
    ThinkingOn,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from edgemesh.api.translation import Translation, renames

_SHARED: Final = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "min_p",
    "ignore_eos",
    "priority",
    "session",
    "group",
    "request_id",
    "chat_template_kwargs",
)
"""Parameters that a chat has by the same name."""

_NAMES: Final = renames(
    (r"max_completion_tokens", "max_tokens"),
    (r"stop", "stop_sequences"),
    (r"user", "metadata.user_id"),
    (r"response_format(\.json_schema)?", "output_config.format"),
    (r"reasoning_effort", "output_config.effort"),
    (r"thinking_token_budget", "thinking.budget_tokens"),
    (r"continue_final_message", "messages"),
    (r"parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"tool_choice\.function", "tool_choice"),
    (r"(messages\[\d+\]\.content\[\d+\])\.tool_call_id", r"\1.tool_use_id"),
)
"""What a chat's parameters are called here."""

MAX_USER: Final = 128
PLAIN_EFFORT: Final = "high"
"""The effort of a request that names none, so that it asks nothing of a model that knows no efforts."""

FAILED: Final = "Error: "
"""What stands before the text of a tool that failed."""


def chat_of_messages(request: CountTokensRequest, dialect: Dialect) -> Translation:
    """The chat that asks the same of a model of this dialect. Raises ``ApiError``."""
    chat = {name: value for name in _SHARED if (value := getattr(request, name, None)) is not None}
    places, chat["messages"] = _messages(request)
    if chat["messages"][-1]["role"] == "assistant":
        # What the model is to say begins with this.
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(request, MessagesRequest):
        chat["max_completion_tokens"] = request.max_tokens
        if request.stop_sequences:
            chat["stop"] = request.stop_sequences
        if request.metadata is not None and request.metadata.user_id is not None:
            chat["user"] = _label(request.metadata.user_id)
    chat |= _output(request.output_config, dialect) | _thinking(request, dialect) | _tools(request)
    return Translation(chat, places, _NAMES)


Turns = list[tuple[str, dict[str, Any]]]
"""Turns of a chat, each with the place that it came from."""


def _messages(request: CountTokensRequest) -> tuple[list[str], list[dict[str, Any]]]:
    turns: Turns = []
    if request.system is not None:
        turns.append(("system", {"role": "system", "content": _text(request.system)}))
    for index, turn in enumerate(request.messages):
        place = f"messages[{index}]"
        if isinstance(turn.content, str):
            turns.append((place, {"role": turn.role, "content": turn.content}))
        elif turn.role == "assistant":
            turns.append((place, _said(turn.content, place)))
        else:
            turns += _given(turn.role, turn.content, place)
    return [place for place, _ in turns], [turn for _, turn in turns]


def _said(blocks: Sequence[Block], place: str) -> dict[str, Any]:
    """The assistant's turn."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                arguments = msgspec.json.encode(block.input).decode()
                function = {"name": block.name, "arguments": arguments}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                here = f"{place}.content[{index}]"
                raise _misplaced(here, "tool_result", "assistant")
    turn: dict[str, Any] = {"role": "assistant"}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if texts or not calls:
        turn["content"] = "\n".join(texts)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _given(role: str, blocks: Sequence[Block], place: str) -> Turns:
    """A user's turn: tools' results are turns of their own."""
    turns: Turns = []
    for index, block in enumerate(blocks):
        here = f"{place}.content[{index}]"
        match block:
            case TextBlock() if turns and turns[-1][1]["role"] == role:
                turns[-1][1]["content"] += "\n" + block.text
            case TextBlock():
                turns.append((here, {"role": role, "content": block.text}))
            case ToolResultBlock() if role == "user":
                content = (FAILED if block.is_error else "") + _text(block.content)
                turns.append((here, {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}))
            case ThinkingBlock() | ToolUseBlock() | ToolResultBlock():
                raise _misplaced(here, str(block.__struct_config__.tag), role)
    return turns


def _misplaced(place: str, kind: str, role: str) -> ApiError:
    param = f"{place}.type"
    allowed = {"user": "text and tool_result", "assistant": "text, thinking and tool_use", "system": "text"}[role]
    message = f"Invalid value for `{param}`: a message of the {role} may not hold {kind}, only {allowed}"
    return invalid(message, param, "invalid_value")


def _text(content: str | Sequence[Text]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _label(user: str) -> str:
    """A user's name no longer than a chat's may be."""
    return user if len(user) <= MAX_USER else sha256(user.encode()).hexdigest()


def _output(config: OutputConfig | None, dialect: Dialect) -> dict[str, Any]:
    chat: dict[str, Any] = {}
    if config is not None and config.format is not None:
        schema = {"name": "output", "schema": config.format.schema, "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if config is not None and config.effort is not None and (dialect.efforts or config.effort != PLAIN_EFFORT):
        chat["reasoning_effort"] = config.effort
    return chat


def _thinking(request: CountTokensRequest, dialect: Dialect) -> dict[str, Any]:
    chat: dict[str, Any] = {}
    thinking = request.thinking
    if isinstance(thinking, ThinkingOn | ThinkingFree) and thinking.display == "omitted":
        chat["include_reasoning"] = False
    match thinking:
        case ThinkingOn(budget_tokens=budget):
            most = request.max_tokens if isinstance(request, MessagesRequest) else None
            if most is not None and budget >= most:
                message = f"`thinking.budget_tokens` is {budget}; it must be less than `max_tokens`, which is {most}"
                raise invalid(message, "thinking.budget_tokens", "invalid_value")
            chat["thinking_token_budget"] = budget
        case ThinkingOff() if dialect.thinks:
            chat["thinking_token_budget"] = 0
        case _:
            pass
    return chat


def _tools(request: CountTokensRequest) -> dict[str, Any]:
    chat: dict[str, Any] = {}
    if request.tools:
        chat["tools"] = [_tool(tool) for tool in request.tools]
    match request.tool_choice:
        case ToolChoice(name=name):
            chat["tool_choice"] = {"type": "function", "function": {"name": name}}
        case AnyChoice():
            chat["tool_choice"] = "required"
        case AutoChoice():
            chat["tool_choice"] = "auto"
        case NoChoice():
            chat["tool_choice"] = "none"
        case None:
            pass
    if isinstance(request.tool_choice, Choosing) and request.tool_choice.disable_parallel_tool_use:
        chat["parallel_tool_calls"] = False
    return chat


def _described(tool: ClientTool) -> str | None:
    if not tool.input_examples:
        return tool.description
    examples = "\n".join(msgspec.json.encode(each).decode() for each in tool.input_examples)
    return "\n\n".join([*filter(None, [tool.description]), f"Examples of its input:\n{examples}"])


def _tool(tool: ClientTool) -> dict[str, Any]:
    fields = {
        "name": tool.name,
        "description": _described(tool),
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}
