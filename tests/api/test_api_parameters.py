"""The table of parameters misses none of OpenAI's or vLLM's, and says of each what it does or why it is refused."""

import json
import typing

import msgspec
import pytest
from msgspec import Meta
from openai.types import completion_create_params as openai_completions
from openai.types.chat import completion_create_params as openai_chat

from edgemesh.api.decode import BodyDecoder
from edgemesh.api.errors import ApiError
from edgemesh.api.neutral import EVERY_NEUTRAL
from edgemesh.api.notes import NOTES, SURFACE_NOTES
from edgemesh.api.openai import NEUTRAL, ChatRequest, CompletionRequest
from edgemesh.api.parameters import FILE, parameters, table, words
from edgemesh.api.reasons import WHY
from edgemesh.api.routes import ROUTES
from edgemesh.cli.main import application

VLLM = [
    "model",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "n",
    "presence_penalty",
    "response_format",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "user",
    "use_beam_search",
    "top_k",
    "min_p",
    "repetition_penalty",
    "watermarking",
    "length_penalty",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "prompt_logprobs",
    "logprob_token_ids",
    "allowed_token_ids",
    "bad_words",
    "echo",
    "add_special_tokens",
    "structured_outputs",
    "priority",
    "request_id",
    "session_id",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "routed_experts_prompt_start",
    "return_token_offsets",
    "return_mm_kwargs",
    "cache_salt",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
    "repetition_detection",
    "stream_interval",
    "thinking_token_budget",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "logits_processors",
]
VLLM_CHAT = [
    "messages",
    "top_logprobs",
    "max_completion_tokens",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "include_reasoning",
    "parallel_tool_calls",
    "add_generation_prompt",
    "continue_final_message",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "return_prompt_text",
]
VLLM_COMPLETIONS = ["prompt", "suffix", "best_of", "prompt_embeds"]
KINDS = {
    "chat": (ChatRequest, openai_chat, VLLM + VLLM_CHAT),
    "completions": (CompletionRequest, openai_completions, VLLM + VLLM_COMPLETIONS),
}
BODIES = {
    "chat": {"model": "tiny", "messages": [{"role": "user", "content": "x"}]},
    "completions": {"model": "tiny", "prompt": "x"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_parameter_of_openai_or_vllm_is_unknown(kind):
    struct, theirs, vllm = KINDS[kind]
    openai = set(typing.get_type_hints(theirs.CompletionCreateParamsStreaming))
    assert len(openai) > 15
    assert openai | set(vllm) <= set(struct.__struct_fields__)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_in_the_table_and_says_what_it_does_or_why_it_is_refused(kind):
    struct = KINDS[kind][0]
    text = table()
    for each in parameters(struct):
        assert f"| `{each.name}` |" in text
        assert each.values, each.name
        assert each.refused if each.name in NEUTRAL[struct.__name__] else each.name in NOTES, each.name


def test_nothing_is_explained_that_is_not_there():
    fields = set(ChatRequest.__struct_fields__) | set(CompletionRequest.__struct_fields__)
    neutral = set().union(*EVERY_NEUTRAL.values())
    assert set(NOTES) <= fields
    assert set(WHY) <= neutral
    bodies = {route.path: route.body for route in ROUTES if route.body is not None}
    for path, notes in SURFACE_NOTES.items():
        assert set(notes) <= set(bodies[path].__struct_fields__)
    own = [text for notes in SURFACE_NOTES.values() for text in notes.values()]
    for text in (*NOTES.values(), *WHY.values(), *own):
        assert "\n" not in text
        assert len(text) < 160


REFUSED = [(kind, name) for kind, (struct, _, _) in KINDS.items() for name in NEUTRAL[struct.__name__]]


@pytest.mark.parametrize(("kind", "name"), REFUSED)
def test_a_refusal_says_why_and_what_is_allowed(kind, name):
    struct = KINDS[kind][0]
    body = json.dumps(BODIES[kind] | {name: {"a": [object.__name__]}}).encode()
    with pytest.raises(ApiError) as caught:
        BodyDecoder().decode(body, struct)
    detail = caught.value.detail
    assert (caught.value.status, detail.param, detail.code) == (400, name, "unsupported_parameter")
    assert detail.message.startswith(f"`{name}` is not supported by this server")
    assert NEUTRAL[struct.__name__][name][1] in detail.message
    assert WHY.get(name, "") in detail.message


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (bool, "`true`, `false`"),
        (int, "integer"),
        (typing.Annotated[int, Meta(ge=1, lt=1 << 31)], "integer 1 to 2^31 - 1"),
        (typing.Annotated[int, Meta(ge=0)], "integer 0 or more"),
        (typing.Annotated[float, Meta(gt=0.0, le=1.0)], "number above 0 to 1"),
        (typing.Annotated[float, Meta(lt=2.5)], "number up to below 2.5"),
        (typing.Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)], "integer -2^63 to 2^63 - 1"),
        (typing.Annotated[str, Meta(min_length=1, max_length=9)] | None, "text of 1 to 9 characters"),
        (typing.Literal["a", "b"], '`"a"`, `"b"`'),
        (str | list[int], "text or list of integer"),
        (typing.Annotated[list[str | int], Meta(max_length=3)], "list of at most 3 of (text or integer)"),
        (dict[str, int], "object: text to integer"),
        (typing.Any, "any JSON"),
    ],
)
def test_types_in_words(kind, text):
    assert words(msgspec.inspect.type_info(kind)) == text


def test_the_command_prints_and_writes_it(tmp_path, capsys):
    application(["api", "parameters"])(["api", "parameters"], standalone_mode=False)
    assert capsys.readouterr().out == table()
    arguments = ["api", "parameters", "--write", str(tmp_path)]
    application(arguments)(arguments, standalone_mode=False)
    assert (tmp_path / FILE).read_text() == table()
