"""A body's bytes to a typed request; every refusal names the parameter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import msgspec

from edgemesh.api.conversation import check_messages
from edgemesh.api.errors import ApiError, invalid, unsupported
from edgemesh.api.extent import MAX_CONTAINERS, MAX_VALUES, within
from edgemesh.api.openai import NEUTRAL, Neutral
from edgemesh.api.reasons import WHY

T = TypeVar("T", bound=msgspec.Struct)

_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<field>.*?)`(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(?P<field>.*?)`(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_WRONG: Final = re.compile(r"(?P<what>.*) - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`", re.DOTALL)
_SHOWN: Final = 200
"""Characters of a client's own text that an error repeats."""


class BodyDecoder:
    """Decodes the bodies of one endpoint. Raises ``ApiError`` (400)."""

    def __init__(self) -> None:
        self._decoders: dict[type[msgspec.Struct], msgspec.json.Decoder[Any]] = {}

    def decode(self, body: bytes, kind: type[T]) -> T:
        """The request that ``body`` holds."""
        check_extent(body)
        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = self._decoders[kind] = msgspec.json.Decoder(kind)
        with refusing():
            request: T = decoder.decode(body)
        check_decoded(request)
        return request


def check_extent(body: bytes) -> None:
    """Raise ``ApiError`` for a body that holds more values than are decoded in one go."""
    if not within(body):
        message = (
            f"the body holds more than {MAX_VALUES} values, or more than {MAX_CONTAINERS} objects and arrays,"
            " the most that a request may have"
        )
        raise invalid(message, None, "too_many_values")


def check_decoded(request: msgspec.Struct) -> None:
    """Raise ``ApiError`` for a parameter that nothing acts on, and for messages that are not a conversation."""
    refuse_unsupported(request, "")
    messages = getattr(request, "messages", None) or ()
    for index, each in enumerate(messages):
        refuse_unsupported(each, f"messages[{index}].")
    check_messages(messages)


@contextmanager
def refusing() -> Iterator[None]:
    """What msgspec says of a body becomes an ``ApiError`` (400)."""
    try:
        yield
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"the body is not valid JSON: {error}"
        raise invalid(message, None, "invalid_json") from error
    except RecursionError as error:
        message = "the body is nested too deeply"
        raise invalid(message, None, "invalid_json") from error


def _refusal(error: str) -> ApiError:
    """Msgspec's sentence as an OpenAI error body."""
    if match := _UNKNOWN.fullmatch(error):
        param = _join(match["path"], match["field"])
        return invalid(f"Unknown parameter: `{param}`", param, "unknown_parameter")
    if match := _MISSING.fullmatch(error):
        param = _join(match["path"], match["field"])
        return invalid(f"Missing required parameter: `{param}`", param, "missing_required_parameter")
    if match := _WRONG.fullmatch(error):
        param = match["path"][:_SHOWN]
        where = "a key of " if match["key"] else ""
        return invalid(f"Invalid value for {where}`{param}`: {match['what'][:_SHOWN]}", param, "invalid_value")
    return invalid(f"Invalid body: {error[:_SHOWN]}", None, "invalid_value")


def _join(path: str | None, field: str) -> str:
    return f"{path}.{field}"[:_SHOWN] if path else field[:_SHOWN]


def refuse_unsupported(part: msgspec.Struct, prefix: str, table: Mapping[str, Neutral] = NEUTRAL) -> None:
    """Raise ``ApiError`` for a parameter that asks for something, and on which nothing acts."""
    for field, (neutral, allowed) in table.get(type(part).__name__, {}).items():
        value = getattr(part, field)
        if value is not None and not any(value == each and type(value) is type(each) for each in neutral):
            raise unsupported(prefix + field, allowed, WHY.get(field, ""))
