"""Messages in Anthropic's form: what requests ask of a chat, and answers as Anthropic's client reads them."""

import json
import typing

import msgspec
import pytest
from anthropic.types import Message, RawMessageStreamEvent, message_count_tokens_params, message_create_params
from anthropic.types.beta import BetaMessage
from api_surfaces import events_of, said, uncut
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from edgemesh.api.dialect import Dialect
from edgemesh.api.errors import (
    ApiError,
    context_length_exceeded,
    from_mesh,
    invalid,
    model_not_found,
    too_busy,
    unauthorised,
)
from edgemesh.api.events import CallArguments, CallBegin, CallEnd, Content, Reasoning
from edgemesh.api.messages import MESSAGES, MESSAGES_NEUTRAL, CountTokensRequest, MessagesRequest
from edgemesh.api.messages_chat import chat_of_messages
from edgemesh.api.messages_events import MessageMaker
from edgemesh.api.messages_replies import error_body
from edgemesh.api.replies import usage
from edgemesh.api.sse import Ending
from edgemesh.api.translation import request_of

USAGE = usage(5, 7, 3)
EVENT = TypeAdapter(RawMessageStreamEvent)
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
CACHED = {"cache_control": {"type": "ephemeral"}}
THINKS = Dialect(thinks=True, efforts=True)
KEPT = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def asked(kind=MessagesRequest, **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    if kind is MessagesRequest:
        body = {"max_tokens": 9} | body
    return request_of(json.dumps(body).encode(), kind, MESSAGES)


def chat(*, thinks=True, **fields):
    return chat_of_messages(asked(**fields), Dialect(thinks=thinks, efforts=thinks)).chat


def turns(*messages, **fields):
    return chat(messages=list(messages), **fields)["messages"]


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def result(ident, content, **fields):
    return {"type": "tool_result", "tool_use_id": ident, "content": content} | fields


def streamed(events, ending):
    """The events of a message, and the message itself."""
    made = MessageMaker("msg_1", "m")
    stream = made.begin(USAGE) + b"".join(made.say([event]) for event in events) + made.last(ending) + made.end(USAGE)
    return events_of(stream), made.whole


def gathered(told):
    """The message that events alone tell."""
    message = told[0]["message"]
    texts = []
    for event in told:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(texts) - 1
            if event["delta"]["type"] == "signature_delta":
                message["content"][-1]["signature"] = event["delta"]["signature"]
                continue
            texts[-1] += event["delta"][DELTAS[event["delta"]["type"]]]
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    for block, text in zip(message["content"], texts, strict=True):
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
        else:
            block[block["type"]] = text
    return message


@settings(max_examples=150, deadline=None)
@given(events=said(), length=st.booleans(), stop=st.none() | st.text(min_size=1, max_size=4))
def test_a_stream_tells_what_the_whole_answer_is_and_every_event_is_anthropics(events, length, stop):
    ending = Ending("length") if length else Ending("stop", stop)
    told, whole = streamed(events, ending)
    assert [event["type"] for event in told[:2] + told[-2:]] == [
        "message_start",
        "ping",
        "message_delta",
        "message_stop",
    ]
    for event in told:
        if event["type"] != "ping":
            EVENT.validate_python(event)
    body = json.loads(msgspec.json.encode(whole))
    assert gathered(told) == body
    Message.model_validate(body)
    again = MessageMaker("msg_1", "m")
    again.say(uncut(events))
    again.last(ending)
    again.end(USAGE)
    assert again.whole == whole


def test_blocks_come_one_after_the_other():
    events = [
        Reasoning("hm"),
        Content("He"),
        Content("llo"),
        CallBegin(0, "call_1", "f"),
        CallArguments(0, '{"a":'),
        CallArguments(0, "1}"),
        CallEnd(0),
    ]
    told, whole = streamed(events, Ending("stop"))
    assert [(event["type"], event.get("index")) for event in told] == [
        ("message_start", None),
        ("ping", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", 2),
        ("content_block_delta", 2),
        ("content_block_stop", 2),
        ("message_delta", None),
        ("message_stop", None),
    ]
    assert told[2]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert told[4]["delta"] == {"type": "signature_delta", "signature": "unsigned"}
    assert told[7]["delta"] == {"type": "text_delta", "text": "He"}
    assert told[10]["content_block"] == {"type": "tool_use", "id": "call_1", "name": "f", "input": {}}
    assert told[11]["delta"] == {"type": "input_json_delta", "partial_json": '{"a":'}
    assert told[14] == {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": {
            "input_tokens": 2,
            "output_tokens": 7,
            "cache_read_input_tokens": 3,
            "cache_creation_input_tokens": 0,
        },
    }
    assert [block["type"] for block in json.loads(msgspec.json.encode(whole))["content"]] == [
        "thinking",
        "text",
        "tool_use",
    ]


@pytest.mark.parametrize(
    ("ending", "events", "reason", "stop"),
    [
        (Ending("stop"), [Content("x")], "end_turn", None),
        (Ending("length"), [Content("x")], "max_tokens", None),
        (Ending("stop", "END"), [Content("x")], "stop_sequence", "END"),
        (Ending("stop"), [CallBegin(0, "c", "f"), CallArguments(0, "{}"), CallEnd(0)], "tool_use", None),
        (Ending("length"), [CallBegin(0, "c", "f"), CallArguments(0, "{"), CallEnd(0)], "max_tokens", None),
        (Ending("tool_calls"), [CallBegin(0, "c", "f"), CallArguments(0, "{}"), CallEnd(0)], "tool_use", None),
    ],
)
def test_how_a_message_ended(ending, events, reason, stop):
    _, whole = streamed(events, ending)
    assert (whole.stop_reason, whole.stop_sequence) == (reason, stop)


@pytest.mark.parametrize("text", ["", "{", "[1]", "1", '{"a": 1', '{"a": NaN}', '{"a": 1e400}', '{"a":' * 2000])
def test_arguments_that_are_no_object_are_an_empty_input(text):
    _, whole = streamed([CallBegin(0, "c", "f"), CallArguments(0, text), CallEnd(0)], Ending("length"))
    assert whole.content[0].input == {}


def test_an_answer_without_a_word_is_an_empty_text():
    _, whole = streamed([], Ending("stop"))
    assert [block.text for block in whole.content] == [""]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (invalid("no", "x"), "invalid_request_error"),
        (unauthorised("no"), "authentication_error"),
        (model_not_found("a", "b"), "not_found_error"),
        (ApiError(413, "no"), "request_too_large"),
        (ApiError(422, "no"), "invalid_request_error"),
        (too_busy("no", 1), "rate_limit_error"),
        (from_mesh(503, "x", "no"), "api_error"),
        (ApiError(500, "no"), "api_error"),
    ],
)
def test_errors_are_anthropics(error, kind):
    body = {"type": "error", "error": {"type": kind, "message": error.detail.message}}
    assert json.loads(error_body(error)) == body
    assert events_of(MessageMaker("msg_1", "m").fail(error)) == [body]


def test_a_request_is_a_chat():
    found = chat(
        system=[{"type": "text", "text": "a"} | CACHED, {"type": "text", "text": "b"}],
        stop_sequences=["x"],
        temperature=0.5,
        top_k=4,
        metadata={"user_id": "me"},
        stream=True,
        **CACHED,
    )
    assert found == {
        "model": "m",
        "messages": [{"role": "system", "content": "a\nb"}, {"role": "user", "content": "hi"}],
        "max_completion_tokens": 9,
        "stop": ["x"],
        "temperature": 0.5,
        "top_k": 4,
        "user": "me",
        "stream": True,
    }
    assert len(chat(metadata={"user_id": "u" * 300})["user"]) == 64
    assert chat(metadata={"user_id": None}).get("user") is None


def test_blocks_make_turns():
    used = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": [1, None]}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "signed"}
    found = turns(
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "b"}, used, used | {"id": "c2"}]},
        user(
            result("c1", "1"),
            result("c2", [{"type": "text", "text": "2"} | CACHED], is_error=True),
            {"type": "text", "text": "c"},
            {"type": "text", "text": "d"},
        ),
        {"role": "assistant", "content": [used | {"id": "c3"}]},
        user(result("c3", [])),
        {"role": "system", "content": "e"},
    )

    def call(ident):
        return {"id": ident, "type": "function", "function": {"name": "f", "arguments": '{"a":[1,null]}'}}

    assert found == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "reasoning_content": "hm", "content": "b", "tool_calls": [call("c1"), call("c2")]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: 2"},
        {"role": "user", "content": "c\nd"},
        {"role": "assistant", "tool_calls": [call("c3")]},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
        {"role": "system", "content": "e"},
    ]


def test_the_content_of_an_answer_may_be_sent_back():
    events = [Reasoning("hm"), Content("x"), CallBegin(0, "c1", "f"), CallArguments(0, "{}"), CallEnd(0)]
    _, whole = streamed(events, Ending("stop"))
    said_back = {"role": "assistant", "content": json.loads(msgspec.json.encode(whole))["content"]}
    found = turns({"role": "user", "content": "a"}, said_back, user(result("c1", "1")))
    assert (found[1]["reasoning_content"], found[1]["content"], len(found[1]["tool_calls"])) == ("hm", "x", 1)


def test_an_answer_may_be_begun_for_the_model():
    found = chat(messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer is ("}])
    assert (found["continue_final_message"], found["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in chat()


@pytest.mark.parametrize(
    ("choice", "named", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, None),
        ({"type": "none"}, "none", None),
    ],
)
def test_tools_and_their_choice_are_a_chats(choice, named, parallel):
    found = chat(tools=[TOOL | CACHED | {"type": "custom", "strict": True}], tool_choice=choice)
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert found["tools"] == [{"type": "function", "function": function}]
    assert (found["tool_choice"], found.get("parallel_tool_calls")) == (named, parallel)


def test_thinking_and_the_form_of_the_text_are_a_chats():
    assert chat(thinking={"type": "enabled", "budget_tokens": 8})["thinking_token_budget"] == 8
    assert "thinking_token_budget" not in chat(thinking={"type": "adaptive"})
    for thinking in ({"type": "enabled", "budget_tokens": 8}, {"type": "adaptive"}):
        assert chat(thinking=thinking | {"display": "omitted"})["include_reasoning"] is False
        assert "include_reasoning" not in chat(thinking=thinking | {"display": "summarized"})
    assert chat(thinking={"type": "disabled"})["thinking_token_budget"] == 0
    assert "thinking_token_budget" not in chat(thinking={"type": "disabled"}, thinks=False)
    config = {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}}
    found = chat(output_config=config)
    assert found["reasoning_effort"] == "low"
    assert found["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_a_tools_examples_are_told_and_what_asks_for_nothing_is_taken():
    plain = {"eager_input_streaming": True, "allowed_callers": ["direct"], "defer_loading": False}
    assert chat(tools=[TOOL | plain]) == chat(tools=[TOOL])
    [tool] = chat(tools=[TOOL | {"input_examples": [{"a": 1}, {}]}])["tools"]
    assert tool["function"]["description"] == 'd\n\nExamples of its input:\n{"a":1}\n{}'


def test_an_answer_may_be_sent_back_as_the_client_writes_it():
    events = [Reasoning("hm"), Content("x"), CallBegin(0, "c1", "f"), CallArguments(0, "{}"), CallEnd(0)]
    _, whole = streamed(events, Ending("stop"))
    content = Message.model_validate(json.loads(msgspec.json.encode(whole))).model_dump()["content"]
    _, said = turns({"role": "user", "content": "x"}, {"role": "assistant", "content": content})
    assert (said["reasoning_content"], said["content"], len(said["tool_calls"])) == ("hm", "x", 1)


@pytest.mark.parametrize(
    ("prompt", "wanted", "said"),
    [
        (60, 50, "input length and `max_tokens` exceed context limit: 60 + 50 > 100"),
        (99, 2, "input length and `max_tokens` exceed context limit: 99 + 2 > 100"),
        (100, 1, "prompt is too long: 100 tokens > 99 maximum"),
        (500, 50, "prompt is too long: 500 tokens > 99 maximum"),
    ],
)
def test_what_does_not_fit_is_told_in_words_that_clients_act_on(prompt, wanted, said):
    translation = chat_of_messages(asked(), Dialect())
    error = translation.back(context_length_exceeded(prompt, wanted, 100, "messages"))
    body = json.loads(error_body(error))["error"]
    assert body["type"] == "invalid_request_error"
    assert body["message"].startswith(said)


def test_a_high_effort_is_what_no_effort_is():
    high = {"output_config": {"effort": "high"}}
    assert chat(**high)["reasoning_effort"] == "high"
    assert chat(**high, thinks=False) == chat(thinks=False)
    assert chat(output_config={"effort": "low"}, thinks=False)["reasoning_effort"] == "low"


@pytest.mark.parametrize("keep", ["all", {"type": "all"}])
def test_a_conversation_may_be_left_whole(keep):
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": keep}]}
    for management in (kept, {"edits": []}, {}, None):
        assert chat(context_management=management) == chat()
    made = MessageMaker("msg_1", "m", managed=True)
    stream = made.begin(USAGE) + made.last(Ending("stop")) + made.end(USAGE)
    *_, delta, _ = events_of(stream)
    assert delta["context_management"] == {"applied_edits": []}
    body = json.loads(msgspec.json.encode(made.whole))
    assert BetaMessage.model_validate(body).context_management.applied_edits == []


def test_a_count_asks_for_the_same_prompt():
    fields = {"system": "a", "tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 8}}
    counted = chat_of_messages(asked(CountTokensRequest, **fields), THINKS).chat
    assert counted == {name: value for name, value in chat(**fields).items() if name != "max_completion_tokens"}


def test_what_a_chat_refuses_is_named_as_it_was_asked():
    translation = chat_of_messages(asked(messages=[user(result("c9", "x"))], system="s"), Dialect())
    for param, named in {
        "messages[1].tool_call_id": "messages[0].content[0].tool_use_id",
        "messages[0].content": "system.content",
        "max_completion_tokens": "max_tokens",
        "tools[0].function.parameters.x": "tools[0].input_schema.x",
        "stop": "stop_sequences",
        "stop_token_ids": "stop_token_ids",
        "response_format": "output_config.format",
    }.items():
        error = translation.back(invalid(f"`{param}` is wrong", param))
        assert (error.detail.param, error.detail.message) == (named, f"`{named}` is wrong")
    with pytest.raises(ApiError, match="c9"):
        translation.request()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [user({"type": "image", "source": {}})]}, "messages[0].content[0].type"),
        ({"messages": [user({"type": "document", "source": {}})]}, "messages[0].content[0].type"),
        ({"messages": [user({"type": "thinking", "thinking": "x"})]}, "messages[0].content[0].type"),
        (
            {"messages": [user({"type": "tool_use", "id": "c", "name": "f", "input": {}})]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "assistant", "content": [result("c", "x")]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "system", "content": [result("c", "x")]}]}, "messages[0].content[0].type"),
        ({"messages": [user(result("c", [{"type": "image"}]))]}, "messages[0].content[0].content[0].type"),
        ({"messages": [user({"type": "text", "text": "x", "citations": [{}]})]}, "messages[0].content[0].citations"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"system": [{"text": "x"}]}, "system[0].type"),
        ({"messages": [user(result("c", [{"text": "x"}]))]}, "messages[0].content[0].content[0].type"),
        ({"messages": [user({"text": "x"})]}, "messages[0].content[0].type"),
        ({"output_config": {"format": {"schema": {}}}}, "output_config.format.type"),
        ({"tool_choice": {}}, "tool_choice.type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL | {"name": "f g"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format.type"),
        ({"cache_control": {"type": "forever"}}, "cache_control.type"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"metadata": {"name": "x"}}, "metadata.name"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0].type"),
        ({"context_management": {"edits": [{"keep": "all"}]}}, "context_management.edits[0].type"),
        ({"context_management": {"edits": [KEPT["edits"][0] | {"keep": {}}]}}, "context_management.edits[0].keep.type"),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
            "context_management.edits[0].keep",
        ),
        (
            {"context_management": {"edits": [KEPT["edits"][0] | {"keep": {"type": "thinking_turns", "value": 2}}]}},
            "context_management.edits[0].keep.type",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_name(fields, param):
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert (refused.value.status, refused.value.detail.param) == (400, param)
    assert f"`{param}`" in refused.value.detail.message


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (MessagesRequest, message_create_params.MessageCreateParamsStreaming),
        (CountTokensRequest, message_count_tokens_params.MessageCountTokensParams),
    ],
)
def test_every_parameter_of_anthropics_client_is_known(kind, params):
    theirs = set(typing.get_type_hints(params))
    assert len(theirs) > 8
    assert theirs <= set(kind.__struct_fields__)


@pytest.mark.parametrize("kind", [CountTokensRequest, MessagesRequest])
def test_what_nothing_acts_on_is_taken_where_it_asks_for_nothing(kind):
    for field, (values, allowed) in MESSAGES_NEUTRAL[kind.__name__].items():
        for value in (None, *values):
            assert asked(kind, **{field: value})
        with pytest.raises(ApiError, match=f"`{field}`") as refused:
            asked(kind, **{field: {"asks": "for something"}})
        assert allowed in refused.value.detail.message
