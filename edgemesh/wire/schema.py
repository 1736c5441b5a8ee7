"""The wire as JSON Schema: every message, and what each role's inbox takes.

Messages travel as msgpack arrays, so a message's schema lists its fields by position, the tag first.
"""

import inspect
import json
from typing import Any, Final

import msgspec

from edgemesh.wire import messages as wire_messages
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.catalogue import inbox
from edgemesh.wire.ids import Role
from edgemesh.wire.messages import Message, Part

DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]


def all_messages() -> tuple[type[Message], ...]:
    """Every message type, in the order of its definition."""
    return tuple(
        each
        for each in vars(wire_messages).values()
        if inspect.isclass(each) and issubclass(each, Message) and each is not Message
    )


def wire_schemas() -> dict[str, bytes]:
    """File name -> content: ``messages.json``, and ``inbox/ROLE.json`` for each role that receives anything."""
    _, parts = msgspec.json.schema_components(all_messages(), schema_hook=_hook, ref_template="#/$defs/{name}")
    for name, part in parts.items():
        _title_items(part, getattr(wire_messages, name))
    whole: Schema = {
        "$schema": DRAFT,
        "title": "Every message of the mesh",
        "oneOf": [{"$ref": f"#/$defs/{each.__name__}"} for each in all_messages()],
        "$defs": parts,
    }
    files = {"messages.json": render(whole)}
    for role in Role:
        types = inbox(role)
        files[f"inbox/{role}.json"] = render(
            {
                "$schema": DRAFT,
                "title": f"What a {role} receives",
                "oneOf": [{"$ref": f"../messages.json#/$defs/{each.__name__}"} for each in types],
            }
        )
    return files


def render(schema: Schema) -> bytes:
    """A schema as a file's bytes, the same on every run."""
    return (json.dumps(_clean(schema), indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _title_items(part: Schema, kind: type) -> None:
    """Give each position of an array its field's name."""
    if issubclass(kind, Message | Part):
        names = [field.name for field in msgspec.structs.fields(kind)]
        if issubclass(kind, Message):
            names.insert(0, "type")
        for name, item in zip(names, part["prefixItems"], strict=True):
            item["title"] = name


def _clean(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Docstrings without their source's indentation (some Pythons keep it, some do not)."""
    if isinstance(value, dict):
        return {
            key: inspect.cleandoc(inner) if key == "description" and isinstance(inner, str) else _clean(inner)
            for key, inner in value.items()
        }
    return [_clean(inner) for inner in value] if isinstance(value, list) else value


def _hook(kind: type) -> Schema:
    if kind is TokenArray:
        return {
            "title": "TokenArray",
            "description": "Token ids, 32-bit little-endian: msgpack extension 1 holds the bytes themselves, extension 2"
            " the number of the frame that does.",
            "x-msgpack-extension": [1, 2],
        }
    raise NotImplementedError(kind)
