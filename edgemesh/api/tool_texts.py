"""Which arguments of tools are texts, for calls that do not say so of their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from edgemesh.api.tool_types import Tool

_DEPTH: Final = 8
"""References and choices that are followed into each other."""

Places = frozenset[tuple[str, str]]
"""Tools and their arguments."""


class Texts(msgspec.Struct, frozen=True):
    """Arguments that are texts ``always``, and those that may be null instead."""

    always: Places = frozenset()
    nullable: Places = frozenset()


def texts_of(tools: Iterable[Tool]) -> Texts:
    """What the tools' schemas say of their arguments."""
    always: set[tuple[str, str]] = set()
    nullable: set[tuple[str, str]] = set()
    for tool in tools:
        schema = tool.function.parameters or {}
        properties = schema.get("properties")
        for name, each in properties.items() if isinstance(properties, Mapping) else ():
            types = types_of(each, schema)
            if types == {"string"}:
                always.add((tool.function.name, name))
            elif types == {"string", "null"}:
                nullable.add((tool.function.name, name))
    return Texts(frozenset(always), frozenset(nullable))


def types_of(schema: Any, root: Mapping[str, Any], depth: int = _DEPTH) -> set[str] | None:  # noqa: ANN401 - any JSON
    """The types that a value of ``schema`` may have; None where it does not say."""
    if not isinstance(schema, Mapping) or not depth:
        return None
    if "$ref" in schema:
        return types_of(_target(schema["$ref"], root), root, depth - 1)
    given = schema.get("type")
    given = [given] if isinstance(given, str) else given
    if isinstance(given, list) and given:
        return {str(each) for each in given}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return {_type(value) for value in values}
    choices = schema.get("anyOf") or schema.get("oneOf")
    found = [types_of(each, root, depth - 1) for each in choices] if isinstance(choices, list) else [None]
    return None if None in found else {kind for types in found for kind in types or ()}


def _type(value: Any) -> str:  # noqa: ANN401 - any JSON
    return "string" if isinstance(value, str) else "null" if value is None else "other"


def _target(reference: Any, root: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any JSON
    """What a reference to a place in this schema means; None for any other."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    node: Any = root
    for key in reference[2:].split("/"):
        node = node.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
    return node
