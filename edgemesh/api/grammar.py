r"""What an output must be, as the source text that is compiled to masks: from a schema, a pattern, choices or a grammar.

A source is llguidance's: a JSON object ``{"grammars": [...]}``, or its dialect of Lark behind the line ``%llguidance {}``.

JSON comes out compact or laid out, as the model likes: between two of its tokens may stand nothing, a blank, or a new line with
its indentation, and no more, since small models would go on with white space for ever. In texts and names only ``\"``, ``\\``,
``\b``, ``\f``, ``\n``, ``\r`` and ``\t`` are escapes, so that no name can be spelled in two ways.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from edgemesh.api import gbnf
from edgemesh.api.errors import ApiError, invalid
from edgemesh.api.extent import PART_CONTAINERS, PART_VALUES, within
from edgemesh.api.formats import MAX_SCHEMA_CHARS, JsonObjectFormat, JsonSchemaFormat
from edgemesh.api.openai import Request
from edgemesh.api.schema import enforceable, refused

WHITESPACE: Final = r"[ ]|\n[ \t]{0,32}"
ESCAPES: Final = 'bfnrt"\\'
_OPTIONS: Final = {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": ESCAPES}
_ESCAPED: Final = re.compile(r"\\.|[/\n\r]", re.DOTALL)
_START: Final = re.compile(r"^[ \t]*start[ \t]*:(?!:)", re.MULTILINE)
LARK: Final = "%llguidance {}\n"
"""The first line of every source in Lark."""

MAX_SOURCE_CHARS: Final = 1 << 20


def schema_source(schema: Mapping[str, Any], param: str) -> str:
    """JSON that satisfies ``schema``, which the request gave as ``param``. Raises ``ApiError`` (400, ``invalid_schema``)."""
    return _grammar(json_schema=guided(schema, param))


def guided(schema: Mapping[str, Any], param: str) -> dict[str, Any]:
    """A schema as llguidance is to read it, also within ``%json {...}`` of a Lark grammar. Raises ``ApiError``."""
    size = len(_encoded(schema, param))
    if size > MAX_SCHEMA_CHARS:
        raise refused(param, (), f"it is {size} bytes of JSON; the most is {MAX_SCHEMA_CHARS}")
    return enforceable(schema, param) | {"x-guidance": _OPTIONS}


def object_source() -> str:
    """Any JSON object."""
    return _grammar(json_schema={"type": "object", "x-guidance": _OPTIONS})


def regex_source(pattern: str) -> str:
    """Text that ``pattern`` matches as a whole, in the syntax of Rust's ``regex`` (no look-around, no back references)."""
    return f"{LARK}start: /{_ESCAPED.sub(_spelled, pattern)}/"


def choice_source(choices: Sequence[str]) -> str:
    """One of these texts."""
    return f"{LARK}start: " + " | ".join(json.dumps(each) for each in choices)


def lark_source(text: str, param: str) -> str:
    """What a grammar produces: in llguidance's Lark from ``start``, or in GBNF from ``root``.

    Raises ``ApiError`` (400, ``invalid_grammar``) for a text that looks like GBNF and is none.
    """
    if text.startswith("%llguidance"):
        return text
    if "::=" not in text or _START.search(text):
        return LARK + text
    try:
        return LARK + gbnf.lark(text)
    except gbnf.GbnfError as error:
        raise unusable(param, f"it is no GBNF: {error}") from error


def unusable(param: str, why: str) -> ApiError:
    """400: no output can be made after what ``param`` says."""
    code = "invalid_schema" if _KINDS.get(param.rpartition(".")[2]) == "json" else "invalid_grammar"
    what = "schema" if code == "invalid_schema" else "grammar"
    return invalid(f"Invalid {what} in `{param}`: {why}", param, code)


def check_constraints(request: Request) -> None:
    """Raise ``ApiError`` (400) for two constraints, naming both, and for a ``structured_outputs`` without any."""
    asked = [name for name, _, _ in _asked(request)]
    if len(asked) > 1:
        message = f"`{asked[0]}` and `{asked[1]}` both say what the output must be; give one of them"
        raise invalid(message, asked[1], "conflicting_constraints")
    if request.structured_outputs is not None and not any(name.startswith("structured_outputs.") for name in asked):
        message = (
            "`structured_outputs` asks for nothing; give one of `json`, `regex`, `choice`, `grammar`, `json_object`"
        )
        raise invalid(message, "structured_outputs")


def weight(request: Request) -> int:
    """About how many characters of work ``constraint`` is."""
    return sum(len(msgspec.json.encode(value)) for _, _, value in _asked(request))


def constraint(request: Request) -> str:
    """The source of what a request wants its output to be, "" for anything.

    Raises ``ApiError`` (400, ``invalid_schema`` or ``invalid_grammar``) for what cannot be.
    """
    for param, kind, value in _asked(request):
        source = _source(param, kind, value)
        if len(source) > MAX_SOURCE_CHARS:
            raise unusable(param, f"it comes to {len(source)} characters; the most is {MAX_SOURCE_CHARS}")
        return source
    return ""


def _source(param: str, kind: str, value: Any) -> str:  # noqa: ANN401 - the parameter's type goes with its kind
    match kind:
        case "json":
            return schema_source(_schema(value, param), param)
        case "regex":
            return regex_source(value)
        case "choice":
            return choice_source(value)
    return lark_source(value, param)


def constrained_by(request: Request) -> str:
    """The parameter that says what the output must be, as errors name it; "" for none."""
    return next((name for name, _, _ in _asked(request)), "")


def _asked(request: Request) -> Iterator[tuple[str, str, Any]]:
    """Every constraint of a request: its parameter, its kind, and its value."""
    match request.response_format:
        case JsonObjectFormat():
            yield "response_format", "json", {"type": "object"}
        case JsonSchemaFormat(json_schema=named):
            yield "response_format.json_schema.schema", "json", named.schema
    outputs = request.structured_outputs
    if outputs is not None:
        for kind in ("json", "regex", "choice", "grammar"):
            if (value := getattr(outputs, kind)) is not None:
                yield f"structured_outputs.{kind}", kind, value
        if outputs.json_object:
            yield "structured_outputs.json_object", "json", {"type": "object"}
    for kind in ("json", "regex", "choice", "grammar"):
        if (value := getattr(request, f"guided_{kind}")) is not None:
            yield f"guided_{kind}", kind, value


def _schema(given: Mapping[str, Any] | str, param: str) -> Mapping[str, Any]:
    """The schema that was given as an object, or as its text."""
    if not isinstance(given, str):
        return given
    if not within(given.encode(), PART_VALUES, PART_CONTAINERS):
        raise refused(param, (), f"it holds more than {PART_VALUES} values or {PART_CONTAINERS} objects and arrays")
    try:
        return msgspec.json.decode(given, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise refused(param, (), f"it is no JSON object: {error}") from error


def _encoded(schema: Mapping[str, Any], param: str) -> bytes:
    try:
        return msgspec.json.encode(schema)
    except RecursionError as error:
        raise refused(param, (), "it is nested too deeply") from error


def _grammar(**part: object) -> str:
    return msgspec.json.encode({"grammars": [part]}).decode()


_KINDS: Final = {
    "response_format": "json",
    "schema": "json",
    "json": "json",
    "json_object": "json",
    "guided_json": "json",
}
"""What the last part of a parameter's name says it holds."""

_SPELLED: Final = {"/": r"\/", "\n": r"\n", "\r": r"\r"}


def _spelled(found: re.Match[str]) -> str:
    """One character of a pattern, or one with its backslash, as it may stand between two slashes on one line."""
    text = found[0]
    return text if text == r"\/" else _SPELLED.get(text[-1], text)
