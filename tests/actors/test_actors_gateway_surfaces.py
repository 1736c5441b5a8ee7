"""Responses and messages by their own clients, at the real gateway in front of a scripted mesh."""

import asyncio
import json

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic, AsyncAnthropic
from gateway_fake_mesh import PATIENCE_S, FakeMesh, connect, send, wait_for
from openai import AsyncOpenAI, OpenAI

SAID = "user\nhello 🎉\nassistant\n"
"""What a group says that says its prompt back."""


@pytest.fixture(scope="module")
def mesh():
    with FakeMesh(env={"EDGEMESH_API_KEYS": "secret"}, model={"reasoning_parser": "think"}) as running:
        yield running


@pytest.fixture(scope="module")
def client(mesh):
    with OpenAI(base_url=mesh.url + "/v1", api_key="secret", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


@pytest.fixture(scope="module")
def claude(mesh):
    with Anthropic(base_url=mesh.url, api_key="secret", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


@pytest.fixture
def http(mesh):
    with httpx.Client(base_url=mesh.url, timeout=PATIENCE_S, headers={"x-api-key": "secret"}) as made:
        yield made


TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": %d}}\n</tool_call>\n'
THOUGHT = f"<think>\nwell\n</think>\n\nLet me see.\n{CALL % 1}{CALL % 2}"


def message(text="hello 🎉", **fields):
    session = {"extra_body": {"session": fields.pop("session")}} if "session" in fields else {}
    return {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": text}]} | session | fields


def response(asked="hello 🎉", **fields):
    session = {"extra_body": {"session": fields.pop("session")}} if "session" in fields else {}
    return {"model": "tiny", "input": asked} | session | fields


def test_a_response_says_what_the_group_said(client):
    answer = client.responses.create(**response(metadata={"a": "b"}))
    assert answer.output_text == SAID
    assert (answer.status, answer.metadata, answer.error) == ("completed", {"a": "b"}, None)
    assert answer.usage.input_tokens == answer.usage.output_tokens > 10
    assert answer.usage.input_tokens_details.cached_tokens == 2
    assert answer.completed_at >= answer.created_at
    cut = client.responses.create(**response(max_output_tokens=3))
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.usage.output_tokens == 3


def test_a_streamed_response_says_the_same(client):
    whole = client.responses.create(**response())
    with client.responses.stream(**response()) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == whole.output_text == SAID
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == SAID
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert final.usage == whole.usage


def test_a_message_says_what_the_group_said(claude):
    answer = claude.messages.create(**message())
    assert [block.text for block in answer.content] == [SAID]
    assert (answer.stop_reason, answer.role, answer.model) == ("end_turn", "assistant", "tiny")
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == answer.usage.output_tokens > 10
    assert answer.usage.cache_read_input_tokens == 2
    cut = claude.messages.create(**message(max_tokens=3))
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    stopped = claude.messages.create(**message(stop_sequences=["ell"]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "ell")
    assert stopped.content[0].text == "user\nh"


def test_a_streamed_message_says_the_same(claude):
    whole = claude.messages.create(**message())
    with claude.messages.stream(**message()) as stream:
        assert "".join(stream.text_stream) == SAID
        final = stream.get_final_message()
    assert [block.text for block in final.content] == [block.text for block in whole.content] == [SAID]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_a_response_thinks_and_calls(client):
    wanted = response(f"say «{THOUGHT}»", session="say", tools=[TOOL])
    whole = client.responses.create(**wanted)
    with client.responses.stream(**wanted) as stream:
        events = list(stream)
        final = stream.get_final_response()
    for answer in (whole, final):
        thought, said, one, two = answer.output
        assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "well", [])
        assert (said.type, said.content[0].text) == ("message", "Let me see.")
        assert [(call.name, call.arguments) for call in (one, two)] == [("f", '{"a": 1}'), ("f", '{"a": 2}')]
        assert one.call_id != two.call_id
        assert answer.usage.output_tokens_details.reasoning_tokens > 2
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == '{"a": 1}{"a": 2}'
    summarised = client.responses.create(**wanted, reasoning={"summary": "auto"})
    assert summarised.output[0].summary[0].text == "well"
    after = [{"role": "user", "content": "x"}, *whole.output]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "«7»"} for call in whole.output[2:]]
    again = client.responses.create(**response([*after, *results], session="say", tools=[TOOL]))
    assert again.output_text == "7"


def test_custom_tools_and_namespaces_are_called(client, mesh):
    patch = {
        "type": "custom",
        "name": "patch",
        "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z\n]+"},
    }
    tools = [patch, {"type": "namespace", "name": "crm", "description": "d", "tools": [TOOL]}]
    calls = '<tool_call>\n{"name": "patch", "arguments": {"input": "one\\ntwo"}}\n</tool_call>\n'
    calls += '<tool_call>\n{"name": "crm__f", "arguments": {"a": 1}}\n</tool_call>'
    fields = {"tools": tools, "include": ["reasoning.encrypted_content"], "session": "say"}
    asked = response(f"«<think>well</think>{calls}»", **fields)
    asked["extra_body"]["client_metadata"] = {"turn": "1"}
    thought, custom, function = client.responses.create(**asked).output
    assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "patch", "one\ntwo")
    assert (function.name, function.namespace, function.arguments) == ("f", "crm", '{"a": 1}')
    assert "[a-z\\n]+" in mesh.submits[-1].grammar
    name = mesh.submits[-1].request
    [event] = wait_for(lambda: [e for e in mesh.trace("request.received") if e["request"] == name], "it is traced")
    assert event["client"] == {"turn": "1"}
    with client.responses.stream(**asked) as stream:
        told = list(stream)
    assert "".join(e.delta for e in told if e.type == "response.custom_tool_call_input.delta") == "one\ntwo"
    kept = {"type": "reasoning", "summary": [], "encrypted_content": thought.encrypted_content}
    sent = [item.model_dump(exclude_none=True) for item in (custom, function)]
    results = [
        {"type": "custom_tool_call_output", "call_id": custom.call_id, "output": "done"},
        {"type": "function_call_output", "call_id": function.call_id, "output": "5"},
    ]
    client.responses.create(**response([{"role": "user", "content": "q"}, kept, *sent, *results], tools=tools))
    prompt = mesh.tokenizer.decode(mesh.submits[-1].prompt.tolist(), skip_special_tokens=False)
    assert calls in prompt
    assert "done" in prompt


def test_a_custom_tools_expression_that_is_none_is_refused_by_name(client):
    tool = {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "regex", "definition": "[a"}}
    with pytest.raises(openai.BadRequestError, match=r"tools\[1\]\.format\.definition") as refused:
        client.responses.create(**response("hi", tools=[TOOL, tool]))
    assert refused.value.param == "tools[1].format.definition"
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "[a"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**response("hi", tools=[TOOL | {"parameters": bad, "strict": True}]))
    assert refused.value.param == "tools[0].parameters"


def test_a_message_thinks_and_uses_tools(claude):
    tool = {"name": "f", "input_schema": TOOL["parameters"]}
    wanted = message(f"say «{THOUGHT}»", session="say", tools=[tool])
    whole = claude.messages.create(**wanted)
    with claude.messages.stream(**wanted) as stream:
        final = stream.get_final_message()
    for answer in (whole, final):
        thought, said, one, two = answer.content
        assert (thought.type, thought.thinking) == ("thinking", "well")
        assert (said.type, said.text) == ("text", "Let me see.")
        assert [(used.name, used.input) for used in (one, two)] == [("f", {"a": 1}), ("f", {"a": 2})]
        assert answer.stop_reason == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": used.id, "content": "«7»"} for used in whole.content[2:]]
    turns = [*wanted["messages"], {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
    again = claude.messages.create(**message(messages=turns, tools=[tool], session="say"))
    assert [block.text for block in again.content] == ["7"]
    one = claude.messages.create(**wanted, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in one.content] == ["thinking", "text", "tool_use"]
    for thinking in ({"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
        assert "thinking" not in {block.type for block in claude.messages.create(**wanted, thinking=thinking).content}


def test_thinking_ends_where_its_budget_does(claude):
    thinking = {"type": "enabled", "budget_tokens": 40}
    answer = claude.messages.create(**message(session="think", thinking=thinking))
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking.startswith("so and so and")
    assert answer.content[1].text == "yes"


def test_the_form_of_the_text_and_tools_that_must_be_called_are_grammars(client, claude, mesh):
    def grammar(ask):
        ask()
        return mesh.submits[-1].grammar

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    config = {"format": {"type": "json_schema", "schema": schema}}
    asked = {"model": "tiny", "messages": message()["messages"], "max_tokens": 200}
    chats = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    one = grammar(lambda: client.chat.completions.create(**asked, response_format=chats))
    assert one == grammar(lambda: client.responses.create(**response(text=form)))
    assert one == grammar(lambda: claude.messages.create(**asked, output_config=config))
    assert one
    assert not grammar(lambda: client.responses.create(**response(text={"format": {"type": "text"}})))
    for wrong in ({"type": "json_object", "schema": {}}, form["format"] | {"schema": {"type": "nothing"}}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**response(text={"format": wrong}))
        assert refused.value.param.startswith("text.format")
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
        claude.messages.create(**asked, output_config={"format": config["format"] | {"schema": {"type": "nothing"}}})


def test_the_tokens_of_a_message_are_counted_as_it_would_be_asked(claude):
    asked = {name: value for name, value in message(system="be kind").items() if name != "max_tokens"}
    answer = claude.messages.create(**message(system="be kind"))
    counted = claude.messages.count_tokens(**asked).input_tokens
    assert counted == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def test_a_conversation_that_is_to_stay_whole_does(http):
    management = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    asked = message(context_management=management, output_config={"effort": "medium"})
    answer = http.post("/v1/messages", json=asked).json()
    assert answer["context_management"] == {"applied_edits": []}
    del asked["max_tokens"]
    count = http.post("/v1/messages/count_tokens", json=asked).json()
    assert count["context_management"] == {"original_input_tokens": count["input_tokens"]}
    assert "context_management" not in http.post("/v1/messages", json=message()).json()


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/responses", response(max_output_tokens=1 << 19), "max_output_tokens"),
        ("/v1/responses", {"model": "tiny", "input": []}, "input"),
        ("/v1/responses", response(store=True), "store"),
        ("/v1/responses", response(group=9), "group"),
        ("/v1/messages", message(max_tokens=1 << 19), "max_tokens"),
        ("/v1/messages", message(messages=[]), "messages"),
        ("/v1/messages", message(group=9), "group"),
        ("/v1/messages/count_tokens", message(), "max_tokens"),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user"}]}, "messages[0].content"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_refusals_are_400s_in_the_apis_own_form(http, path, body, named, stream):
    if stream and path != "/v1/messages/count_tokens":
        body = body | {"stream": True}
    refused = http.post(path, json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (
        f"`{named}`" in error["message"] or named == "max_tokens" in error["message"] or "context" in error["message"]
    )
    if path == "/v1/responses":
        assert error["param"] in {named, "input"}
    else:
        assert refused.json().keys() == {"type", "error"}
        assert (refused.json()["type"], error["type"]) == ("error", "invalid_request_error")


def test_clients_raise_what_they_name_it(mesh, client, claude):
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.responses.create(**response(model="other"))
    with pytest.raises(anthropic.NotFoundError, match="tiny"):
        claude.messages.create(**message(model="other"))
    with pytest.raises(anthropic.RateLimitError, match="no room") as refused:
        claude.messages.create(**message(session="reject:429"))
    assert refused.value.response.headers["retry-after"] == "7"
    with Anthropic(base_url=mesh.url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError, match="not known"):
            stranger.messages.create(**message())
        with pytest.raises(anthropic.AuthenticationError, match="not known"):
            stranger.messages.count_tokens(model="tiny", messages=message()["messages"])


def test_no_route_and_no_json_are_answered_in_the_apis_own_form(http):
    assert http.get("/v1/messages").json()["type"] == "error"
    assert http.get("/v1/messages").status_code == 405
    assert http.post("/v1/messages/batches").json()["error"]["type"] == "not_found_error"
    assert http.get("/v1/responses/resp_1").json()["error"]["code"] == "endpoint_not_served"
    for path in ("/v1/messages", "/v1/responses", "/v1/messages/count_tokens"):
        assert http.post(path, content=b"{").status_code == 400
        assert http.post(path, content=b"[" * 100_000).status_code == 400
        assert http.post(path, content=b"[]").status_code == 400


def test_what_fails_after_it_began_is_the_last_event(http, mesh):
    for path, body in (("/v1/responses", response()), ("/v1/messages", message())):
        begun = len(mesh.submits)
        with http.stream("POST", path, json=body | {"stream": True, "session": "endless", "group": 0}) as stream:
            lines = stream.iter_lines()
            next(line for line in lines if "delta" in line)
            mesh.fail(mesh.submits[begun], 0)
            rest = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
        if path == "/v1/messages":
            assert rest[-1] == {"type": "error", "error": {"type": "api_error", "message": "the group failed"}}
        else:
            assert rest[-1]["type"] == "response.failed"
            assert rest[-1]["response"]["error"] == {"code": "server_error", "message": "the group failed"}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), [("/v1/responses", response()), ("/v1/messages", message())])
def test_a_client_that_goes_away_is_cancelled_at_its_group(mesh, http, path, body, stream):
    before = len(mesh.cancels)
    content = body | {"stream": stream, "session": "endless", "max_tokens": 3000}
    if path == "/v1/responses":
        content["max_output_tokens"] = content.pop("max_tokens")
    with connect(mesh) as connection:
        send(connection, content, path, "secret")
        wait_for(lambda: mesh.live, "the request runs")
    wait_for(lambda: len(mesh.cancels) > before, "its group is told")
    wait_for(lambda: not mesh.live, "nothing runs")


def test_sixteen_at_once_get_their_own_answers(mesh):
    async def one(client, claude, number):
        text = f"number {number}"
        if number % 4 == 0:
            return (await client.responses.create(**response(text))).output_text
        if number % 4 == 1:
            async with client.responses.stream(**response(text)) as stream:
                return (await stream.get_final_response()).output_text
        if number % 4 == 2:
            return (await claude.messages.create(**message(text))).content[0].text
        async with claude.messages.stream(**message(text)) as stream:
            return await stream.get_final_text()

    async def everyone():
        async with (
            AsyncOpenAI(base_url=mesh.url + "/v1", api_key="secret", max_retries=0, timeout=PATIENCE_S) as client,
            AsyncAnthropic(base_url=mesh.url, api_key="secret", max_retries=0, timeout=PATIENCE_S) as claude,
        ):
            return await asyncio.gather(*(one(client, claude, number) for number in range(16)))

    assert asyncio.run(everyone()) == [f"user\nnumber {number}\nassistant\n" for number in range(16)]
