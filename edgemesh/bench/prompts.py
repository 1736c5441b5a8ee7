"""Request bodies for a load: prompts that no prefix cache has seen, of a length that is asked for; pure."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

FIRST_ID: Final = 256
"""Ids below this are special tokens and single bytes in most vocabularies."""

WORDS: Final = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
    "car",
    "city",
    "community",
    "name",
    "president",
    "team",
    "minute",
    "idea",
    "kid",
    "body",
    "back",
]


class Endpoint(enum.StrEnum):
    """Which of the two generating endpoints is driven."""

    COMPLETIONS = "completions"
    CHAT = "chat"


class PromptKind(enum.StrEnum):
    """Random token ids (of exactly the wanted length), random common words (of about that length), or a file's own prompts."""

    TOKENS = "tokens"
    TEXT = "text"
    DATASET = "dataset"


class Entry(Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a dataset: a text, or a conversation; exactly one of the two."""

    prompt: str = ""
    messages: list[dict[str, Any]] = []


class Shape(Struct, frozen=True):
    """What every request of a load has in common."""

    model: str
    endpoint: Endpoint = Endpoint.COMPLETIONS
    prompts: PromptKind = PromptKind.TOKENS
    input_len: int = 195
    output_len: int = 64
    vocab: int = 32000
    ignore_eos: bool = True
    seed: int = 0
    group: int | None = None
    """The group that every request is pinned to: an extension of this mesh's gateway."""


def path(shape: Shape) -> str:
    """The endpoint's path below the server's base."""
    return "/v1/chat/completions" if shape.endpoint is Endpoint.CHAT else "/v1/completions"


def text_prompt(shape: Shape, index: int) -> str:
    """Words that start unlike any other request's: about ``input_len`` tokens."""
    rng = random.Random(f"{shape.seed} text {index}")  # noqa: S311 - a load, not a secret
    return " ".join([str(rng.randrange(1000)), *rng.choices(WORDS, k=max(1, shape.input_len - 3))])


def token_prompt(shape: Shape, index: int) -> list[int]:
    """Exactly ``input_len`` ids from ``[FIRST_ID, vocab)``."""
    rng = random.Random(f"{shape.seed} tokens {index}")  # noqa: S311 - a load, not a secret
    return [rng.randrange(FIRST_ID, shape.vocab) for _ in range(shape.input_len)]


def entries(lines: bytes, endpoint: Endpoint) -> list[Entry]:
    """The prompts of a JSON-lines file. Raises ``ValueError`` that names the line and what is allowed."""
    found = []
    for number, line in enumerate(lines.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line, type=Entry)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            message = f'line {number}: {error}; a line is {{"prompt": "..."}} or {{"messages": [...]}}'
            raise ValueError(message) from error
        if bool(entry.prompt) == bool(entry.messages):
            message = f"line {number}: give either `prompt` or `messages`, and not an empty one"
            raise ValueError(message)
        if entry.messages and endpoint is Endpoint.COMPLETIONS:
            message = f"line {number}: `messages` are for --endpoint chat; completions take `prompt`"
            raise ValueError(message)
        found.append(entry)
    if not found:
        message = "it holds no prompt"
        raise ValueError(message)
    return found


def body(shape: Shape, index: int, dataset: Sequence[Entry] = ()) -> bytes:
    """The JSON body of the ``index``-th request. Two indices never share a random prompt; a dataset begins again at its end."""
    fields: dict[str, Any] = {
        "model": shape.model,
        "max_tokens": shape.output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if shape.ignore_eos:
        fields["ignore_eos"] = True
    if shape.group is not None:
        fields["group"] = shape.group
    if dataset:
        entry = dataset[index % len(dataset)]
        own = entry.messages or [{"role": "user", "content": entry.prompt}]
        fields |= {"messages": own} if shape.endpoint is Endpoint.CHAT else {"prompt": entry.prompt}
    elif shape.endpoint is Endpoint.CHAT:
        fields["messages"] = [{"role": "user", "content": text_prompt(shape, index)}]
    elif shape.prompts is PromptKind.TEXT:
        fields["prompt"] = text_prompt(shape, index)
    else:
        fields["prompt"] = token_prompt(shape, index)
    return msgspec.json.encode(fields)
