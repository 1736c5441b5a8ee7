"""A typed request's values against each other and against the model, before anything is tokenised."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from edgemesh.api.conversation import check_tools
from edgemesh.api.errors import ApiError, invalid, model_not_found
from edgemesh.api.grammar import check_constraints
from edgemesh.api.limits import Limits
from edgemesh.api.openai import MAX_CHOICES, ChatRequest, CompletionRequest, DetokenizeRequest, Request, TokenizeRequest

AT_ONCE: Final = 1 << 16
Prompt = str | list[int]
"""One prompt of a completion: a text or token ids."""


def check_model(model: str | None, limits: Limits) -> None:
    """Raise 404 unless ``model`` is the one served (none was named: it is)."""
    if model is not None and model != limits.model:
        raise model_not_found(model[:128], limits.model)


def check_request(request: Request, limits: Limits) -> None:
    """Raise ``ApiError`` for a value that chat and completions both refuse."""
    check_model(request.model, limits)
    if request.stream_options is not None and not request.stream:
        message = "`stream_options` is only allowed with `stream`: true"
        raise invalid(message, "stream_options")
    options = request.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        message = "`stream_options.continuous_usage_stats` is only allowed with `include_usage`: true"
        raise invalid(message, "stream_options.continuous_usage_stats")
    if request.prompt_logprobs is not None and request.stream:
        message = "`prompt_logprobs` are not available with `stream`: true; leave one of them out"
        raise invalid(message, "prompt_logprobs")
    _check_truncation(request, limits)
    if request.group is not None and request.group >= limits.groups:
        message = f"`group` is {request.group}; this mesh has groups 0 to {limits.groups - 1}"
        raise invalid(message, "group")
    check_constraints(request)
    check_tokens(request.logit_bias or (), limits, "logit_bias")
    check_tokens(request.stop_token_ids or (), limits, "stop_token_ids")
    check_tokens(request.allowed_token_ids or (), limits, "allowed_token_ids")


def _check_truncation(request: Request, limits: Limits) -> None:
    most = request.truncate_prompt_tokens
    if most is None:
        if request.truncation_side is not None:
            message = "`truncation_side` is only allowed with `truncate_prompt_tokens`"
            raise invalid(message, "truncation_side")
    elif most == 0 or most > limits.context:
        message = f"`truncate_prompt_tokens` is {most}; allowed are -1 (what fits) and 1 to {limits.context}"
        raise invalid(message, "truncate_prompt_tokens")


def check_chat(request: ChatRequest, limits: Limits) -> None:
    """Raise ``ApiError`` for a value that chat refuses."""
    check_request(request, limits)
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        message = "give `max_completion_tokens` or `max_tokens`, not both"
        raise invalid(message, "max_tokens")
    if request.top_logprobs is not None and not request.logprobs:
        message = "`top_logprobs` is only allowed with `logprobs`: true"
        raise invalid(message, "top_logprobs")
    check_tools(request)
    _check_continued(request)
    if request.echo and not request.continue_final_message:
        message = "`echo` repeats the message that is continued; it is only allowed with `continue_final_message`: true"
        raise invalid(message, "echo")
    check_kwargs(request)


def _check_continued(request: ChatRequest | TokenizeRequest) -> None:
    if request.continue_final_message and request.add_generation_prompt:
        message = "`continue_final_message` continues the last message; `add_generation_prompt` would begin another"
        raise invalid(message, "add_generation_prompt")


def check_kwargs(request: ChatRequest | TokenizeRequest) -> None:
    """Raise ``ApiError`` for template arguments that would replace what the server itself gives the template."""
    for name in request.chat_template_kwargs or ():
        if name in _OWN or not name.isidentifier() or name.startswith("_"):
            message = f"`chat_template_kwargs` may not set `{name}`"
            raise invalid(message, "chat_template_kwargs")


_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "pad_token"})


def check_completion(request: CompletionRequest, limits: Limits) -> list[Prompt]:
    """The prompts of a completion, each a text or legal ids. Raises ``ApiError``."""
    check_request(request, limits)
    drawn = request.n or 1
    if request.best_of is not None:
        if request.best_of < drawn:
            message = f"`best_of` is {request.best_of}, less than the {drawn} answers of `n`"
            raise invalid(message, "best_of")
        if request.best_of > drawn and request.stream:
            message = "`best_of` above `n` compares whole answers; it is not allowed with `stream`: true"
            raise invalid(message, "best_of")
        drawn = request.best_of
    if request.max_tokens == 0 and not request.echo and request.prompt_logprobs is None:
        message = "`max_tokens` is 0; the least is 1 (0 is allowed with `echo` or `prompt_logprobs`)"
        raise invalid(message, "max_tokens")
    prompts = _prompts(request.prompt)
    for prompt in prompts:
        if not prompt:
            message = "`prompt` is empty; give at least one token"
            raise invalid(message, "prompt", "empty_prompt")
        if not isinstance(prompt, str):
            check_tokens(prompt, limits, "prompt")
    if len(prompts) * drawn > MAX_CHOICES:
        message = f"`prompt` has {len(prompts)} prompts of {drawn} choices; the most is {MAX_CHOICES} choices in all"
        raise invalid(message, "prompt")
    return prompts


def check_tokenize(request: TokenizeRequest, limits: Limits) -> None:
    """Raise ``ApiError`` unless exactly one form of text is given, with the parameters of that form."""
    check_model(request.model, limits)
    if (request.prompt is None) == (request.messages is None):
        message = "give either `prompt` or `messages`"
        raise invalid(message, "prompt", "missing_required_parameter" if request.prompt is None else None)
    if request.messages is None:
        for name in ("add_generation_prompt", "continue_final_message", "documents", "chat_template_kwargs", "tools"):
            if getattr(request, name) is not None:
                message = f"`{name}` is only allowed with `messages`"
                raise invalid(message, name)
    check_tools(request)
    _check_continued(request)
    check_kwargs(request)


def check_detokenize(request: DetokenizeRequest, limits: Limits) -> None:
    """Raise ``ApiError`` for ids that are not in the vocabulary."""
    check_model(request.model, limits)
    check_tokens(request.tokens, limits, "tokens")


def check_tokens(ids: Iterable[int], limits: Limits, param: str) -> None:
    """Raise ``ApiError`` (400) for an id that is not in the vocabulary."""
    low = high = 0
    rest = iter(ids)
    # No call looks at so many that everything else would wait for it.
    while some := list(islice(rest, AT_ONCE)):
        low, high = min(low, *some), max(high, *some)
    if low < 0 or high >= limits.vocab_size:
        wrong = low if low < 0 else high
        message = f"`{param}` holds token id {wrong}; this model's ids are 0 to {limits.vocab_size - 1}"
        raise invalid(message, param, "token_out_of_vocabulary")


def _prompts(prompt: str | list[str | int | list[int]]) -> list[Prompt]:
    if isinstance(prompt, str):
        return [prompt]
    texts = [each for each in prompt if isinstance(each, str)]
    ids = [each for each in prompt if isinstance(each, int)]
    lists = [each for each in prompt if isinstance(each, list)]
    if len(ids) == len(prompt):
        return [ids]
    if len(texts) == len(prompt):
        return list(texts)
    if len(lists) == len(prompt):
        return list(lists)
    raise _mixed()


def _mixed() -> ApiError:
    message = "`prompt` must be a text, a list of texts, a list of token ids, or a list of such lists"
    return invalid(message, "prompt")
