"""The parameters that say what an output must be: OpenAI's ``response_format``, and those that the large engines add.

At most one constraint holds for a request; ``grammar`` turns it into the source that is compiled.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

MAX_REGEX_CHARS: Final = 1 << 14
MAX_GRAMMAR_CHARS: Final = 1 << 16
MAX_CHOICES: Final = 1024
MAX_CHOICE_CHARS: Final = 1024
MAX_SCHEMA_CHARS: Final = 1 << 18
"""Of a schema, written as compact JSON."""

SchemaText = Annotated[str, Meta(min_length=1, max_length=MAX_SCHEMA_CHARS)]
Schema = dict[str, Any] | SchemaText
"""A JSON schema: the object itself, or its text."""

Regex = Annotated[str, Meta(min_length=1, max_length=MAX_REGEX_CHARS)]
Choices = Annotated[list[Annotated[str, Meta(max_length=MAX_CHOICE_CHARS)]], Meta(min_length=1, max_length=MAX_CHOICES)]
Grammar = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


class _Format(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """One form of ``response_format``."""


class TextFormat(_Format, frozen=True, tag="text"):
    """Any text."""


class JsonObjectFormat(_Format, frozen=True, tag="json_object"):
    """Any JSON object; the conversation need not mention JSON."""


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A named schema. It is enforced whatever ``strict`` says; ``description`` is for the client's own readers."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: Annotated[str, Meta(max_length=4096)] | None = None
    schema: dict[str, Any]
    strict: bool | None = None


class JsonSchemaFormat(_Format, frozen=True, tag="json_schema"):
    """A JSON value that satisfies a schema."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """vLLM's form: exactly one of these.

    ``regex`` must match the whole output. ``grammar`` is in llguidance's dialect of Lark (from the rule ``start``), or in
    GBNF (from the rule ``root``).
    """

    json: Schema | None = None
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None
