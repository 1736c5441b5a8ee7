"""How much a JSON text holds is counted without decoding it, wherever it is cut."""

import json
from unittest.mock import patch

import msgspec
import pytest
from api_tokenizers import byte_level, model_text
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemesh.api import extent
from edgemesh.api.decode import BodyDecoder
from edgemesh.api.errors import ApiError
from edgemesh.api.extent import MAX_CONTAINERS, MAX_VALUES, PART_CONTAINERS, PART_VALUES, within
from edgemesh.api.openai import ChatMessage, ChatRequest, CompletionRequest
from edgemesh.api.tool_types import Function, FunctionCall, Tool, ToolCall
from edgemesh.api.translation import request_of

TEXTS = st.text(st.sampled_from('ab,"\\[]{}:\n é'), max_size=8)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=30)


def count(value):
    """(values, containers), where an empty container counts as if something stood in it."""
    if not isinstance(value, list | dict):
        return 1, 0
    inner = list(map(count, value.values() if isinstance(value, dict) else value)) or [(1, 0)]
    return 1 + sum(each for each, _ in inner), 1 + sum(each for _, each in inner)


@settings(max_examples=300, deadline=None)
@given(value=VALUES, piece=st.integers(1, 9), indent=st.sampled_from([None, 2]), ascii_only=st.booleans())
def test_a_text_holds_as_many_values_as_decoding_it_gives(value, piece, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    values, containers = count(value)
    with patch.object(extent, "_PIECE", piece):
        assert within(text, values, max(1, containers))
        assert not within(text, values - 1)
        assert containers == 0 or not within(text, containers=containers - 1)


BODY = b'{"model":"m","messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":[%b1]}}'


@pytest.mark.parametrize("inside", [b"[]," * MAX_CONTAINERS, b"1," * MAX_VALUES, b'"[",' * MAX_VALUES])
def test_a_body_that_holds_more_values_than_any_request_needs_is_refused_before_it_is_decoded(inside):
    with pytest.raises(ApiError, match="the body holds more than") as refused:
        BodyDecoder().decode(BODY % inside, ChatRequest)
    assert (refused.value.status, refused.value.detail.code) == (400, "too_many_values")
    with pytest.raises(ApiError, match="the body holds more than"):
        request_of(BODY % inside, ChatRequest, None)


def test_long_texts_and_long_lists_are_no_reason_to_refuse_a_body():
    text = '[{",' * (4 << 18)
    request = BodyDecoder().decode(msgspec.json.encode({"model": "m", "prompt": text}), CompletionRequest)
    assert request.prompt == text
    ids = [[7] * 4096] * 256
    assert BodyDecoder().decode(msgspec.json.encode({"model": "m", "prompt": ids}), CompletionRequest).prompt == ids


TEMPLATE = (
    "<tool_call>{{ tools | tojson }}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


def test_what_a_template_writes_out_again_has_bounds_of_its_own():
    text = model_text(byte_level().tokenizer, template=TEMPLATE)
    for values in ([1] * PART_VALUES, [[]] * PART_CONTAINERS):
        many = {"a": values}
        tool = Tool(type="function", function=Function(name="f", parameters=many))
        with pytest.raises(ApiError, match="`tools` hold more than") as refused:
            text.render([ChatMessage(role="user", content="x")], add_generation_prompt=True, kwargs=None, tools=[tool])
        assert refused.value.detail.param == "tools"
        call = ToolCall(id="c", function=FunctionCall(name="f", arguments=json.dumps(many)))
        messages = [ChatMessage(role="user", content="x"), ChatMessage(role="assistant", tool_calls=[call])]
        with pytest.raises(ApiError, match="the `arguments` of a call hold more than") as refused:
            text.template.render(messages)
        assert refused.value.status == 400
