"""Which JSON schemas can be enforced: every keyword is enforced, an annotation, or refused with its place.

The compiler behind understands Draft 2020-12 and what earlier drafts share with it. What it would take without enforcing
is refused here, where the message can say where it stands: an unknown keyword, a bound that a repeated name would defeat,
a text that the output cannot spell, a schema that requires itself without end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from edgemesh.api.errors import ApiError, invalid
from edgemesh.api.schema_dates import PATTERNS
from edgemesh.api.schema_ends import endless

MAX_NODES: Final = 1 << 12
"""Schemas within a schema."""

MAX_DEPTH: Final = 48
_SHOWN: Final = 200

FORMATS: Final = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", *PATTERNS})
TYPES: Final = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
DRAFTS: Final = re.compile(r"https?://json-schema\.org/(draft/(2020-12|2019-09)|draft-0[467])/schema#?")
ANNOTATIONS: Final = frozenset(
    {
        "$comment",
        "contentEncoding",
        "contentMediaType",
        "default",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)
"""Keywords that say nothing about which values are valid; so do those that begin with ``x-``."""

_RESERVED: Final = "x-guidance"
_UNSPELLABLE: Final = re.compile(rb"(?<!\\)(?:\\\\)*(?:\\u00|\x7f)")
_LITERALS: Final = frozenset({"const", "enum"})
_ONE: Final = frozenset({"additionalItems", "additionalProperties", "items"})
_LISTS: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_NAMED: Final = frozenset({"$defs", "definitions", "patternProperties", "properties"})

Path = tuple[str | int, ...]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return _is_number(value) and 0 <= value < 1 << 32 and value == int(value)  # type: ignore[operator, call-overload]  # it is one


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_type(value: object) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(each, str) and each in TYPES for each in names)


_NUMBER = (_is_number, "a number")
_COUNT = (_is_count, "a whole number from 0 to 2^32 - 1")
_TEXT = (_is_text, "a text")
_VALUES: Final[dict[str, tuple[Callable[[object], bool], str]]] = {
    "$id": _TEXT,
    "$ref": (lambda it: isinstance(it, str) and it.startswith("#"), "a place in this schema, such as #/$defs/name"),
    "$schema": (lambda it: isinstance(it, str) and DRAFTS.fullmatch(it) is not None, "Draft 4 to 2020-12"),
    "const": (lambda _: True, ""),
    "enum": (lambda it: isinstance(it, list) and bool(it), "a list of at least one value"),
    "exclusiveMaximum": (_is_number, "a number (a boolean, as in Draft 4, is not supported)"),
    "exclusiveMinimum": (_is_number, "a number (a boolean, as in Draft 4, is not supported)"),
    "format": (lambda it: isinstance(it, str) and it in FORMATS, "one of " + ", ".join(sorted(FORMATS))),
    "maxItems": _COUNT,
    "maxLength": _COUNT,
    "maxProperties": _COUNT,
    "maximum": _NUMBER,
    "minItems": _COUNT,
    "minLength": _COUNT,
    "minProperties": _COUNT,
    "minimum": _NUMBER,
    "multipleOf": (lambda it: _is_number(it) and it > 0, "a number above 0"),  # type: ignore[operator]  # it is one
    "pattern": (_is_text, "a regular expression"),
    "required": (_is_names, "a list of names"),
    "type": (_is_type, "one or a list of " + ", ".join(sorted(TYPES))),
}
KEYWORDS: Final = frozenset(_VALUES) | _ONE | _LISTS | _NAMED
"""All that is enforced."""


def enforceable(schema: Mapping[str, Any], param: str) -> dict[str, Any]:
    """The schema as the compiler is to read it, without annotations.

    Raises ``ApiError`` (400, ``invalid_schema``) that names ``param`` and the place in it for what cannot be enforced.
    """
    found = _Reader(param).schema(schema, ())
    assert isinstance(found, dict)
    if (path := endless(found)) is not None:
        raise refused(param, path, "it requires itself without end, so no value satisfies it")
    return found


def refused(param: str, path: Path, what: str) -> ApiError:
    """400: this place of the schema in ``param`` is the reason."""
    where = f" at `{_pointer(path)}`" if path else ""
    return invalid(f"Invalid schema in `{param}`{where}: {what}", param, "invalid_schema")


def _pointer(path: Path) -> str:
    """A place as a JSON pointer, no longer than an error may be."""
    text = "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in path)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class _Reader:
    """Copies one schema, looking at every keyword."""

    def __init__(self, param: str) -> None:
        self._param = param
        self._nodes = 0

    def schema(self, node: object, path: Path) -> dict[str, Any] | bool:
        """What of one schema is enforced."""
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise refused(self._param, path, f"there are more than {MAX_NODES} schemas in it")
        if len(path) > 2 * MAX_DEPTH:
            raise refused(self._param, path, f"it is nested more than {MAX_DEPTH} deep")
        if isinstance(node, bool):
            return node
        if not isinstance(node, Mapping):
            raise refused(self._param, path, f"a schema is an object, true or false, not {_shown(node)}")
        found: dict[str, Any] = {}
        for name, value in node.items():
            if name not in ANNOTATIONS and (not name.startswith("x-") or name == _RESERVED):
                found[name] = self._keyword(name, value, (*path, name))
        self._combination(found, path)
        return _dated(found)

    def _keyword(self, name: str, value: object, path: Path) -> object:
        if name in _ONE and not isinstance(value, list):
            return self.schema(value, path)
        if name in _NAMED:
            if not isinstance(value, Mapping):
                raise refused(self._param, path, f"it must be an object of schemas, not {_shown(value)}")
            return {key: self.schema(each, (*path, key)) for key, each in value.items()}
        if name in _LISTS or name == "items":
            if not isinstance(value, list) or not value:
                raise refused(self._param, path, f"it must be a list of at least one schema, not {_shown(value)}")
            return [self.schema(each, (*path, place)) for place, each in enumerate(value)]
        if name not in _VALUES:
            raise refused(
                self._param, path, f"`{name[:_SHOWN]}` is not supported; what is: {', '.join(sorted(KEYWORDS))}"
            )
        fits, words = _VALUES[name]
        if not fits(value):
            raise refused(self._param, path, f"it must be {words}, not {_shown(value)}")
        if name == "$id" and len(path) > 1:
            raise refused(self._param, path, "only the whole schema may have an `$id`")
        if name in _LITERALS and _UNSPELLABLE.search(msgspec.json.encode(value)):
            raise refused(self._param, path, "it holds a control character, which no output here can spell")
        return int(value) if fits is _is_count else value  # type: ignore[call-overload]  # a count, as 2 or as 2.0

    def _combination(self, node: Mapping[str, Any], path: Path) -> None:
        """Refuse what is legal word by word, and not together."""
        fewest = node.get("minProperties", 0)
        if fewest > max(1, len(set(node.get("required", ())))):
            what = "more than 1 is only supported with as many `required`: a repeated name would count twice"
            raise refused(self._param, (*path, "minProperties"), what)
        for name in node.get("properties", ()):
            if _UNSPELLABLE.search(msgspec.json.encode(name)):
                what = "its name holds a control character, which no output here can spell"
                raise refused(self._param, (*path, "properties", name), what)


def _dated(node: dict[str, Any]) -> dict[str, Any]:
    """Dates and times by patterns of their own: the compiler's allow the 29th of February in any year."""
    pattern = PATTERNS.get(node.get("format", ""))
    if pattern is None:
        return node
    rest = {name: value for name, value in node.items() if name != "format"}
    if "pattern" not in rest:
        return rest | {"pattern": pattern}
    return rest | {"allOf": [*rest.get("allOf", ()), {"pattern": pattern}]}


def _shown(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN // 4 else f"{text[: _SHOWN // 4]}..."
