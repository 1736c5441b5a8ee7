import json

import pytest

from edgemesh.api.check import check_chat, check_tokenize
from edgemesh.api.decode import BodyDecoder
from edgemesh.api.errors import ApiError
from edgemesh.api.limits import Limits
from edgemesh.api.openai import ChatRequest, TokenizeRequest

LIMITS = Limits(model="tiny", context=128, vocab_size=1000, eos_token_ids=(0,), groups=2)
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "description": "does", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "g", "strict": True}}


def call(name):
    return {"id": name, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def decode(**fields):
    body = {"model": "tiny", "messages": [USER]} | fields
    request = BodyDecoder().decode(json.dumps(body).encode(), ChatRequest)
    check_chat(request, LIMITS)
    return request


def refused(**fields):
    with pytest.raises(ApiError) as caught:
        decode(**fields)
    assert caught.value.status == 400
    return caught.value.detail


def test_a_whole_conversation_with_tools_is_taken():
    turns = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call("c1"), call("c2")], "reasoning": "well"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "one"}]},
        {"role": "assistant", "reasoning_content": "only thought"},
        {"role": "assistant", "content": "done", "tool_calls": []},
    ]
    request = decode(messages=turns, tools=[TOOL, OTHER], parallel_tool_calls=False)
    assert [each.id for each in request.messages[1].tool_calls] == ["c1", "c2"]
    assert request.tools[0].function.parameters == {"type": "object"}


@pytest.mark.parametrize("choice", ["none", "auto", "required", None, {"type": "function", "function": {"name": "g"}}])
def test_every_form_of_a_choice_is_taken(choice):
    decode(tools=[TOOL, OTHER], tool_choice=choice)


def test_a_choice_is_of_tools_that_are_there():
    assert refused(tool_choice="required").param == "tool_choice"
    assert refused(tools=[], tool_choice="auto").param == "tool_choice"
    detail = refused(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}})
    assert detail.param == "tool_choice.function.name"
    assert "'g'" in detail.message
    decode(tool_choice="none")


def test_two_tools_cannot_have_one_name():
    assert refused(tools=[OTHER, TOOL, TOOL]).param == "tools[2].function.name"


@pytest.mark.parametrize("kind", ["string", ["object", "null"], 5, None])
def test_arguments_are_an_object(kind):
    tool = {"type": "function", "function": {"name": "h", "parameters": {"type": kind}}}
    assert refused(tools=[TOOL, tool]).param == "tools[1].function.parameters"
    decode(tools=[TOOL, {"type": "function", "function": {"name": "h", "parameters": {}}}])


def test_a_call_is_answered_after_it_was_made():
    answer = {"role": "tool", "tool_call_id": "c1", "content": "x"}
    detail = refused(messages=[USER, answer, {"role": "assistant", "tool_calls": [call("c1")]}])
    assert detail.param == "messages[1].tool_call_id"
    assert "must answer a call" in detail.message


@pytest.mark.parametrize("field", ["functions", "function_call"])
def test_the_old_names_point_at_the_new_ones(field):
    detail = refused(**{field: [{"name": "f"}] if field == "functions" else "auto"})
    assert (detail.param, detail.code) == (field, "unsupported_parameter")
    assert "`tool" in detail.message


def test_tokenize_takes_tools_with_messages_only():
    def tokenize(**fields):
        request = BodyDecoder().decode(json.dumps(fields).encode(), TokenizeRequest)
        check_tokenize(request, LIMITS)

    tokenize(messages=[USER], tools=[TOOL])
    for fields in ({"prompt": "x", "tools": [TOOL]}, {"messages": [USER], "tools": [TOOL, TOOL]}):
        with pytest.raises(ApiError) as caught:
            tokenize(**fields)
        assert caught.value.detail.param.startswith("tools")
