"""The table of every parameter, written from the types that read them: what is served and within which bounds, what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import inspect

from edgemesh.api.neutral import EVERY_NEUTRAL
from edgemesh.api.notes import NOTES, SURFACE_NOTES
from edgemesh.api.openai import ChatRequest, CompletionRequest
from edgemesh.api.reasons import WHY
from edgemesh.api.routes import ROUTES

FILE: Final = "PARAMETERS.md"
HEAD: Final = """\
# Parameters

Written from the types that read requests; `edgemesh api parameters` prints it. What is not named here is refused as
unknown, a value outside its bounds by the parameter's name (400), and `null` is as good as leaving a parameter out.
A text has at most the body's size (`gateway.max_body_bytes`) where no other bound is given.
"""
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"


class Parameter(msgspec.Struct, frozen=True):
    """One parameter of one body; ``refused`` has the values that ask for nothing, and why others are refused."""

    name: str
    values: str
    refused: str = ""


def parameters(kind: type[msgspec.Struct]) -> list[Parameter]:
    """Every parameter of a body, in the order of its fields."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    neutral = EVERY_NEUTRAL.get(kind.__name__, {})
    found = []
    for field in info.fields:
        if field.name in neutral:
            refused = WHY.get(field.name, "nothing here acts on it")
            allowed = neutral[field.name][1]
            found.append(Parameter(field.encode_name, allowed, refused))
        else:
            found.append(Parameter(field.encode_name, words(field.type)))
    return found


def table() -> str:
    """The document."""
    chat = {each.name: each for each in parameters(ChatRequest)}
    completions = {each.name: each for each in parameters(CompletionRequest)}
    names = dict.fromkeys([*NOTES, *chat, *completions])
    served: list[str] = []
    refused: list[str] = []
    for name in names:
        for where, each in _where(chat.get(name), completions.get(name)):
            effect = NOTES.get(name, "")
            if each.refused:
                refused.append(_row(name, where, each.values, each.refused))
            else:
                served.append(_row(name, where, each.values, effect))
    parts = [HEAD, f"\n## {CHAT} and {COMPLETIONS}\n", _head("parameter", "of", "values", "effect"), *served]
    parts += ["\n## Known, and refused with any other value\n", _head("parameter", "of", "allowed", "why"), *refused]
    for route in ROUTES:
        if route.body not in {None, ChatRequest, CompletionRequest}:
            own = SURFACE_NOTES.get(route.path.removesuffix("/count_tokens"), {})
            parts += [f"\n## {route.path}\n", _head("parameter", "values", "effect, or why others are refused")]
            for each in parameters(route.body):
                same = each in {chat.get(each.name), completions.get(each.name)}
                effect = own.get(each.name) or (NOTES.get(each.name, "") if same else "")
                parts.append(_row(each.name, each.values, each.refused or effect))
    return "\n".join(parts) + "\n"


def parameter_files() -> dict[str, bytes]:
    """File name -> content."""
    return {FILE: table().encode()}


def _where(chat: Parameter | None, completions: Parameter | None) -> Iterator[tuple[str, Parameter]]:
    """The endpoints of a parameter: one line where they agree."""
    if chat is not None and chat == completions:
        yield "both", chat
        return
    if chat is not None:
        yield "chat", chat
    if completions is not None:
        yield "completions", completions


def _head(*names: str) -> str:
    return "| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|"


def _row(name: str, *cells: str) -> str:
    return "| " + " | ".join([f"`{name}`", *(each.replace("|", "\\|") for each in cells)]) + " |"


def words(kind: inspect.Type, depth: int = 0) -> str:  # noqa: C901, PLR0911 - one case for each kind of type
    """A type's values in words."""
    match kind:
        case inspect.Metadata():
            return words(kind.type, depth)
        case inspect.BoolType():
            return "`true`, `false`"
        case inspect.IntType() | inspect.FloatType():
            number = "integer" if isinstance(kind, inspect.IntType) else "number"
            return number + _range(kind)
        case inspect.StrType():
            return "text" + _sizes(kind.min_length, kind.max_length, "characters")
        case inspect.LiteralType():
            return ", ".join(f"`{json.dumps(each)}`" for each in kind.values)
        case inspect.ListType() | inspect.VarTupleType():
            return f"list{_sizes(kind.min_length, kind.max_length, '')} of {_inner(kind.item_type, depth)}"
        case inspect.DictType():
            pair = f"{_inner(kind.key_type, depth)} to {_inner(kind.value_type, depth)}"
            return f"object{_sizes(kind.min_length, kind.max_length, 'entries')}: {pair}"
        case inspect.UnionType():
            each = [words(part, depth) for part in kind.types if not isinstance(part, inspect.NoneType)]
            return " or ".join(dict.fromkeys(each))
        case inspect.StructType():
            return _object(kind, depth)
        case inspect.AnyType():
            return "any JSON"
    return type(kind).__name__.removesuffix("Type").lower()


def _inner(kind: inspect.Type, depth: int) -> str:
    text = words(kind, depth + 1)
    return f"({text})" if " or " in text or ", " in text else text


def _object(kind: inspect.StructType, depth: int) -> str:
    """A struct: its fields where it stands at the top, else its name."""
    tag = f"`{json.dumps(kind.tag)}` " if isinstance(kind.tag, str) else ""
    if depth:
        return f"{tag}{kind.cls.__name__}"
    neutral = EVERY_NEUTRAL.get(kind.cls.__name__, {})
    fields = [field for field in kind.fields if field.name not in neutral]
    return f"{tag}object: " + "; ".join(f"`{field.encode_name}` {words(field.type, 1)}" for field in fields)


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    whole = isinstance(kind, inspect.IntType)
    low, high = kind.ge, kind.le
    if whole:
        low = kind.gt + 1 if kind.gt is not None else low
        high = kind.lt - 1 if kind.lt is not None else high
    above = f"above {_number(kind.gt)}" if low is None and kind.gt is not None else ""
    below = f"below {_number(kind.lt)}" if high is None and kind.lt is not None else ""
    least = above or ("" if low is None else _number(low))
    most = below or ("" if high is None else _number(high))
    if least and most:
        return f" {least} to {most}"
    return f" {least} or more" if least else f" up to {most}" if most else ""


def _number(value: Any) -> str:  # noqa: ANN401 - as msgspec has bounds
    for shown, off in ((value, ""), (value + 1, " - 1")):
        power = int(abs(shown)).bit_length() - 1
        if power >= 20 and abs(shown) == 1 << power:
            return f"{'-' if shown < 0 else ''}2^{power}{off}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _sizes(low: int | None, high: int | None, unit: str) -> str:
    text = ""
    if low and high is not None:
        text = f" of {low} to {_number(high)}"
    elif high is not None:
        text = f" of at most {_number(high)}"
    elif low:
        text = f" of at least {low}"
    return f"{text} {unit}".rstrip() if text else ""
