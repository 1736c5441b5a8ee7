"""A checked request and its token ids to choices that may be submitted: nothing is left to default."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec

from edgemesh.api.check import check_tokens
from edgemesh.api.errors import context_length_exceeded, invalid
from edgemesh.api.extras import Extras, extras_of
from edgemesh.api.limits import Limits
from edgemesh.api.openai import ChatRequest, CompletionRequest, Request
from edgemesh.api.parser import Parsing
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.messages import Sampling

COMPLETION_TOKENS: Final = 16
"""OpenAI's default length of a completion; a chat's is all that fits."""

LEAST_TOP_P: Final = 1e-6
"""``top_p`` 0 keeps the likeliest token alone, and so does this: of no vocabulary is it less likely."""

_SEED_MASK: Final = (1 << 63) - 1


class Choice(msgspec.Struct, frozen=True, gc=False):
    """One stream to submit; ``index`` is its number in the answer, ``prompt`` that of its prompt.

    ``max_tokens`` 0 asks for the prompt alone. ``prompt_logprobs`` is how many alternatives are wanted beside each prompt token (-1: none):
    of a prompt's choices only the first one asks, for all of them.
    """

    index: int
    prompt: int
    sampling: Sampling
    max_tokens: int
    prompt_logprobs: int = -1


class Job(msgspec.Struct, frozen=True, gc=False):
    """All of one request that the mesh needs, and all that its answer's form depends on."""

    prompts: tuple[TokenArray, ...]
    choices: tuple[Choice, ...]
    stops: tuple[str, ...]
    skip_special_tokens: bool
    stream: bool
    include_usage: bool
    session: str
    key: str
    pin: int | None
    priority: int
    tenant: str = ""
    """Whose API key it is, where there are keys."""

    grammar: str = ""
    """What every choice's output must be, as a grammar's source; "" for anything."""

    grammar_of: str = ""
    """The parameter that asked for it, as errors name it."""

    trials: tuple[tuple[str, str], ...] = ()
    """Parts of the grammar that are to be tried out by themselves: the parameter and the source of each."""

    extras: Extras = Extras()
    parsing: Parsing | None = None
    """What is looked for in every choice's text; None: it is content and nothing else."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together, each counted once."""
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def prompt_logprobs(self) -> int:
        """Log-probabilities of prompts that will come, alternatives included."""
        return sum(len(self.prompts[each.prompt]) * (1 + each.prompt_logprobs) for each in self.choices)


BadWords = tuple[tuple[int, ...], ...]
"""Token sequences that may not come to stand in the output."""


def truncated(request: Request, ids: Sequence[int], wanted: int | None, limits: Limits) -> Sequence[int]:
    """What ``truncate_prompt_tokens`` leaves of a prompt: all, its first or its last tokens."""
    most = request.truncate_prompt_tokens
    if most is None:
        return ids
    if most < 0:
        most = max(1, limits.context - (1 if wanted is None else wanted))
    return ids[:most] if request.truncation_side == "right" else ids[max(0, len(ids) - most) :]


def resolve_chat(request: ChatRequest, ids: Sequence[int], limits: Limits, seed: int, bad_words: BadWords = ()) -> Job:
    """A chat's choices; ``seed`` is used where the request has none. Raises ``ApiError``."""
    wanted = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else -1
    ids = truncated(request, ids, wanted, limits)
    length = _length(ids, wanted, limits, "messages")
    return _job(request, [(ids, length)], logprobs, limits, seed, bad_words)


def resolve_completion(
    request: CompletionRequest, prompts: Sequence[Sequence[int]], limits: Limits, seed: int, bad_words: BadWords = ()
) -> Job:
    """A completion's choices, prompt by prompt. Raises ``ApiError``."""
    wanted = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    logprobs = -1 if request.logprobs is None else request.logprobs
    if request.best_of is not None and request.best_of > (request.n or 1):
        logprobs = max(0, logprobs)
    pairs = []
    for given in prompts:
        ids = truncated(request, given, wanted, limits)
        fits = request.max_tokens is None and len(ids) < limits.context
        length = _length(ids, min(wanted, limits.context - len(ids)) if fits else wanted, limits, "prompt")
        pairs.append((ids, length))
    return _job(request, pairs, logprobs, limits, seed, bad_words)


def _length(ids: Sequence[int], wanted: int | None, limits: Limits, param: str) -> int:
    """Tokens that may be generated after ``ids``."""
    if not ids:
        message = f"`{param}` is empty; give at least one token"
        raise invalid(message, param, "empty_prompt")
    check_tokens(ids, limits, param)
    room = limits.context - len(ids)
    if room < (1 if wanted is None else wanted):
        raise context_length_exceeded(len(ids), 1 if wanted is None else wanted, limits.context, param)
    return room if wanted is None else wanted


def _job(
    request: Request,
    prompts: Sequence[tuple[Sequence[int], int]],
    logprobs: int,
    limits: Limits,
    seed: int,
    bad_words: BadWords,
) -> Job:
    sampling = msgspec.structs.replace(_sampling(request, logprobs, limits, seed), bad_words=bad_words)
    count = request.n or 1
    if isinstance(request, CompletionRequest):
        count = request.best_of or count
    extras = extras_of(request, limits)
    scores = max(extras.prompt_logprobs, extras.echo_logprobs)
    choices = tuple(
        Choice(
            index=place * count + choice,
            prompt=place,
            sampling=msgspec.structs.replace(sampling, choice=choice),
            max_tokens=length,
            prompt_logprobs=-1 if choice else scores,
        )
        for place, (_, length) in enumerate(prompts)
        for choice in range(count)
    )
    for choice in choices:
        if sampling.min_tokens > choice.max_tokens:
            message = f"`min_tokens` is {sampling.min_tokens}, more than the {choice.max_tokens} tokens allowed"
            raise invalid(message, "min_tokens")
    stop = request.stop
    options = request.stream_options
    return Job(
        prompts=tuple(TokenArray.of(ids) for ids, _ in prompts),
        choices=choices,
        stops=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        skip_special_tokens=request.skip_special_tokens is not False,
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        session=request.session or request.session_id or request.prompt_cache_key or request.user or "",
        key=request.safety_identifier or request.user or "",
        pin=request.group,
        priority=request.priority or 0,
        tenant=_tenant(request.cache_salt),
        extras=extras,
    )


def _tenant(salt: str | None) -> str:
    """Only requests of the same salt share what is cached; the salt itself goes nowhere."""
    return "" if salt is None else hashlib.sha256(salt.encode()).hexdigest()[:32]


def _sampling(request: Request, logprobs: int, limits: Limits, seed: int) -> Sampling:
    own = tuple(request.stop_token_ids or ())
    stops = own if request.ignore_eos else (*limits.eos_token_ids, *own)
    return Sampling(
        temperature=_or(request.temperature, 1.0),
        top_p=max(LEAST_TOP_P, _or(request.top_p, 1.0)),
        top_k=max(0, request.top_k or 0),
        min_p=_or(request.min_p, 0.0),
        seed=(seed if request.seed is None else request.seed) & _SEED_MASK,
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        logit_bias=tuple(sorted((request.logit_bias or {}).items())),
        allowed_token_ids=tuple(dict.fromkeys(request.allowed_token_ids or ())),
        stop_token_ids=tuple(dict.fromkeys(stops)),
        min_tokens=request.min_tokens or 0,
        logprobs=logprobs,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
