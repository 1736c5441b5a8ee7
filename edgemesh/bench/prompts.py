"""Request bodies for a load: prompts that no prefix cache has seen, of a length that is asked for; pure."""

from __future__ import annotations

import enum
import random
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
    """Random token ids (of exactly the wanted length), or random common words (of about that length)."""

    TOKENS = "tokens"
    TEXT = "text"


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


def body(shape: Shape, index: int) -> bytes:
    """The JSON body of the ``index``-th request; two indices never share a prompt."""
    fields: dict[str, Any] = {
        "model": shape.model,
        "max_tokens": shape.output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if shape.ignore_eos:
        fields["ignore_eos"] = True
    if shape.endpoint is Endpoint.CHAT:
        fields["messages"] = [{"role": "user", "content": text_prompt(shape, index)}]
    elif shape.prompts is PromptKind.TEXT:
        fields["prompt"] = text_prompt(shape, index)
    else:
        fields["prompt"] = token_prompt(shape, index)
    return msgspec.json.encode(fields)
