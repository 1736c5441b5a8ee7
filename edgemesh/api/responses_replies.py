"""The bodies of ``/v1/responses``: a response and the items of its output."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from edgemesh.api.replies import Reply, Usage
from edgemesh.api.responses import ReasoningSetting, ResponsesRequest, Status, TextSetting
from edgemesh.api.responses_tools import AllowedTools, CustomChoice, FunctionChoice, ResponseTool


class SaidText(Reply, frozen=True, tag_field="type", tag="output_text"):
    """A text that the model gave."""

    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


class ThoughtText(Reply, frozen=True, tag_field="type", tag="reasoning_text"):
    """What the model thought."""

    text: str


class ThoughtSummary(Reply, frozen=True, tag_field="type", tag="summary_text"):
    """What the model thought, as its summary."""

    text: str


class SaidItem(Reply, frozen=True, tag_field="type", tag="message"):
    """What the model said."""

    id: str
    status: Status
    content: tuple[SaidText, ...] = ()
    role: Literal["assistant"] = "assistant"


class ThoughtItem(Reply, frozen=True, tag_field="type", tag="reasoning"):
    """What the model thought before it answered."""

    id: str
    status: Status
    summary: tuple[ThoughtSummary, ...] = ()
    content: tuple[ThoughtText, ...] = ()
    encrypted_content: str | UnsetType = UNSET
    """All of it again, where ``include`` asked for that and the item is complete."""


class CalledItem(Reply, frozen=True, tag_field="type", tag="function_call"):
    """A function that the model called."""

    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""


class CustomCalledItem(Reply, frozen=True, tag_field="type", tag="custom_tool_call"):
    """A custom tool that the model called."""

    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str = ""


Said = SaidItem | ThoughtItem | CalledItem | CustomCalledItem


class InputDetails(Reply, frozen=True):
    """How much of the input was not computed again."""

    cached_tokens: int
    cache_write_tokens: Literal[0] = 0


class OutputDetails(Reply, frozen=True):
    """How much of the output was thought, not said."""

    reasoning_tokens: int


class ResponseUsage(Reply, frozen=True):
    """What a response cost, in tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(Reply, frozen=True):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"]


class Failure(Reply, frozen=True):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class Response(Reply, frozen=True):
    """The whole of a response, as far as it has come; most of it is what was asked for."""

    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: ReasoningSetting
    safety_identifier: str | None
    temperature: float
    text: TextSetting
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | CustomChoice | AllowedTools
    tools: list[ResponseTool]
    top_p: float
    user: str | None
    completed_at: int | None = None
    output: tuple[Said, ...] = ()
    usage: ResponseUsage | None = None
    error: Failure | None = None
    incomplete_details: Incomplete | None = None
    object: Literal["response"] = "response"
    background: Literal[False] = False
    max_tool_calls: None = None
    previous_response_id: None = None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    top_logprobs: Literal[0] = 0
    truncation: Literal["disabled"] = "disabled"


def begun(request: ResponsesRequest, name: str, created: int, model: str) -> Response:
    """The response to a request, before anything of its output."""
    return Response(
        id=name,
        created_at=created,
        model=model,
        status="in_progress",
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=request.reasoning or ReasoningSetting(),
        safety_identifier=request.safety_identifier,
        temperature=_or(request.temperature, 1.0),
        text=request.text or TextSetting(),
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_p=_or(request.top_p, 1.0),
        user=request.user,
    )


def usage_of(usage: Usage) -> ResponseUsage:
    """A chat's usage as a response tells it."""
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(reasoning_tokens=usage.completion_tokens_details.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
