"""A conversation to the text that the model was trained on, by the model's own chat template.

The template is Jinja, rendered as ``transformers`` renders it (blocks trimmed, ``tojson`` without HTML escapes,
``raise_exception``, ``strftime_now``, loop controls, ``generation`` blocks), in jinja2's immutable sandbox, and within a
time and a size: every attribute, item and call in the template looks at the clock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Final

import jinja2
import msgspec
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgemesh.api.errors import ApiError, invalid, unprocessable
from edgemesh.api.extent import PART_CONTAINERS, PART_VALUES, within
from edgemesh.api.openai import ChatMessage
from edgemesh.api.tool_types import Tool
from edgemesh.api.turns import merged, text_of

MAX_RENDER_NS: Final = 2_000_000_000
MAX_RENDER_CHARS: Final = 16 << 20

MARK: Final = "\ue0cf\ue0d0"
"""Stands for the end of a message that is to be continued, until that is found in the rendered text."""

Clock = Callable[[], int]
_deadline: ContextVar[int] = ContextVar("deadline")


class _TooLongError(Exception):
    """The template ran past its deadline or its size."""


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said; when rendering a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it as a class attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundedSandbox(ImmutableSandboxedEnvironment):
    """The sandbox, with a clock that a template cannot escape."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self._clock = clock

    def _tick(self) -> None:
        if self._clock() > _deadline.get():
            message = "it took too long"
            raise _TooLongError(message)

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401 - as jinja2 has it
        self._tick()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:  # noqa: ANN401 - as jinja2 has it
        self._tick()
        return super().getitem(obj, argument)

    def call(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as jinja2 has it
        self._tick()
        return super().call(*args, **kwargs)


class ChatTemplate:
    """One model's template, compiled once; ``render`` may be called from any thread.

    ``clock`` gives monotonic nanoseconds, ``now`` the wall time for ``strftime_now``. Raises ``ValueError`` for a
    source that is no template.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, clock: Clock, now: Callable[[], datetime]
    ) -> None:
        environment = _BoundedSandbox(clock)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
            self._reads = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            message = f"the model's chat template is not valid: {error}"
            raise ValueError(message) from error
        self._special_tokens = dict(special_tokens)
        self._clock = clock
        self.source = source

    def reads(self, variable: str) -> bool:
        """Whether the template looks at a variable of this name."""
        return variable in self._reads

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[dict[str, str]] | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
    ) -> str:
        """The prompt's text; with ``continue_final_message`` it ends where the last message's text does.

        Raises ``ApiError``: 422 where the template refuses, 400 where it exceeds its bounds or does not read ``documents``.
        """
        if documents and not self.reads("documents"):
            message = "`documents` are not read by this model's chat template; put them into a message"
            raise invalid(message, "documents")
        if continue_final_message:
            return self._continued(messages, kwargs, documents, tools)
        given = {
            "tools": [plain_tool(tool) for tool in tools] if tools else None,
            "documents": documents or None,
            "add_generation_prompt": add_generation_prompt,
            **self._special_tokens,
            **(kwargs or {}),
        }
        try:
            return self._shown(messages, given)
        except ApiError as error:
            fewer = merged(messages) if error.status == 422 else None
            if fewer is None:
                raise
            # Programs speak as the system in the middle, or twice; some templates know no such turns.
            try:
                return self._shown(fewer, given)
            except ApiError:
                raise error from None

    def _shown(self, messages: Sequence[ChatMessage], given: dict[str, Any]) -> str:
        try:
            return self._render([_plain(message) for message in messages], given)
        except ApiError as error:
            if error.status != 422 or not any(message.tool_calls for message in messages):
                raise
            # Some templates join a call's arguments to other text, and some walk through them.
            try:
                return self._render([_plain(message, texts=True) for message in messages], given)
            except ApiError:
                raise error from None

    def _render(self, messages: list[dict[str, Any]], given: dict[str, Any]) -> str:
        _deadline.set(self._clock() + MAX_RENDER_NS)
        try:
            return self._join(messages=messages, **given)
        except _TooLongError as error:
            message = f"the chat template could not render these messages: {error}"
            raise invalid(message, "messages") from error
        except SecurityError as error:
            message = f"the chat template did something unsafe: {error}"
            raise unprocessable(message, "messages") from error
        except jinja2.TemplateError as error:
            message = f"the chat template refused these messages: {error}"
            raise unprocessable(message, "messages") from error
        except ApiError:
            raise
        except Exception as error:
            # The template is a program of its own, and may fail in any way on messages that it did not expect.
            message = f"the chat template failed on these messages: {type(error).__name__}: {error}"[:500]
            raise unprocessable(message, "messages") from error

    def _continued(
        self,
        messages: Sequence[ChatMessage],
        kwargs: Mapping[str, Any] | None,
        documents: Sequence[dict[str, str]] | None,
        tools: Sequence[Tool] | None,
    ) -> str:
        """What stands before the end of the last message's text."""
        last = msgspec.structs.replace(messages[-1], content=text_of(messages[-1]) + MARK)
        rendered = self.render(
            [*messages[:-1], last], add_generation_prompt=False, kwargs=kwargs, documents=documents, tools=tools
        )
        before, mark, _ = rendered.rpartition(MARK)
        if not mark:
            message = "`continue_final_message`: this model's chat template does not show the text of the last message"
            raise invalid(message, "continue_final_message")
        return before

    def _join(self, **variables: Any) -> str:  # noqa: ANN401 - whatever the template reads
        pieces = []
        size = 0
        for piece in self._template.generate(**variables):
            size += len(piece)
            if size > MAX_RENDER_CHARS or self._clock() > _deadline.get():
                message = "they make too long a text" if size > MAX_RENDER_CHARS else "it took too long"
                raise _TooLongError(message)
            pieces.append(piece)
        return "".join(pieces)


def plain_tool(tool: Tool) -> dict[str, Any]:
    """A tool as models were trained to read it: ``strict`` is for the server."""
    plain: dict[str, Any] = msgspec.to_builtins(tool)
    plain["function"].pop("strict", None)
    return plain


def _plain(message: ChatMessage, *, texts: bool = False) -> dict[str, Any]:
    """What a template reads of a message: fields that are set, the content as one text.

    A call's arguments are an object where they are one, or as they were written with ``texts``.
    """
    plain: dict[str, Any] = msgspec.to_builtins(message)
    if not isinstance(message.content, str) and (message.content is not None or message.role == "assistant"):
        plain["content"] = text_of(message)
    if message.role == "developer":
        plain["role"] = "system"
    if thought := plain.pop("reasoning", None):
        plain["reasoning_content"] = thought
    for call in () if texts else plain.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return plain


def _arguments(text: str) -> Any:  # noqa: ANN401 - an object, or the text that is none
    if not within(text.encode(), PART_VALUES, PART_CONTAINERS):
        message = (
            f"the `arguments` of a call hold more than {PART_VALUES} values or {PART_CONTAINERS} objects and arrays"
        )
        raise invalid(message, "messages", "too_many_values")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _to_json(
    value: Any,  # noqa: ANN401 - whatever the template has
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
