"""A request of another API as a chat: what was asked, and the way back for what is said about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from edgemesh.api.decode import check_decoded, check_extent, refuse_unsupported, refusing
from edgemesh.api.errors import ApiError, invalid
from edgemesh.api.openai import ChatRequest, Neutral

T = TypeVar("T", bound=msgspec.Struct)

Renames = tuple[tuple[re.Pattern[str], str], ...]
"""Beginnings of parameters' names, and what stands there instead, in the order in which they are tried."""

_NAMED: Final = re.compile(r"`([^`]+)`")
_INDEX: Final = re.compile(r"\[\d+\]")
_TOOL: Final = re.compile(r"tools\[(\d+)\]\.function")
_MESSAGE: Final = re.compile(r"messages\[(\d+)\]")


class Kind(msgspec.Struct, frozen=True):
    """What an API's requests are decoded by.

    ``neutral`` are the parameters that nothing acts on, by struct; ``allowed`` says what the ``type`` inside a
    parameter may be; ``normalise`` may add to the JSON what the API lets clients leave out.
    """

    neutral: Mapping[str, Neutral]
    allowed: Mapping[str, str]
    normalise: Callable[[Any], Any] = lambda body: body


def request_of(body: bytes, kind: type[T], api: Kind) -> T:
    """The request that ``body`` holds. Raises ``ApiError`` (400)."""
    check_extent(body)
    try:
        with refusing():
            request: T = msgspec.convert(api.normalise(msgspec.json.decode(body)), kind)
    except ApiError as error:
        raise _explained(error, api.allowed) from error
    _refuse(request, "", api.neutral)
    return request


def _refuse(part: msgspec.Struct, prefix: str, neutral: Mapping[str, Neutral]) -> None:
    refuse_unsupported(part, prefix, neutral)
    for field in part.__struct_fields__:
        inner = getattr(part, field)
        if isinstance(inner, msgspec.Struct):
            _refuse(inner, f"{prefix}{field}.", neutral)


def _explained(error: ApiError, allowed: Mapping[str, str]) -> ApiError:
    """A refused ``type``, with those that are allowed."""
    param = error.detail.param or ""
    types = allowed.get(_INDEX.sub("", param.removesuffix(".type"))) if param.endswith(".type") else None
    return error if types is None else invalid(f"{error.detail.message}; allowed are {types}", param, error.detail.code)


class Translation(msgspec.Struct, frozen=True):
    """``chat`` is the JSON of a chat; ``places`` says for each of its messages what it was made of, ``tools`` for each tool."""

    chat: dict[str, Any]
    places: Sequence[str]
    names: Renames
    tools: Sequence[str] = ()

    def request(self) -> ChatRequest:
        """The chat. Raises ``ApiError`` (400)."""
        with refusing():
            request = msgspec.convert(self.chat, ChatRequest)
        check_decoded(request)
        return request

    def back(self, error: ApiError) -> ApiError:
        """A refusal of the chat, in the words of the API that the request came by."""
        detail = error.detail
        found = ApiError(
            error.status,
            _NAMED.sub(lambda found: f"`{self.name(found[1])}`", detail.message),
            kind=detail.type,
            param=None if detail.param is None else self.name(detail.param),
            code=detail.code,
            retry_after_s=error.retry_after_s,
        )
        found.excess = error.excess
        return found

    def name(self, name: str) -> str:
        """What a parameter of the chat is called in the request."""
        found = _MESSAGE.match(name)
        if found is not None and int(found[1]) < len(self.places):
            name = self.places[int(found[1])] + name[found.end() :]
        found = _TOOL.match(name)
        if found is not None and int(found[1]) < len(self.tools):
            name = self.tools[int(found[1])] + name[found.end() :]
        for pattern, instead in self.names:
            name = pattern.sub(instead, name)
        return name


def renames(*pairs: tuple[str, str]) -> Renames:
    """Patterns of whole parameters (or of those whose parts are meant) and what they are called elsewhere."""
    return tuple((re.compile(rf"\A{pattern}(?=[.\[]|\Z)"), instead) for pattern, instead in pairs)
