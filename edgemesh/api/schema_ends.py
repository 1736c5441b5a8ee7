"""Whether a schema has values of finite length: one that requires itself would be written without end.

A schema *ends* if some finite value can satisfy what it requires. Those that end are found from the leaves up, each looked
at again only when what it waited for is known to end, so the work is linear in the size of the schema.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator
from typing import Any, Final
from urllib.parse import unquote

Path = tuple[str | int, ...]
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_ONE: Final = ("items", "additionalItems", "additionalProperties")
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions")


def endless(root: dict[str, Any]) -> Path | None:
    """The place of a schema within ``root`` that no finite value satisfies, the innermost first; None if there is none."""
    places = {id(node): (path, node) for path, node in _schemas(root, ())}
    needs = {number: _needs(node, root, places) for number, (_, node) in places.items()}
    held: dict[int, frozenset[int]] = {}
    waiting: defaultdict[int, list[int]] = defaultdict(list)
    ends: set[int] = set()
    due = list(places)
    while due:
        number = due.pop()
        if number in ends or (number in held and held[number].isdisjoint(ends)):
            continue
        group = next((each for each in needs[number] if each.isdisjoint(ends)), None)
        if group is None:
            ends.add(number)
            due.extend(waiting.pop(number, ()))
            continue
        held[number] = group
        for each in group:
            waiting[each].append(number)
    return max((path for number, (path, _) in places.items() if number not in ends), key=len, default=None)


def _schemas(node: dict[str, Any], path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A schema and all within it."""
    yield path, node
    for name in _ONE:
        if isinstance(each := node.get(name), dict):
            yield from _schemas(each, (*path, name))
    for name in _LISTS:
        if isinstance(several := node.get(name), list):
            for place, each in enumerate(several):
                if isinstance(each, dict):
                    yield from _schemas(each, (*path, name, place))
    for name in _NAMED:
        for key, each in node.get(name, {}).items():
            if isinstance(each, dict):
                yield from _schemas(each, (*path, name, key))


def _needs(node: dict[str, Any], root: dict[str, Any], known: Container[int]) -> Iterator[frozenset[int]]:
    """Groups of schemas, by their ids: of each group at least one must end for this schema to end."""
    for each in _required(node, root):
        if id(each) in known:
            yield frozenset((id(each),))
    for name in ("anyOf", "oneOf"):
        options = node.get(name, ())
        if options and all(id(each) in known for each in options):
            yield frozenset(map(id, options))


def _required(node: dict[str, Any], root: dict[str, Any]) -> Iterator[object]:
    """Schemas that a value of this one needs a value of."""
    if "$ref" in node:
        yield _target(node["$ref"], root)
    yield from node.get("allOf", ())
    kinds = node.get("type")
    if kinds in ("object", ["object"]):
        properties = node.get("properties", {})
        for name in node.get("required", ()):
            yield properties.get(name, node.get("additionalProperties"))
    if kinds in ("array", ["array"]):
        for place in range(min(node.get("minItems", 0), 1 << 12)):
            items = node.get("prefixItems", node["items"] if isinstance(node.get("items"), list) else ())
            if place >= len(items):
                yield node.get("additionalItems" if isinstance(node.get("items"), list) else "items")
                break
            yield items[place]


def _target(reference: str, root: dict[str, Any]) -> object:
    """What a ``$ref`` within the schema points to; None where that is no place in it."""
    found: object = root
    for part in unquote(reference.removeprefix("#")).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found
