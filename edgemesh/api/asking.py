"""A chat request to the prompt that its model reads, and to what is looked for in the answer."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from edgemesh.api.conversation import tool_names
from edgemesh.api.dialect import Dialect
from edgemesh.api.errors import ApiError, invalid
from edgemesh.api.openai import ChatRequest
from edgemesh.api.parser import Parsing
from edgemesh.api.reasoning import CLOSING, closed, closes, opens
from edgemesh.api.text import ModelText
from edgemesh.api.tool_texts import Texts, texts_of
from edgemesh.api.tool_types import NamedTool, Tool

EFFORTS: Final = {"none": 0, "minimal": 512, "low": 2048, "medium": 8192}
"""Tokens of reasoning that an effort is worth to a model whose template knows no efforts; a higher one has no bound."""


class Asked(msgspec.Struct, frozen=True):
    """The prompt's tokens, and what is looked for in the answer (None: nothing but content)."""

    ids: list[int]
    parsing: Parsing | None


def ask(text: ModelText, request: ChatRequest) -> Asked:
    """What the model is asked. Raises ``ApiError``, also for what this model cannot do."""
    dialect = text.dialect
    tools = offered(request)
    if tools and dialect.form is None and text.template is not None:
        message = '`tools` are not served: this server\'s `model.tool_parser` is "none"'
        raise invalid(message, "tools", "unsupported_parameter")
    if request.thinking_token_budget is not None and not dialect.thinks:
        message = (
            "`thinking_token_budget` is only allowed with a model that reasons, and this one's chat template knows none"
        )
        raise invalid(message, "thinking_token_budget", "unsupported_parameter")
    rendered = text.render(
        request.messages,
        add_generation_prompt=request.add_generation_prompt is not False,
        kwargs=_kwargs(text, request),
        documents=request.documents,
        continue_final_message=request.continue_final_message is True,
        tools=tools,
    )
    thinks = _thinks(dialect, request, rendered)
    budget = _budget(text, request)
    if thinks and budget == 0:
        rendered, thinks = closed(rendered), False
    ids = text.encode(rendered, add_special_tokens=request.add_special_tokens is True, param="messages")
    if not (tools or thinks):
        return Asked(ids, None)
    budget = budget or 0
    parsing = Parsing(
        form=dialect.form or "hermes",
        tools=_callable(request, tools),
        most=1 if request.parallel_tool_calls is False or isinstance(request.tool_choice, NamedTool) else 0,
        thinks=thinks,
        opened=opens(rendered),
        thoughts=request.include_reasoning is not False,
        budget=budget,
        texts=texts_of(tools) if dialect.form == "qwen3_coder" else Texts(),
        closing=tuple(text.encode(CLOSING, add_special_tokens=False)) if budget else (),
    )
    return Asked(ids, parsing)


def offered(request: ChatRequest) -> list[Tool]:
    """The tools that the model is told of: none where it may call none."""
    return [] if request.tool_choice == "none" else request.tools or []


def _callable(request: ChatRequest, tools: list[Tool]) -> frozenset[str]:
    choice = request.tool_choice
    return frozenset((choice.function.name,) if isinstance(choice, NamedTool) else tool_names(tools))


def _thinks(dialect: Dialect, request: ChatRequest, rendered: str) -> bool:
    """Whether the answer may begin with reasoning: that of a message that goes on is over, unless it stands open."""
    if not dialect.thinks or closes(rendered):
        return False
    return opens(rendered) or request.continue_final_message is not True


def _budget(text: ModelText, request: ChatRequest) -> int | None:
    """The most tokens of reasoning: what was asked for, and what the effort is worth; None: any number."""
    asked, effort, template = request.thinking_token_budget, request.reasoning_effort, text.template
    worth = EFFORTS.get(effort) if effort is not None else None
    if worth is None or template is None or template.reads("reasoning_effort"):
        return asked
    return worth if asked is None else min(asked, worth)


def _kwargs(text: ModelText, request: ChatRequest) -> dict[str, Any] | None:
    """The template's variables, with the effort under the name by which this template knows it."""
    kwargs, effort, template = request.chat_template_kwargs, request.reasoning_effort, text.template
    if effort is None or template is None:
        return kwargs
    if template.reads("reasoning_effort"):
        return _joined(kwargs, "reasoning_effort", effort)
    if effort == "none" and template.reads("enable_thinking"):
        return _joined(kwargs, "enable_thinking", value=False)
    if effort == "none" or text.dialect.thinks:
        return kwargs
    raise _no_effort()


def _joined(kwargs: dict[str, Any] | None, name: str, value: object) -> dict[str, Any]:
    if kwargs is not None and kwargs.get(name, value) != value:
        message = f"`reasoning_effort` and `chat_template_kwargs.{name}` contradict each other; give one of them"
        raise invalid(message, "reasoning_effort")
    return (kwargs or {}) | {name: value}


def _no_effort() -> ApiError:
    message = '`reasoning_effort` is for models that reason, and this one does not; leave it out or give "none"'
    return invalid(message, "reasoning_effort", "unsupported_parameter")
