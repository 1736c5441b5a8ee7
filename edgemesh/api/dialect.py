"""How one model is told of tools, how it calls them, and whether it thinks: found in its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from edgemesh.api.chat import ChatTemplate
from edgemesh.api.errors import ApiError
from edgemesh.api.openai import ChatMessage
from edgemesh.api.reasoning import OPEN as THINK
from edgemesh.api.tool_prompt import with_tools
from edgemesh.api.tool_types import Function, FunctionCall, Tool, ToolCall, ToolForm
from edgemesh.api.tools import OPEN as TOOL_CALL
from edgemesh.api.tools import PYTHON_TAG
from edgemesh.api.tools_coder import FUNCTION

ToolParser = Literal["auto", "hermes", "llama", "qwen3_coder", "none"]
ReasoningParser = Literal["auto", "think", "none"]

_NAME: Final = "probe_tool"
_ANSWER: Final = "probe_answer"
_VALUE: Final = "probe_value"
_LLAMA: Final = '"parameters": '
_USER: Final = ChatMessage(role="user", content="x")
_TOOL: Final = Tool(
    type="function",
    function=Function(name=_NAME, description="x", parameters={"type": "object", "properties": {}}),
)
_CALL: Final = ChatMessage(
    role="assistant",
    tool_calls=[ToolCall(id="probe0000", function=FunctionCall(name=_NAME, arguments=f'{{"x": "{_VALUE}"}}'))],
)
_TURNS: Final = (_USER, _CALL, ChatMessage(role="tool", tool_call_id="probe0000", name=_NAME, content=_ANSWER))


class Dialect(msgspec.Struct, frozen=True):
    """One model's ways.

    ``form`` is how it calls tools (None: tools are refused); ``native``: its template tells it of them, else the server
    does, in the first message of a ``system`` role or of the user. ``thinks``: it may begin with reasoning. ``efforts``: how
    much it thinks can be asked for.
    """

    form: ToolForm | None = None
    native: bool = False
    system: bool = True
    thinks: bool = False
    efforts: bool = False

    def messages(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None) -> Sequence[ChatMessage]:
        """The conversation as this model's template can show it."""
        if self.native or not (tools or any(each.tool_calls or each.role == "tool" for each in messages)):
            return messages
        return with_tools(messages, tools, self.form or "hermes", system=self.system)

    def tools(self, tools: Sequence[Tool] | None) -> Sequence[Tool] | None:
        """The tools that the template itself is given."""
        return tools if self.native else None


def dialect_of(
    template: ChatTemplate | None, tools: ToolParser = "auto", reasoning: ReasoningParser = "auto"
) -> Dialect:
    """What the template shows of a model's ways; ``tools`` and ``reasoning`` say what it cannot show."""
    if template is None:
        return Dialect()
    known = _form(template.source)
    form = (known or "hermes") if tools == "auto" else None if tools == "none" else tools
    thinks = reasoning == "think" or (reasoning == "auto" and THINK in template.source)
    return Dialect(
        form=form,
        native=form is not None and form == known and _tells(template),
        system=_has_system(template),
        thinks=thinks,
        efforts=thinks or template.reads("reasoning_effort"),
    )


def _form(source: str) -> ToolForm | None:
    """The form of calls that a template's own words ask for."""
    if TOOL_CALL in source:
        return "qwen3_coder" if FUNCTION in source else "hermes"
    return "llama" if PYTHON_TAG in source or _LLAMA in source else None


def _tells(template: ChatTemplate) -> bool:
    """Whether the template shows tools, calls and what came of them."""
    asked = _try(template, [_USER], {"tools": [_TOOL]})
    shown = _try(template, _TURNS, {"tools": [_TOOL]})
    return _NAME in asked and _ANSWER in shown and _VALUE in shown


def _has_system(template: ChatTemplate) -> bool:
    shown = _try(template, [ChatMessage(role="system", content=_VALUE), _USER], {})
    return _VALUE in shown


def _try(template: ChatTemplate, messages: Sequence[ChatMessage], given: Mapping[str, Any]) -> str:
    try:
        return template.render(messages, **given)
    except ApiError:
        return ""
