"""What the types of requests and answers mean beyond what msgspec's schemas say of them: each rule is one the code has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from edgemesh.api.neutral import EVERY_NEUTRAL
from edgemesh.api.openai import MAX_CHOICES, Neutral
from edgemesh.api.replies import Reply
from edgemesh.wire.schema import Schema

TOKEN_NUMBER: Final = {"pattern": "^(0|[1-9][0-9]{0,9})$"}
"""Keys of an object that are numbers."""

PRINTABLE: Final = "^[ -~]*$"
TEXT: Final = {"type": "string", "minLength": 1}
IDS: Final = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def refine(parts: dict[str, Schema]) -> None:
    """Refine the schemas, by the name of their type."""
    for name, fields in EVERY_NEUTRAL.items():
        if name in parts:
            _narrow(parts[name]["properties"], fields)
    for kind in _descendants(Reply):
        if kind.__name__ in parts and not kind.__struct_config__.omit_defaults:
            always = [field.encode_name for field in msgspec.structs.fields(kind) if field.default is not msgspec.UNSET]
            tags = parts[kind.__name__].get("required", [])
            parts[kind.__name__]["required"] = list(dict.fromkeys([*tags, *always]))
    for name in ("ChatRequest", "CompletionRequest"):
        _request(parts[name]["properties"])
    for name in ("ChatRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest"):
        _printable(parts[name]["properties"]["request_id"])
    parts["CompletionRequest"]["properties"]["prompt"] = _prompt()
    parts["ChatMessage"] = _messages(parts["ChatMessage"])
    parts["MessageItem"]["required"].remove("type")
    parts["TokenizeRequest"] |= {"oneOf": [_given("prompt"), _given("messages")]}


def _narrow(properties: Schema, fields: Neutral) -> None:
    """Say of parameters that nothing acts on which values they may have all the same."""
    for name, (values, allowed) in fields.items():
        distinct: list[Any] = [None]
        distinct += [value for at, value in enumerate(values) if value not in values[:at]]
        properties[name] = {"enum": distinct, "default": None, "description": f"Not supported: null, or {allowed}."}


def _request(properties: Schema) -> None:
    """Token ids as keys."""
    for option in properties["logit_bias"]["anyOf"]:
        if option["type"] == "object":
            option["propertyNames"] = TOKEN_NUMBER


def _printable(name: Schema) -> None:
    """A name that fits a header."""
    for option in name["anyOf"]:
        if option["type"] == "string":
            option["pattern"] = PRINTABLE


def _prompt() -> Schema:
    """One prompt or several, all of one kind, none of them empty."""
    several = {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES}
    return {"anyOf": [TEXT, several | {"items": TEXT}, IDS, several | {"items": IDS}]}


def _messages(part: Schema) -> Schema:
    """What a message holds by its role; all but an assistant's say something."""
    fields = part["properties"]
    said = {"anyOf": [option for option in fields["content"]["anyOf"] if option["type"] != "null"]}
    calls = next(option for option in fields["tool_calls"]["anyOf"] if option["type"] == "array")
    no_calls: Schema = {"tool_calls": {"enum": [None, []]}}
    no_answer = {"tool_call_id": {"type": "null"}}

    def shape(title: str, *roles: str, needs: dict[str, Schema], without: Schema) -> Schema:
        return {
            "title": title,
            "type": "object",
            "properties": fields | {"role": {"enum": list(roles)}} | without | needs,
            "required": ["role", *needs],
            "additionalProperties": False,
        }

    other = no_calls | no_answer
    call_id = {key: value for key, value in fields["tool_call_id"]["anyOf"][0].items() if key != "default"}
    return {
        "title": part["title"],
        "description": part["description"],
        "anyOf": [
            shape("Said to the model", "system", "developer", "user", needs={"content": said}, without=other),
            shape("Said by the model", "assistant", needs={"content": said}, without=no_answer),
            shape("Called by the model", "assistant", needs={"tool_calls": calls | {"minItems": 1}}, without=no_answer),
            shape("Thought by the model", "assistant", needs={"reasoning_content": TEXT}, without=no_answer),
            shape("Thought by the model", "assistant", needs={"reasoning": TEXT}, without=no_answer),
            shape("Answer of a tool", "tool", needs={"tool_call_id": call_id, "content": said}, without=no_calls),
        ],
    }


def _given(name: str) -> Schema:
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


def _descendants(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for each in kind.__subclasses__():
        yield each
        yield from _descendants(each)
