"""The grammar of one call whose arguments have tags, as Qwen3-Coder writes it.

Arguments come in the order of the schema. A text is free up to its closing tag, one of those that the schema names, or
what a pattern of the form ``^...$`` matches, of a length within its bounds; any other value is JSON under its schema. What else a schema may say of a text,
or of its arguments together, this form is not kept to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from edgemesh.api.grammar import regex_source
from edgemesh.api.schema import refused
from edgemesh.api.tool_texts import types_of
from edgemesh.api.tools_coder import FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END

SHARED_RULES: Final = (
    f"any_text[suffix={json.dumps(PARAMETER_END)}]: TEXT",
    f'any_argument: {json.dumps(PARAMETER)} /[^>\\n]+/ ">" any_text "\\n"',
)
"""What the calls of all tools share: any text and its closing tag, and any argument; ``TEXT`` is any text."""

CLOSING: Final = f"\n{PARAMETER_END}\n"
_NO_TAG: Final = r"~/(.|\n)*<\/parameter>(.|\n)*/"
_OPTIONS: Final = "x-guidance"
_KEPT: Final = frozenset(
    {"$defs", "$schema", "additionalProperties", "definitions", "properties", "required", "type", _OPTIONS}
)
_KEPT_OF_TEXTS: Final = frozenset({"$ref", "const", "enum", "maxLength", "minLength", "pattern", "type"})
MAX_LENGTH: Final = 4096
"""Characters up to which a text's length is counted."""


class TaggedCall:
    """The rules of the ``number``-th tool's calls, whose arguments keep to ``schema``.

    With ``strict`` what is not kept to is an ``ApiError`` (400) that names ``param``; else it is let be.
    """

    def __init__(self, number: int, schema: Mapping[str, Any], param: str, *, strict: bool) -> None:
        self._number = number
        self._schema = schema
        self._param = param
        self._strict = strict

    def rules(self, name: str) -> Iterator[str]:
        """The rule ``object`` of this number, and those that it needs. Raises ``ApiError``."""
        head, end = json.dumps(f"{FUNCTION}{name}>\n"), json.dumps(FUNCTION_END)
        mark = f"object{self._number}"
        self._check((), self._schema, _KEPT)
        properties = self._schema.get("properties", {})
        required = self._schema.get("required", [])
        known = {key: properties.get(key, {}) for key in dict.fromkeys([*properties, *required])}
        parts = []
        for at, (key, schema) in enumerate(known.items()):
            if ">" in key or "\n" in key:
                self._refuse(("properties", key), "a name in tags has no `>` and no line end")
                continue
            opening, form = json.dumps(f"{PARAMETER}{key}>"), f"FORM{self._number}_{at}"
            expression = self._expression(schema)
            if expression:
                # Text and tag are one word: the text alone would take of the tag what fits it.
                yield f"{form}: ({expression} & {_NO_TAG}) {json.dumps(CLOSING)}"
            yield f"{mark}_{at}: {opening} {self._value(key, schema, form if expression else '')}"
            parts.append(f"{mark}_{at}" + ("" if key in required else "?"))
        if not properties and self._schema.get("additionalProperties", True):
            parts.append("any_argument*")
        yield f"{mark}: {head} {' '.join(parts)} {end}"

    def _expression(self, schema: Any) -> str:  # noqa: ANN401 - a schema may be a boolean
        """The regular expressions that match a text as a whole, as far as its schema has any of that form."""
        if not isinstance(schema, dict):
            return ""
        found = []
        if _anchored(schema):
            found.append(regex_source(schema["pattern"][1:-1]).rpartition("start: ")[2])
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        if (low or high != "") and max(low, high or 0) <= MAX_LENGTH:
            found.append(rf"/(.|\n){{{low},{high}}}/")
        return " & ".join(found)

    def _value(self, key: str, schema: Any, form: str) -> str:  # noqa: ANN401 - a schema may be a boolean
        """A value behind its opening tag, and its closing tag; ``form`` is the terminal of a text of which there is an expression."""
        types = types_of(schema, self._schema)
        text = self._text(key, schema, form) if types is not None and types <= {"string", "null"} else None
        if types == {"string"} and text is not None:
            return text
        close = json.dumps(CLOSING)
        if types == {"string", "null"} and text is not None:
            return f'({text} | "\\nnull" {close})'
        shared = {name: self._schema[name] for name in ("$defs", "definitions", _OPTIONS) if name in self._schema}
        whole = schema | shared if isinstance(schema, dict) else schema
        return f'"\\n" %json {json.dumps(whole)} {close}'

    def _text(self, key: str, schema: Mapping[str, Any], form: str) -> str:
        """A text, and its closing tag."""
        path = ("properties", key)
        self._check(path, schema, _KEPT_OF_TEXTS)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        texts = [value for value in values or () if isinstance(value, str)]
        if texts:
            each = " | ".join(json.dumps(f"\n{value}{CLOSING}") for value in texts)
            return f"({each})"
        if ("pattern" in schema and not _anchored(schema)) or "$ref" in schema:
            self._refuse(path, "only a pattern of the form ^...$ is kept to in this model's calls, and no reference")
        for name in ("minLength", "maxLength"):
            if schema.get(name, 0) > MAX_LENGTH:
                self._refuse((*path, name), f"more than {MAX_LENGTH} is not kept to in this model's calls")
        return f'"\\n" {form}' if form else '"\\n" any_text "\\n"'

    def _check(self, path: tuple[str, ...], schema: Mapping[str, Any], kept: frozenset[str]) -> None:
        for name in schema:
            if name not in kept:
                self._refuse((*path, name), "it is not kept to in this model's calls, whose arguments have tags")

    def _refuse(self, path: tuple[str, ...], why: str) -> None:
        if self._strict:
            raise refused(self._param, path, why)


def _anchored(schema: Mapping[str, Any]) -> bool:
    """Whether a text's pattern has the form that is kept to."""
    pattern = schema.get("pattern", "")
    return bool(pattern.startswith("^") and pattern.endswith("$"))
