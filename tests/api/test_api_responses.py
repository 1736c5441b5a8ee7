"""Responses: what requests ask of a chat, and answers, whole and as events, as OpenAI's client reads them."""

import json
import typing

import pytest
from api_surfaces import events_of, said, uncut
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent, response_create_params
from pydantic import TypeAdapter

from edgemesh.api.errors import ApiError, invalid, too_busy, unavailable
from edgemesh.api.events import CallArguments, CallBegin, CallEnd, Content, Reasoning
from edgemesh.api.forms import Part
from edgemesh.api.made import MadeForm
from edgemesh.api.replies import usage
from edgemesh.api.responses import RESPONSES, RESPONSES_NEUTRAL, ResponsesRequest
from edgemesh.api.responses_chat import chat_of_response
from edgemesh.api.responses_events import ResponseMaker
from edgemesh.api.responses_replies import begun
from edgemesh.api.responses_toolbox import Toolbox
from edgemesh.api.sse import Ending
from edgemesh.api.translation import request_of

USAGE = usage(5, 7, 3)
EVENT = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def asked(**fields):
    body = {"model": "m", "input": "hi"} | fields
    return request_of(json.dumps(body).encode(), ResponsesRequest, RESPONSES)


def chat(**fields):
    return translated(**fields).chat


def translated(**fields):
    request = asked(**fields)
    return chat_of_response(request, Toolbox(request.tools or ()))


def maker(request=None, *, summarise=False):
    return made_of(begun(request or asked(), "resp_ab", 10, "m"), 12, summarise=summarise)


def made_of(begun, now, **fields):
    return ResponseMaker(begun, lambda: now, box=Toolbox([]), **fields)


def streamed(events, ending, *, summarise=False):
    """The events of a response, and the response itself."""
    made = maker(summarise=summarise)
    stream = made.begin(USAGE) + b"".join(made.say([event]) for event in events) + made.last(ending) + made.end(USAGE)
    return events_of(stream), json.loads(json.dumps(events_of(stream)[-1]["response"]))


def gathered(events):
    """The output that the deltas alone tell."""
    items = {}
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            items[event["output_index"]] = event["item"] | {"told": ""}
        elif kind.endswith(".delta"):
            items[event["output_index"]]["told"] += event["delta"]
    return [items[index] for index in sorted(items)]


def part(text):
    told = [Content(text)] if text else []
    return Part(0, told, Ending("stop"), None)


def text_of(item):
    if item["type"] == "function_call":
        return item["arguments"]
    [part] = item["content"] or item["summary"]
    return part["text"]


@settings(max_examples=150, deadline=None)
@given(events=said(), length=st.booleans(), summarise=st.booleans())
def test_a_stream_tells_what_the_whole_answer_is_and_every_event_is_openais(events, length, summarise):
    ending = Ending("length" if length else "stop")
    told, response = streamed(events, ending, summarise=summarise)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    for event in told:
        EVENT.validate_python(event)
    assert [(item["type"], item["id"], item["told"]) for item in gathered(told)] == [
        (item["type"], item["id"], text_of(item)) for item in response["output"]
    ]
    assert response["output"] == [event["item"] for event in told if event["type"] == "response.output_item.done"]
    whole = maker(summarise=summarise)
    whole.say(uncut(events))
    whole.last(ending)
    assert events_of(whole.end(USAGE))[-1]["response"] == response
    parsed = OpenAIResponse.model_validate(response)
    assert parsed.status == ("incomplete" if length else "completed")
    assert len({item["id"] for item in response["output"]}) == len(response["output"])


def test_what_is_thought_said_and_called_makes_items_in_that_order():
    events = [
        Reasoning("hm"),
        Content("He"),
        Content("llo"),
        CallBegin(0, "call_1", "f"),
        CallArguments(0, '{"a":'),
        CallArguments(0, "1}"),
        CallEnd(0),
    ]
    told, response = streamed(events, Ending("stop"))
    assert [(event["type"], event.get("output_index")) for event in told] == [
        ("response.created", None),
        ("response.in_progress", None),
        ("response.output_item.added", 0),
        ("response.content_part.added", 0),
        ("response.reasoning_text.delta", 0),
        ("response.reasoning_text.done", 0),
        ("response.content_part.done", 0),
        ("response.output_item.done", 0),
        ("response.output_item.added", 1),
        ("response.content_part.added", 1),
        ("response.output_text.delta", 1),
        ("response.output_text.delta", 1),
        ("response.output_text.done", 1),
        ("response.content_part.done", 1),
        ("response.output_item.done", 1),
        ("response.output_item.added", 2),
        ("response.function_call_arguments.delta", 2),
        ("response.function_call_arguments.delta", 2),
        ("response.function_call_arguments.done", 2),
        ("response.output_item.done", 2),
        ("response.completed", None),
    ]
    assert told[10] == {
        "type": "response.output_text.delta",
        "sequence_number": 10,
        "item_id": "msg_ab_1",
        "output_index": 1,
        "content_index": 0,
        "delta": "He",
        "logprobs": [],
    }
    thought, message, call = response["output"]
    assert thought == {
        "type": "reasoning",
        "id": "rs_ab_0",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    assert message == {
        "type": "message",
        "id": "msg_ab_1",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
    }
    assert call == {
        "type": "function_call",
        "id": "fc_ab_2",
        "status": "completed",
        "call_id": "call_1",
        "name": "f",
        "arguments": '{"a":1}',
    }
    assert response["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    }
    assert (response["created_at"], response["completed_at"]) == (10, 12)


def test_a_summary_has_events_of_its_own():
    told, response = streamed([Reasoning("hm")], Ending("stop"), summarise=True)
    assert [event["type"] for event in told if "summary" in event["type"]] == [
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
    ]
    assert response["output"][0]["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert response["output"][0]["content"] == []


def test_an_answer_without_a_word_is_an_empty_message():
    _, response = streamed([], Ending("stop"))
    assert [item["content"][0]["text"] for item in response["output"]] == [""]


def test_what_was_cut_says_so():
    told, response = streamed([Content("x")], Ending("length"))
    assert told[-1]["type"] == "response.incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("error", "code"), [(unavailable("gone"), "server_error"), (too_busy("full", 1), "rate_limit_exceeded")]
)
def test_a_failure_is_the_last_event(error, code):
    made = maker()
    made.say([Content("x")])
    told = events_of(made.fail(error))
    EVENT.validate_python(told[-1])
    response = told[-1]["response"]
    assert (told[-1]["type"], response["status"]) == ("response.failed", "failed")
    assert response["error"] == {"code": code, "message": error.detail.message}
    assert response["output"][0]["content"][0]["text"] == "x"


def test_a_whole_answer_says_back_what_was_asked():
    request = asked(
        instructions="be kind",
        max_output_tokens=9,
        metadata={"a": "b"},
        tools=[TOOL],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        temperature=0.5,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_object"}},
        user="me",
    )
    form = MadeForm(lambda head: made_of(begun(request, head.id, 1, "m"), 2, summarise=True))
    head = form.head("resp_1", 1, "m")
    body = json.loads(form.reply(head, [part("hello")], USAGE))
    OpenAIResponse.model_validate(body)
    assert body["output"][0]["content"][0]["text"] == "hello"
    assert (body["instructions"], body["max_output_tokens"], body["metadata"]) == ("be kind", 9, {"a": "b"})
    assert body["tools"] == [TOOL | {"description": None}]
    assert body["tool_choice"] == {"type": "function", "name": "f"}
    assert (body["parallel_tool_calls"], body["temperature"], body["top_p"]) == (False, 0.5, 1.0)
    assert (body["store"], body["background"], body["previous_response_id"]) == (False, False, None)
    assert body["reasoning"]["effort"] == "low"
    assert body["text"]["format"] == {"type": "json_object"}
    defaults = json.loads(MadeForm(lambda head: maker()).reply(head, [part("")], USAGE))
    assert (defaults["temperature"], defaults["tool_choice"], defaults["tools"]) == (1.0, "auto", [])
    assert defaults["text"]["format"] == {"type": "text"}


def test_a_text_is_a_users_turn_after_the_instructions():
    assert chat(instructions="be kind") == {
        "model": "m",
        "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}],
    }


def test_items_make_turns():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "id": "fc_1", "name": "f", "arguments": "{}", "call_id": "c1", "status": "completed"},
        {"type": "function_call", "name": "g", "arguments": "{}", "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "3", "annotations": [], "logprobs": []}],
        },
        {"type": "reasoning", "summary": []},
        {"role": "developer", "content": "short"},
    ]

    def call(name, ident):
        return {"id": ident, "type": "function", "function": {"name": name, "arguments": "{}"}}

    translation = translated(input=items)
    assert translation.chat["messages"] == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [call("f", "c1"), call("g", "c2")]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "assistant", "reasoning_content": "so", "content": "3"},
        {"role": "developer", "content": "short"},
    ]
    assert translation.request().messages[4].content == "3"
    assert list(translation.places) == [f"input[{at}]" for at in (0, 1, 4, 5, 6, 9)]


def test_the_output_of_an_answer_may_be_sent_back():
    events = [Reasoning("hm"), Content("x"), CallBegin(0, "c1", "f"), CallArguments(0, "{}"), CallEnd(0)]
    for summarise in (False, True):
        _, response = streamed(events, Ending("stop"), summarise=summarise)
        result = {"type": "function_call_output", "call_id": "c1", "output": "1"}
        turns = chat(input=[{"role": "user", "content": "a"}, *response["output"], result])["messages"]
        assert [turn["role"] for turn in turns] == ["user", "assistant", "tool"]
        assert (turns[1]["reasoning_content"], turns[1]["content"]) == ("hm", "x")


def test_tools_and_their_choice_are_a_chats():
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    other = TOOL | {"name": "g"}
    found = chat(tools=[TOOL, other], tool_choice={"type": "function", "name": "f"}, parallel_tool_calls=False)
    assert found["tools"][0] == {"type": "function", "function": function}
    assert found["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert found["parallel_tool_calls"] is False
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    found = chat(tools=[TOOL, other], tool_choice=choice)
    assert [tool["function"]["name"] for tool in found["tools"]] == ["g"]
    assert found["tool_choice"] == "required"
    with pytest.raises(ApiError, match="`h`, which is not in `tools`"):
        chat(tools=[TOOL], tool_choice=choice | {"tools": [{"type": "function", "name": "h"}]})


def test_the_form_of_the_text_is_a_chats():
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    assert chat(text={"format": schema})["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
    }
    assert chat(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    assert chat(text={})["response_format"] == {"type": "text"}


def test_what_a_chat_refuses_is_named_as_it_was_asked():
    translation = translated(instructions="x", input=[{"role": "user", "content": "a"}], tools=[TOOL] * 3)
    for param, named in {
        "messages": "input",
        "messages[1].content": "input[0].content",
        "messages[0].content": "instructions.content",
        "max_completion_tokens": "max_output_tokens",
        "response_format.json_schema.schema": "text.format.schema",
        "tools[2].function.name": "tools[2].name",
        "tool_choice.function.name": "tool_choice.name",
        "temperature": "temperature",
        "messages_of_others": "messages_of_others",
    }.items():
        error = translation.back(invalid(f"`{param}` is wrong, {param}", param, "some_code"))
        assert (error.detail.param, error.detail.code) == (named, "some_code")
        assert error.detail.message == f"`{named}` is wrong, {param}"
    assert translation.back(too_busy("full", 7)).retry_after_s == 7


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"model": None}, "model"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"content": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"text": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "reasoning", "summary": [{"text": "x"}]}]}, "input[0].summary[0].type"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"text": "x"}]}]},
            "input[0].output[0].type",
        ),
        ({"text": {"format": {}}}, "text.format.type"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": "x", "name": "y"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "name": "f g", "arguments": "", "call_id": "c"}]}, "input[0].name"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"summary": "concise"}}, "reasoning.summary"),
        ({"reasoning": {"generate_summary": "auto"}}, "reasoning.generate_summary"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"metadata": {str(at): "" for at in range(17)}}, "metadata"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"truncation": "auto"}, "truncation"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"include": ["web_search_call.results"]}, "include[0]"),
        ({"client_metadata": {"a": "x" * 4097}}, "client_metadata[...]"),
    ],
)
def test_what_is_wrong_is_refused_by_name(fields, param):
    with pytest.raises(ApiError) as refused:
        asked(**fields) and chat(**fields)
    assert (refused.value.status, refused.value.detail.param) == (400, param)
    assert f"`{param}`" in refused.value.detail.message


def test_a_refused_type_is_told_with_those_that_are_allowed():
    with pytest.raises(ApiError, match="allowed are input_text and output_text"):
        asked(input=[{"role": "user", "content": [{"type": "input_image"}]}])


def test_every_parameter_of_openais_client_is_known():
    theirs = set(typing.get_type_hints(response_create_params.ResponseCreateParamsStreaming))
    assert len(theirs) > 25
    assert theirs <= set(ResponsesRequest.__struct_fields__)


@pytest.mark.parametrize("field", RESPONSES_NEUTRAL["ResponsesRequest"])
def test_what_nothing_acts_on_is_taken_where_it_asks_for_nothing(field):
    values, allowed = RESPONSES_NEUTRAL["ResponsesRequest"][field]
    for value in (None, *values):
        assert "messages" in chat(**{field: value})
    with pytest.raises(ApiError) as refused:
        asked(**{field: {"asks": "for something"}})
    assert refused.value.detail.param == field
    assert allowed in refused.value.detail.message
