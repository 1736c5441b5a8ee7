"""What an answer holds beside OpenAI's own fields, where its client asked for more.

The events of a stream are made once for all; what few clients ask for is put into them afterwards. No text of the model
can be taken for the marks that are looked for: inside JSON its quotation marks and line ends are escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from edgemesh.api.forms import Part
from edgemesh.api.limits import Limits
from edgemesh.api.openai import ChatRequest, CompletionRequest, Request
from edgemesh.api.replies import Usage

_NO_USAGE: Final = b'],"usage":null}\n\n'
_FINISH: Final = b'"finish_reason":'
_encode = msgspec.json.Encoder().encode


class Extras(msgspec.Struct, frozen=True, gc=False):
    """What one request's answer shows.

    ``best`` is how many choices of each prompt are kept (0: all), ``quiet_stops`` the tokens whose stop is nothing to name,
    ``scored`` says that log-probabilities were drawn for the server's own use. ``prompt_logprobs`` and ``echo_logprobs`` are how many
    alternatives are shown beside each token of the prompt, in vLLM's form and in that of an echo (-1: none, nor the token's own).
    """

    token_ids: bool = False
    usage_often: bool = False
    stop_text: bool = False
    best: int = 0
    scored: bool = False
    quiet_stops: tuple[int, ...] = ()
    service_tier: str | UnsetType = UNSET
    prompt_logprobs: int = -1
    echo_logprobs: int = -1


def extras_of(request: Request, limits: Limits) -> Extras:
    """What the answer to this request shows."""
    options = request.stream_options
    best = scored = False
    if isinstance(request, CompletionRequest) and request.best_of is not None:
        best = request.best_of > (request.n or 1)
        scored = best and request.logprobs is None
    return Extras(
        token_ids=request.return_token_ids is True,
        usage_often=bool(options and options.continuous_usage_stats),
        stop_text=request.include_stop_str_in_output is True,
        best=(request.n or 1) if best else 0,
        scored=scored,
        quiet_stops=() if request.ignore_eos else limits.eos_token_ids,
        service_tier="default" if isinstance(request, ChatRequest) and request.service_tier is not None else UNSET,
        prompt_logprobs=-1 if request.prompt_logprobs is None else request.prompt_logprobs,
        echo_logprobs=_echoed(request),
    )


def _echoed(request: Request) -> int:
    """How many alternatives are wanted beside each token of an echoed prompt."""
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        return request.logprobs
    return -1


def ranked(parts: Sequence[Part], prompts: Sequence[int], extras: Extras) -> list[Part]:
    """The best of each prompt's choices, by the mean log-probability of their tokens; an empty one is the worst.

    ``prompts[i]`` is the prompt of ``parts[i]``.
    """
    if not extras.best:
        return list(parts)
    kept: list[Part] = []
    for prompt in dict.fromkeys(prompts):
        mine = [part for part, of in zip(parts, prompts, strict=True) if of == prompt]
        mine.sort(key=_mean, reverse=True)
        kept += mine[: extras.best]
    return [
        msgspec.structs.replace(part, index=index, logprobs=None if extras.scored else part.logprobs)
        for index, part in enumerate(kept)
    ]


def _mean(part: Part) -> float:
    entries = part.logprobs
    return sum(entry.logprob for entry in entries) / len(entries) if entries else float("-inf")


def with_usage(events: bytes, usage: Usage) -> bytes:
    """Each chunk says what the request has cost so far."""
    return events.replace(_NO_USAGE, b'],"usage":' + _encode(usage) + b"}\n\n")


def with_token_ids(events: bytes, tokens: Sequence[int]) -> bytes:
    """The last of these events holds the tokens of all."""
    return _into_choice(events, b',"token_ids":' + _encode(list(tokens)))


def with_prompt(first: bytes, tokens: bytes, *, chat: bool) -> bytes:
    """A first event holds the prompt's ``tokens``, a JSON array: in a chat beside the choices, in a completion within the choice."""
    added = b',"prompt_token_ids":' + tokens
    return first.removesuffix(b"}\n\n") + added + b"}\n\n" if chat else _into_choice(first, added)


def _into_choice(events: bytes, added: bytes) -> bytes:
    before, mark, after = events.rpartition(_FINISH)
    return before + added[1:] + b"," + mark + after
