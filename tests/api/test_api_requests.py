"""Every parameter: its illegal values are refused by its name, and what is not served is refused, not ignored."""

import json
import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemesh.api import formats
from edgemesh.api.check import check_chat, check_completion, check_detokenize, check_tokenize
from edgemesh.api.decode import BodyDecoder
from edgemesh.api.errors import ApiError
from edgemesh.api.formats import MAX_CHOICE_CHARS, MAX_GRAMMAR_CHARS, MAX_REGEX_CHARS
from edgemesh.api.limits import Limits
from edgemesh.api.openai import (
    NEUTRAL,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

LIMITS = Limits(model="tiny", context=128, vocab_size=1000, eos_token_ids=(0,), groups=2)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "tiny", "prompt": "hi"}
KINDS = {"chat": (ChatRequest, CHAT), "completion": (CompletionRequest, COMPLETION)}
DECODER = BodyDecoder()

TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

BOTH = {
    "model": [None, 1, "", "other", "x" * 600],
    "n": [0, -1, 129, 1.5, "1", True, []],
    "stream": [1, "true", []],
    "temperature": [-0.1, 2.1, "1", [], True],
    "top_p": [-1, 1.01, "x"],
    "top_k": [-2, 1 << 31, 0.5, "5"],
    "min_p": [-0.1, 1.1, "x"],
    "seed": [1 << 63, -(1 << 63) - 1, 1.5, "7"],
    "repetition_penalty": [0, 0.0099, 1e-300, -1, 100.1, "x"],
    "presence_penalty": [-2.1, 2.1, "x"],
    "frequency_penalty": [-2.1, 2.1, []],
    "logit_bias": [[], {"1": 101}, {"1": -101}, {"x": 1}, {"-1": 1}, {"1000": 1}, {"1": "2"}, {"1.5": 1}],
    "stop": ["", [""], [1], 5, ["x"] * 17, "x" * 513, {}],
    "stop_token_ids": [[-1], [1000], ["1"], 5, [1.5], [1] * 129],
    "allowed_token_ids": [[], [-1], [1000], 5],
    "min_tokens": [-1, 1.5, "x", (1 << 20) + 1],
    "ignore_eos": [1, "x"],
    "skip_special_tokens": [0, "x"],
    "add_special_tokens": [0, "x"],
    "priority": [1001, -1001, 0.5],
    "user": [5, "x" * 129],
    "safety_identifier": [5, "x" * 129],
    "session": [5, "x" * 129],
    "prompt_cache_key": [5, "x" * 129],
    "request_id": [5, "x" * 129],
    "group": [-1, 2, 64, "0", 0.5],
    "include_stop_str_in_output": [1, "x"],
    "truncate_prompt_tokens": [-2, 0, 129, 1.5, "x"],
    "truncation_side": ["middle", 5, "left"],
    "bad_words": ["x", [""], [5], ["x" * 129], ["x"] * 129],
    "return_tokens_as_token_ids": [1, "x"],
    "return_token_ids": [1, "x"],
    "cache_salt": ["", "x" * 1025, 5],
    "session_id": [5, "x" * 129],
    "prompt_logprobs": [-1, 21, 0.5, "x", True],
    "watermarking": [True],
    "logprob_token_ids": [[1], []],
    "logits_processors": [["x"]],
    "repetition_detection": [{}],
    "stream_interval": [0, 2, True],
    "kv_transfer_params": [{}],
    "ec_transfer_params": [{}],
    "vllm_xargs": [{"x": 1}],
    "routed_experts_prompt_start": [1, False],
    "return_token_offsets": [True],
    "return_mm_kwargs": [False],
    "guided_decoding_backend": ["x"],
    "guided_whitespace_pattern": ["x"],
    "length_penalty": [2, True],
    "use_beam_search": [True],
    "spaces_between_special_tokens": [0, "x"],
    "response_format": [
        {"type": "json_schema", "json_schema": {}},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": True}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": 1}},
        {"type": "json_object", "schema": {}},
        {"type": "xml"},
        "text",
        {},
    ],
    "structured_outputs": [{}, {"json": 5}, {"regex": ""}, {"choice": []}, {"grammar": ""}, {"json_object": False}],
    "guided_json": [5, [], "", True],
    "guided_regex": [5, "", "x" * (MAX_REGEX_CHARS + 1)],
    "guided_choice": [[], "a", [5], ["x" * (MAX_CHOICE_CHARS + 1)], ["a"] * (formats.MAX_CHOICES + 1)],
    "guided_grammar": [5, "", "x" * (MAX_GRAMMAR_CHARS + 1)],
    "stream_options": [{}, 5],
}
ONLY = {
    "chat": {
        "messages": [None, [], "hi", [5], {}],
        "max_tokens": [0, -1, 1.5, "5", (1 << 20) + 1],
        "max_completion_tokens": [0, -1, 1.5, "5"],
        "logprobs": [1, "x"],
        "top_logprobs": [1, -1, 21, "x"],
        "add_generation_prompt": [1],
        "chat_template_kwargs": [5, {"messages": []}, {"a b": 1}, {"__x": 1}, {str(k): 1 for k in range(33)}],
        "tools": [
            [{}],
            {},
            5,
            [TOOL | {"type": "custom"}],
            [TOOL, TOOL],
            [{"type": "function", "function": {"name": "f g"}}],
            [{"type": "function", "function": {"name": "f\n"}}],
            [{"type": "function", "function": {"name": "x" * 129}}],
            [{"type": "function", "function": {"name": "f", "parameters": []}}],
            [{"type": "function", "function": {"name": "f", "strict": 1}}],
            [{"type": "function", "function": {"name": f"f{number}"}} for number in range(129)],
        ],
        "tool_choice": ["auto", "required", {}, "f", {"type": "function", "function": {"name": "f"}}],
        "parallel_tool_calls": [1, "x"],
        "include_reasoning": [1, "x"],
        "thinking_token_budget": [-1, 0.5, "x", (1 << 20) + 1],
        "functions": [[{}]],
        "function_call": ["auto", {}],
        "continue_final_message": [1, "x"],
        "chat_template": ["x", ""],
        "documents": ["x", [5], [{"a": 1}], [{}] * 257, [{"x" * 129: "y"}]],
        "echo": [1, True],
        "metadata": [{"a": 5}, {"x" * 65: "y"}, {"x": "y" * 513}, {str(key): "" for key in range(17)}, "x"],
        "return_prompt_text": [True],
        "mm_processor_kwargs": [{"x": 1}],
        "media_io_kwargs": [{"x": {}}],
        "prompt_cache_options": [{}],
        "store": [True],
        "service_tier": ["flex", 5],
        "modalities": [["audio"], ["text", "audio"], []],
        "audio": [{}],
        "prediction": [{}],
        "reasoning_effort": ["much", 5],
        "verbosity": ["low"],
        "web_search_options": [{}],
        "prompt_cache_retention": ["24h"],
        "moderation": [{}],
    },
    "completion": {
        "prompt": [None, "", [], [""], [[]], [1, "x"], [[1], "x"], [[1], []], [-1], [1000], [[1, 1000]], [1.5], 5, {}],
        "max_tokens": [0, -1, 1.5, "5"],
        "logprobs": [-1, 21, True, "x"],
        "echo": [1, "x"],
        "best_of": [0, 129, "x"],
        "suffix": ["x", 5],
        "prompt_embeds": ["x", []],
        "thinking_token_budget": [0, 100],
    },
}
ILLEGAL = [(kind, param, value) for kind in KINDS for param, values in (BOTH | ONLY[kind]).items() for value in values]


def decode(kind, body):
    """What the endpoint does before it tokenises."""
    request = DECODER.decode(body if isinstance(body, bytes) else json.dumps(body).encode(), KINDS[kind][0])
    (check_chat if kind == "chat" else check_completion)(request, LIMITS)
    return request


def refusal(kind, body):
    with pytest.raises(ApiError) as caught:
        decode(kind, body)
    error = json.loads(caught.value.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return caught.value.status, error


@pytest.mark.parametrize(("kind", "param", "value"), ILLEGAL)
def test_an_illegal_value_is_refused_by_name(kind, param, value):
    status, error = refusal(kind, KINDS[kind][1] | {param: value})
    assert status == (404 if param == "model" and value in ("", "other") else 400)
    assert error["param"].split(".")[0].split("[")[0] == param
    assert param in error["message"] or status == 404


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_has_its_illegal_values_here(kind):
    assert set(KINDS[kind][0].__struct_fields__) == set(BOTH) | set(ONLY[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_null_is_as_good_as_absent(kind):
    required = set(KINDS[kind][1])
    decode(kind, KINDS[kind][1] | {name: None for name in KINDS[kind][0].__struct_fields__ if name not in required})


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_ask_for_nothing_are_taken(kind):
    table = NEUTRAL[KINDS[kind][0].__name__]
    for param, (values, _) in table.items():
        for value in values:
            decode(kind, KINDS[kind][1] | {param: value})


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_is_acted_upon_or_in_the_table(kind):
    """A field of type Any says nothing about its values: only the table may, so that none is ignored."""
    struct = KINDS[kind][0]
    hints = typing.get_type_hints(struct)
    untyped = {name for name in struct.__struct_fields__ if hints[name] is typing.Any}
    assert untyped == set(NEUTRAL[struct.__name__])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)
@given(name=st.text(min_size=1, max_size=20))
def test_an_unknown_parameter_is_named(kind, name):
    if name in KINDS[kind][0].__struct_fields__:
        return
    status, error = refusal(kind, KINDS[kind][1] | {name: None})
    assert (status, error["param"], error["code"]) == (400, name, "unknown_parameter")


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_parameter_is_named(kind):
    for name in KINDS[kind][1]:
        body = {key: value for key, value in KINDS[kind][1].items() if key != name}
        status, error = refusal(kind, body)
        assert (status, error["param"], error["code"]) == (400, name, "missing_required_parameter")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "wizard", "content": "x"}, "messages[1].role"),
        ({"role": "function", "name": "f", "content": "x"}, "messages[1].role"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": "c9"}, "messages[1].tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": ""}, "messages[1].tool_call_id"),
        ({"role": "user", "content": "x", "tool_call_id": "c1"}, "messages[1].tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[1].tool_calls"),
        ({"role": "assistant"}, "messages[1].content"),
        ({"role": "assistant", "tool_calls": []}, "messages[1].content"),
        ({"role": "assistant", "tool_calls": [CALL | {"id": 5}]}, "messages[1].tool_calls[0].id"),
        (
            {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": {}}}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"}, "messages[1].reasoning"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": []}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "audio", "text": "x"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}, "messages[1].content[0].y"),
        ({"role": "user", "content": "x", "tools": []}, "messages[1].tools"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[1].tool_calls[0].id"),
        ({"role": "assistant", "content": "x", "function_call": {}}, "messages[1].function_call"),
        ({"role": "assistant", "content": "x", "audio": {}}, "messages[1].audio"),
        ({"role": "assistant", "content": "x", "refusal": "no"}, "messages[1].refusal"),
        ({"role": "assistant", "content": "x", "annotations": [1]}, "messages[1].annotations"),
        ({"role": "user", "content": "x", "name": "y" * 129}, "messages[1].name"),
        ({"role": "user", "content": "x", "reasoning_content": 5}, "messages[1].reasoning_content"),
    ],
)
def test_a_bad_message_is_named(message, param):
    status, error = refusal("chat", CHAT | {"messages": [*CHAT["messages"], message]})
    assert (status, error["param"]) == (400, param)


def test_messages_as_the_openai_client_sends_them_back_are_taken():
    turn = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": [], "audio": None}
    request = decode("chat", CHAT | {"messages": [*CHAT["messages"], turn]})
    assert set(NEUTRAL["ChatMessage"]) < set(ChatMessage.__struct_fields__)
    assert request.messages[1].content == "x"


@pytest.mark.parametrize(
    ("kind", "extra", "param"),
    [
        ("chat", {"stream_options": {"include_usage": True}}, "stream_options"),
        (
            "chat",
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ("chat", {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ("chat", {"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
        ("chat", {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ("completion", {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ("chat", {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ("completion", {"max_tokens": 0}, "max_tokens"),
        ("completion", {"prompt": ["x"] * 100, "n": 3}, "prompt"),
        ("completion", {"prompt": ["x"] * 100, "best_of": 3}, "prompt"),
        ("completion", {"n": 3, "best_of": 2}, "best_of"),
        ("completion", {"n": 2, "best_of": 3, "stream": True}, "best_of"),
        (
            "chat",
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ("chat", {"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ],
)
def test_values_that_contradict_each_other(kind, extra, param):
    status, error = refusal(kind, KINDS[kind][1] | extra)
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"\xff\xfe",
        b'{"model": "tiny", "prompt": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model":"tiny","prompt":"\\ud800"}',
        b'{"model":"tiny","prompt":"x","temperature":NaN}',
        b'{"model":"tiny","prompt":"x","suffix":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_a_body_that_is_no_json(body):
    status, error = refusal("completion", body)
    assert (status, error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("body", [b"[]", b"5", b'"x"', b"null", b"true"])
def test_json_that_is_no_object(body):
    assert refusal("chat", body)[0] == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_whatever_is_sent_is_taken_or_refused_with_a_status(kind, data):
    names = st.sampled_from(KINDS[kind][0].__struct_fields__) | st.text(max_size=6)
    body = KINDS[kind][1] | data.draw(st.dictionaries(names, JSON, max_size=3))
    refused = None
    try:
        decode(kind, body)
    except ApiError as error:
        refused = error
    assert refused is None or (refused.status in {400, 404} and json.loads(refused.body)["error"]["message"])


def test_tokenize_and_detokenize_check_theirs():
    for body, param in (
        ({}, "prompt"),
        ({"prompt": "x", "messages": CHAT["messages"]}, "prompt"),
        ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"prompt": "x", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"prompt": "x", "continue_final_message": True}, "continue_final_message"),
        ({"prompt": "x", "documents": []}, "documents"),
        (
            {"messages": CHAT["messages"], "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        ({"messages": CHAT["messages"], "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
        ({"prompt": "x", "model": "other"}, "model"),
        ({"prompt": "x", "y": 1}, "y"),
    ):
        with pytest.raises(ApiError) as caught:
            check_tokenize(DECODER.decode(json.dumps(body).encode(), TokenizeRequest), LIMITS)
        assert caught.value.detail.param == param
    for tokens in ([-1], [1000], [1, 1 << 40]):
        with pytest.raises(ApiError) as caught:
            check_detokenize(DECODER.decode(msgspec.json.encode({"tokens": tokens}), DetokenizeRequest), LIMITS)
        assert caught.value.detail.param == "tokens"
