"""Tools of responses that are more than functions: custom ones, namespaces; and thoughts that are kept for the next turn."""

import json

import pytest
from api_surfaces import events_of
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from edgemesh.api.errors import ApiError, invalid
from edgemesh.api.events import CallArguments, CallBegin, CallEnd, Content, Reasoning
from edgemesh.api.replies import usage
from edgemesh.api.responses import RESPONSES, ResponsesRequest
from edgemesh.api.responses_chat import chat_of_response
from edgemesh.api.responses_events import ResponseMaker
from edgemesh.api.responses_input import CustomInput
from edgemesh.api.responses_replies import begun
from edgemesh.api.responses_sealed import sealed
from edgemesh.api.responses_toolbox import Toolbox
from edgemesh.api.sse import Ending
from edgemesh.api.translation import request_of

EVENT = TypeAdapter(ResponseStreamEvent)
USAGE = usage(5, 7, 3)
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
CUSTOM = {"type": "custom", "name": "patch", "description": "changes a file"}
SPACE = {"type": "namespace", "name": "crm", "description": "customers", "tools": [FUNCTION, CUSTOM]}
USER = {"role": "user", "content": "hi"}


def asked(**fields):
    return request_of(json.dumps({"model": "m", "input": "hi"} | fields).encode(), ResponsesRequest, RESPONSES)


def translated(**fields):
    request = asked(**fields)
    return chat_of_response(request, Toolbox(request.tools or ()))


def answered(events, *, tools, seal=False, ending=None):
    """The events of an answer, and the answer itself, each as OpenAI's client reads it."""
    request = asked(tools=tools)
    made = ResponseMaker(
        begun(request, "resp_ab", 10, "m"), lambda: 12, box=Toolbox(request.tools), summarise=False, seal=seal
    )
    ending = ending or Ending("stop")
    stream = made.begin(USAGE) + b"".join(made.say([event]) for event in events) + made.last(ending) + made.end(USAGE)
    told = events_of(stream)
    for event in told:
        EVENT.validate_python(event)
    OpenAIResponse.model_validate(told[-1]["response"])
    return told, told[-1]["response"]["output"]


def called(name, *arguments):
    return [CallBegin(0, "call_1", name), *(CallArguments(0, text) for text in arguments), CallEnd(0)]


# --- what is asked ---


def test_every_tool_is_a_function_of_a_chat():
    functions = [tool["function"] for tool in translated(tools=[FUNCTION, CUSTOM, SPACE]).chat["tools"]]
    assert [function["name"] for function in functions] == ["f", "patch", "crm__f", "crm__patch"]
    assert functions[0] == {"name": "f", "parameters": {"type": "object"}, "strict": False}
    assert functions[1]["description"] == "changes a file"
    assert functions[1]["parameters"]["required"] == ["input"]
    assert [function.get("description") for function in functions[2:]] == ["customers", "changes a file"]


def test_the_form_of_a_custom_tools_input_is_kept_to():
    tool = CUSTOM | {"format": {"type": "grammar", "syntax": "regex", "definition": "[ab]+|c"}}
    [function] = [each["function"] for each in translated(tools=[tool]).chat["tools"]]
    assert function["strict"] is True
    assert function["parameters"]["properties"]["input"]["pattern"] == "^(?:[ab]+|c)$"
    assert function["description"].endswith("[ab]+|c")
    [free] = [each["function"] for each in translated(tools=[CUSTOM | {"format": {"type": "text"}}]).chat["tools"]]
    assert free["strict"] is False
    assert "pattern" not in free["parameters"]["properties"]["input"]


def test_a_custom_tool_may_be_chosen():
    chosen = translated(tools=[FUNCTION, CUSTOM], tool_choice={"type": "custom", "name": "patch"}).chat
    assert chosen["tool_choice"] == {"type": "function", "function": {"name": "patch"}}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "patch"}]}
    chosen = translated(tools=[FUNCTION, CUSTOM], tool_choice=allowed).chat
    assert [tool["function"]["name"] for tool in chosen["tools"]] == ["patch"]


def test_calls_and_what_came_of_them_are_turns():
    items = [
        USER,
        {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c1", "name": "patch", "input": 'a "b"\n'},
        {"type": "function_call", "call_id": "c2", "namespace": "crm", "name": "f", "arguments": "{}"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
    ]
    translation = translated(input=items, tools=[CUSTOM, SPACE])
    _, said, first, second = translation.chat["messages"]
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["patch", "crm__f"]
    assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {"input": 'a "b"\n'}
    assert (first["content"], second["content"]) == ("done", "2")
    assert translation.request().messages[1].tool_calls[1].id == "c2"


def test_what_is_wrong_with_a_tool_is_named_where_it_stands():
    translation = translated(tools=[FUNCTION, SPACE])
    for index, named in enumerate(
        ("tools[0].parameters", "tools[1].tools[0].parameters", "tools[1].tools[1].format.definition")
    ):
        param = f"tools[{index}].function.parameters"
        error = translation.back(invalid(f"`{param}` is wrong", param))
        assert (error.detail.param, error.detail.message) == (named, f"`{named}` is wrong")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
        ({"tools": [SPACE | {"tools": []}]}, "tools[0].tools"),
        ({"tools": [SPACE | {"tools": [SPACE]}]}, "tools[0].tools[0].type"),
        ({"tools": [SPACE | {"name": "n" * 64, "tools": [FUNCTION | {"name": "m" * 63}]}]}, "tools[0].tools[0].name"),
        ({"tools": [SPACE | {"tools": [FUNCTION] * 100}] * 2}, "tools"),
        (
            {"tools": [CUSTOM | {"format": {"type": "grammar", "syntax": "lark", "definition": "x"}}]},
            "tools[0].format.syntax",
        ),
        ({"tools": [CUSTOM | {"format": {"type": "json"}}]}, "tools[0].format.type"),
        ({"tools": [FUNCTION | {"allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers[0]"),
        ({"tools": [FUNCTION | {"output_schema": {}}]}, "tools[0].output_schema"),
        ({"tools": [CUSTOM | {"async": True}]}, "tools[0].async"),
        ({"input": [USER | {"phase": "commentary"}]}, "input[0].phase"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "", "caller": {}}]},
            "input[0].caller.type",
        ),
        ({"tools": [FUNCTION], "tool_choice": {"type": "custom", "name": "f"}}, "tool_choice.name"),
        ({"tools": [CUSTOM], "tool_choice": {"type": "function", "name": "patch"}}, "tool_choice.name"),
        ({"input": [USER, {"type": "reasoning", "encrypted_content": "gAAAA"}]}, "input[1].encrypted_content"),
        ({"input": [USER, {"type": "reasoning", "encrypted_content": "edgemesh1.#"}]}, "input[1].encrypted_content"),
        ({"input": [USER, {"type": "reasoning", "encrypted_content": "edgemesh1._w=="}]}, "input[1].encrypted_content"),
    ],
)
def test_what_is_wrong_is_refused_by_name(fields, param):
    with pytest.raises(ApiError, match="`") as refused:
        translated(**fields)
    assert (refused.value.status, refused.value.detail.param) == (400, param)


# --- what is answered ---


def test_a_custom_call_is_told_as_text():
    told, output = answered(called("patch", '{"in', 'put": "one\\', 'ntwo"', "}"), tools=[CUSTOM])
    assert output == [
        {
            "type": "custom_tool_call",
            "id": "ctc_ab_0",
            "status": "completed",
            "call_id": "call_1",
            "name": "patch",
            "input": "one\ntwo",
        }
    ]
    assert [(event["type"], event.get("delta", event.get("input"))) for event in told[2:-1]] == [
        ("response.output_item.added", None),
        ("response.custom_tool_call_input.delta", "one"),
        ("response.custom_tool_call_input.delta", "\ntwo"),
        ("response.custom_tool_call_input.done", "one\ntwo"),
        ("response.output_item.done", None),
    ]


def test_a_call_says_its_namespace():
    _, output = answered(called("crm__f", "{}") + called("f", "{}"), tools=[SPACE, FUNCTION])
    assert [(item["name"], item.get("namespace")) for item in output] == [("f", "crm"), ("f", None)]
    _, output = answered(called("crm__patch", '{"input": "x"}'), tools=[SPACE])
    assert [(item["type"], item["namespace"], item["input"]) for item in output] == [("custom_tool_call", "crm", "x")]


def test_a_custom_call_that_was_cut_holds_what_came():
    events = called("patch", '{"input": "one\\')[:-1]
    _, output = answered(events, tools=[CUSTOM], ending=Ending("length"))
    assert (output[0]["input"], output[0]["status"]) == ("one\\", "incomplete")


def test_thoughts_may_be_kept_for_the_next_turn():
    events = [Reasoning("hm 日本"), Content("x"), *called("f", "{}")]
    told, output = answered(events, tools=[FUNCTION], seal=True)
    assert "encrypted_content" not in told[2]["item"]
    thought, *rest = output
    kept = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
    for first in (thought, kept, kept | {"content": [{"type": "reasoning_text", "text": "less"}]}):
        turns = translated(input=[USER, first, *rest]).chat["messages"]
        assert turns[1]["reasoning_content"] == "hm 日本"
    _, output = answered(events, tools=[FUNCTION])
    assert "encrypted_content" not in output[0]
    assert sealed("") != sealed("a")


@pytest.mark.parametrize("by_alias", [True, False])
@pytest.mark.parametrize("exclude_none", [True, False])
def test_an_answer_may_be_sent_back_as_the_client_writes_it(by_alias, exclude_none):
    events = [Reasoning("hm"), Content("x"), *called("f", "{}"), *called("patch", '{"input": "y"}')]
    told, output = answered(events, tools=[FUNCTION, CUSTOM], seal=True)
    response = OpenAIResponse.model_validate(told[-1]["response"])
    items = [item.model_dump(by_alias=by_alias, exclude_none=exclude_none) for item in response.output]
    back, direct = (translated(input=[USER, *each]).chat["messages"] for each in (items, output))
    assert back == direct
    assert [tool.model_dump(by_alias=by_alias, exclude_none=True) for tool in response.tools]


def test_what_a_tool_may_say_of_itself_without_asking_for_anything():
    plain = {"allowed_callers": ["direct"], "defer_loading": False, "async": False}
    assert translated(tools=[FUNCTION | plain, CUSTOM | plain]).chat == translated(tools=[FUNCTION, CUSTOM]).chat
    nothing = dict.fromkeys([*plain, "output_schema"])
    assert translated(tools=[FUNCTION | nothing]).chat == translated(tools=[FUNCTION]).chat
    items = [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "caller": {"type": "direct"}},
        {"type": "function_call_output", "call_id": "c", "name": "f", "output": "1", "caller": None},
    ]
    assert translated(input=[USER, *items]).chat["messages"][2]["name"] == "f"
    marked = {"type": "input_text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}
    assert translated(input=[{"role": "user", "content": [marked]}]).chat["messages"][0]["content"] == "x"


# --- a custom tool's text out of a call's arguments ---


def cut(arguments, places):
    """The text, with the arguments cut in these places."""
    places = sorted({min(place, len(arguments)) for place in places})
    read = CustomInput()
    starts, stops = [0, *places], [*places, len(arguments)]
    return "".join(read.feed(arguments[start:stop]) for start, stop in zip(starts, stops, strict=True)) + read.end()


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
CUTS = st.lists(st.integers(0, 60), max_size=8)


@settings(max_examples=300, deadline=None)
@given(text=TEXT, ascii_only=st.booleans(), cuts=CUTS, blanks=st.sampled_from(["", " ", "\n  "]))
def test_the_text_is_what_was_meant_wherever_it_is_cut(text, ascii_only, cuts, blanks):
    value = json.dumps(text, ensure_ascii=ascii_only)
    assert cut(f'{blanks}{{{blanks}"input"{blanks}:{blanks}{value}{blanks}}}', cuts) == text


@settings(max_examples=500, deadline=None)
@given(
    inside=st.lists(
        st.sampled_from(['"', "\\", "u", "\\u", "d83d", "\\ude00", "\\ud83d", "0041", "n", "x", "é"]), max_size=12
    ),
    cuts=st.lists(st.integers(8, 80), max_size=10),
)
def test_no_cut_changes_what_arguments_that_are_no_json_say(inside, cuts):
    arguments = '{"input": "' + "".join(inside)
    whole = cut(arguments, [])
    assert cut(arguments, cuts) == whole
    assert cut(arguments, range(len(arguments))) == whole
    whole.encode()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"why": "y", "input": "x"}', "x"),
        ('{"input": 5}', '{"input": 5}'),
        ("", ""),
        ("{}", "{}"),
        (" " * 500 + '{"input": "x"}', "x"),
        ('{"input": "\\ud83d', "\ufffd"),
        ('{"input": "\\ud83d\\n"}', "\ufffd\n"),
        ('{"input": "\\ud83d\\ude00"}', "😀"),
        ('{"input": "\\q\\u12"}', "\\q\\u12"),
        ('{"input": "a", "other": "b"}', "a"),
    ],
)
def test_arguments_without_a_text_are_the_text(arguments, text):
    assert cut(arguments, []) == text
    assert cut(arguments, range(len(arguments))) == text
