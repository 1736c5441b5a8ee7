"""The events of a streamed response."""

from __future__ import annotations

from edgemesh.api.replies import Reply
from edgemesh.api.responses_replies import Response, Said, SaidText, ThoughtSummary, ThoughtText


class ResponseEvent(Reply, frozen=True, tag_field="type"):
    """An event, and its number in the stream."""

    sequence_number: int


class Created(ResponseEvent, frozen=True, tag="response.created"):
    """The response has begun."""

    response: Response


class InProgress(ResponseEvent, frozen=True, tag="response.in_progress"):
    """The model works on it."""

    response: Response


class Completed(ResponseEvent, frozen=True, tag="response.completed"):
    """The whole response."""

    response: Response


class Incompleted(ResponseEvent, frozen=True, tag="response.incomplete"):
    """The whole response, which was cut."""

    response: Response


class Failed(ResponseEvent, frozen=True, tag="response.failed"):
    """The response as far as it came, and why it came no further."""

    response: Response


class ItemAdded(ResponseEvent, frozen=True, tag="response.output_item.added"):
    """An item begins."""

    output_index: int
    item: Said


class ItemDone(ResponseEvent, frozen=True, tag="response.output_item.done"):
    """The whole item."""

    output_index: int
    item: Said


class ItemEvent(ResponseEvent, frozen=True):
    """Something about an item that has begun."""

    item_id: str
    output_index: int


class PartAdded(ItemEvent, frozen=True, tag="response.content_part.added"):
    """A part begins, in a message or in reasoning."""

    part: SaidText | ThoughtText
    content_index: int = 0


class PartDone(ItemEvent, frozen=True, tag="response.content_part.done"):
    """The whole part."""

    part: SaidText | ThoughtText
    content_index: int = 0


class SaidDelta(ItemEvent, frozen=True, tag="response.output_text.delta"):
    """More of what the model says."""

    delta: str
    content_index: int = 0
    logprobs: tuple[()] = ()


class SaidDone(ItemEvent, frozen=True, tag="response.output_text.done"):
    """All that it said."""

    text: str
    content_index: int = 0
    logprobs: tuple[()] = ()


class ThoughtDelta(ItemEvent, frozen=True, tag="response.reasoning_text.delta"):
    """More of what the model thinks."""

    delta: str
    content_index: int = 0


class ThoughtDone(ItemEvent, frozen=True, tag="response.reasoning_text.done"):
    """All that it thought."""

    text: str
    content_index: int = 0


class SummaryAdded(ItemEvent, frozen=True, tag="response.reasoning_summary_part.added"):
    """A summary begins."""

    part: ThoughtSummary
    summary_index: int = 0


class SummaryPartDone(ItemEvent, frozen=True, tag="response.reasoning_summary_part.done"):
    """The whole summary."""

    part: ThoughtSummary
    summary_index: int = 0


class SummaryDelta(ItemEvent, frozen=True, tag="response.reasoning_summary_text.delta"):
    """More of the summary."""

    delta: str
    summary_index: int = 0


class SummaryDone(ItemEvent, frozen=True, tag="response.reasoning_summary_text.done"):
    """The summary's text."""

    text: str
    summary_index: int = 0


class ArgumentsDelta(ItemEvent, frozen=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(ItemEvent, frozen=True, tag="response.function_call_arguments.done"):
    """All arguments of a call."""

    name: str
    arguments: str


class CustomDelta(ItemEvent, frozen=True, tag="response.custom_tool_call_input.delta"):
    """More of the text that a custom tool is called with."""

    delta: str


class CustomDone(ItemEvent, frozen=True, tag="response.custom_tool_call_input.done"):
    """All of that text."""

    input: str


RESPONSE_EVENTS = (
    Created,
    InProgress,
    ItemAdded,
    PartAdded,
    SaidDelta,
    SaidDone,
    ThoughtDelta,
    ThoughtDone,
    SummaryAdded,
    SummaryDelta,
    SummaryDone,
    SummaryPartDone,
    PartDone,
    ArgumentsDelta,
    ArgumentsDone,
    CustomDelta,
    CustomDone,
    ItemDone,
    Completed,
    Incompleted,
    Failed,
)
"""All of them, about in the order in which they come."""
