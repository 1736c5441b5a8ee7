"""What the turns of a conversation and its tools must be to each other."""

from __future__ import annotations

from collections.abc import Sequence

from edgemesh.api.errors import ApiError, invalid
from edgemesh.api.openai import ChatMessage, ChatRequest, TokenizeRequest
from edgemesh.api.tool_types import NamedTool, Tool

_SHOWN = 128


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raise ``ApiError`` (400) for a message whose fields do not go together, or that answers a call nobody made."""
    called: set[str] = set()
    for index, message in enumerate(messages):
        _check_fields(message, f"messages[{index}]")
        called.update(call.id for call in message.tool_calls or ())
        if message.tool_call_id is not None and message.tool_call_id not in called:
            text = (
                f"`messages[{index}].tool_call_id` is {message.tool_call_id[:_SHOWN]!r}: a message of role `tool` must"
                " answer a call in the `tool_calls` of a message before it"
            )
            raise invalid(text, f"messages[{index}].tool_call_id", "invalid_value")


def check_tools(request: ChatRequest | TokenizeRequest) -> None:
    """Raise ``ApiError`` (400) for tools of one name or without an object of arguments, and for a choice of none of them."""
    names = tool_names(request.tools)
    for index, tool in enumerate(request.tools or ()):
        if tool.function.name in names[:index]:
            param = f"tools[{index}].function.name"
            message = (
                f"`{param}` is {tool.function.name!r}, the name of another tool; each tool needs a name of its own"
            )
            raise invalid(message, param, "invalid_value")
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            param = f"tools[{index}].function.parameters"
            message = f"`{param}` is a schema of type {str(kind)[:_SHOWN]!r}; a tool's arguments are an object"
            raise invalid(message, param, "invalid_schema")
    choice = request.tool_choice if isinstance(request, ChatRequest) else None
    if choice in {None, "none"} or (isinstance(choice, NamedTool) and choice.function.name in names):
        return
    if not names:
        message = "`tool_choice` is only allowed with `tools`"
        raise invalid(message, "tool_choice", "invalid_value")
    if isinstance(choice, NamedTool):
        message = f"`tool_choice` names {choice.function.name!r}, which is not one of the `tools`"
        raise invalid(message, "tool_choice.function.name", "invalid_value")


def tool_names(tools: Sequence[Tool] | None) -> tuple[str, ...]:
    """The names of the tools, in order."""
    return tuple(tool.function.name for tool in tools or ())


def _check_fields(message: ChatMessage, param: str) -> None:
    role = message.role
    if message.tool_calls and role != "assistant":
        raise _misplaced(param, "tool_calls", "assistant", role)
    if message.tool_call_id is not None and role != "tool":
        raise _misplaced(param, "tool_call_id", "tool", role)
    if role == "tool" and message.tool_call_id is None:
        text = f"Missing required parameter: `{param}.tool_call_id`: it says which call the message answers"
        raise invalid(text, f"{param}.tool_call_id", "missing_required_parameter")
    thoughts = (message.reasoning, message.reasoning_content)
    if None not in thoughts and thoughts[0] != thoughts[1]:
        text = f"give `{param}.reasoning_content` or `{param}.reasoning`, not two that differ"
        raise invalid(text, f"{param}.reasoning", "invalid_value")
    if message.content is None and not (role == "assistant" and (message.tool_calls or any(thoughts))):
        text = f"Invalid value for `{param}.content`: a `{role}` message needs a text"
        raise invalid(text, f"{param}.content", "invalid_value")


def _misplaced(param: str, field: str, allowed: str, role: str) -> ApiError:
    text = f"`{param}.{field}` is only allowed in a message of role `{allowed}`, and this one's is `{role}`"
    return invalid(text, f"{param}.{field}", "invalid_value")
