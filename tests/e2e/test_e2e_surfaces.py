"""Responses and messages by the real `openai` and `anthropic` clients against a real mesh: the same as chats, in their forms."""

import asyncio
import contextlib
import json
from typing import Literal

import anthropic
import openai
import pytest
from e2e_clients import MODEL, raw, wait_for
from pydantic import BaseModel

pytestmark = pytest.mark.parametrize("served", ["tp1 unified"], indirect=True)

TEXT = "What is the capital of France? Answer in one word."
QUESTION = [{"role": "user", "content": TEXT}]
GREEDY = {"extra_body": {"temperature": 0}}
"""Later versions of Anthropic's client have no name for it."""


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as found:
        yield found


@pytest.fixture
def claude(served):
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=120) as found:
        yield found


def said(client):
    """What a chat says to the question."""
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=12, temperature=0)
    return answer.choices[0].message.content, answer.usage


def test_a_response_says_what_a_chat_says_whole_and_streamed(client):
    wanted = {"model": MODEL, "input": TEXT, "max_output_tokens": 12, "temperature": 0}
    text, usage = said(client)
    whole = client.responses.create(**wanted)
    assert whole.output_text == text
    assert "Paris" in text
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (usage.prompt_tokens, usage.completion_tokens)
    with client.responses.stream(**wanted) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == text
    assert len(deltas) > 1
    assert (final.status, final.usage.output_tokens) == (whole.status, usage.completion_tokens)


def test_a_message_says_what_a_chat_says_whole_and_streamed(client, claude):
    wanted = {"model": MODEL, "messages": QUESTION, "max_tokens": 12, **GREEDY}
    text, usage = said(client)
    whole = claude.messages.create(**wanted)
    assert whole.content[0].text == text
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == usage.prompt_tokens
    with claude.messages.stream(**wanted) as stream:
        deltas = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(deltas) == final.content[0].text == text
    assert len(deltas) > 1
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, usage.completion_tokens)
    counted = claude.messages.count_tokens(model=MODEL, messages=QUESTION)
    assert counted.input_tokens == usage.prompt_tokens


def test_a_conversation_goes_on(client, claude):
    first = client.responses.create(model=MODEL, input=TEXT, max_output_tokens=12, temperature=0)
    turns = [*QUESTION, *first.output, {"role": "user", "content": "And of Italy?"}]
    second = client.responses.create(model=MODEL, input=turns, max_output_tokens=12, temperature=0)
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    text = first.output_text
    turns = [*QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": "And of Italy?"}]
    answer = claude.messages.create(model=MODEL, messages=turns, max_tokens=12, **GREEDY)
    assert answer.content[0].text == second.output_text


def test_an_answer_that_is_begun_goes_on(claude):
    turns = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    answer = claude.messages.create(model=MODEL, messages=turns, max_tokens=8, **GREEDY)
    assert answer.content[0].text.startswith(" Paris")


def test_stop_sequences_are_named(claude):
    wanted = {"model": MODEL, "messages": QUESTION, "max_tokens": 12, **GREEDY}
    free = claude.messages.create(**wanted).content[0].text
    stop = free[3:6]
    answer = claude.messages.create(**wanted, stop_sequences=["never said", stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == free[: free.index(stop)]


class Place(BaseModel):
    """Small enough for any model to be through with it."""

    city: Literal["Paris", "Rome", "Berlin"]
    capital: bool


def test_what_is_parsed_is_of_its_type(client, claude):
    asked = {"model": MODEL, "input": TEXT, "max_output_tokens": 40}
    assert isinstance(client.responses.parse(**asked, text_format=Place).output_parsed, Place)
    with client.responses.stream(**asked, text_format=Place) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Place)
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 40}
    assert isinstance(claude.messages.parse(**asked, output_format=Place).parsed_output, Place)
    with claude.messages.stream(**asked, output_format=Place) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Place)


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def test_a_function_is_called_and_its_output_read(client):
    tool = {"type": "function", "name": "weather", "description": "Weather.", "parameters": SCHEMA, "strict": True}
    question = "What is the weather in Rome?"
    asked = {"model": MODEL, "tools": [tool], "max_output_tokens": 48, "parallel_tool_calls": False}
    first = client.responses.create(**asked, input=question, tool_choice="required")
    named = {"type": "function", "name": "weather"}
    with client.responses.stream(**asked, input=question, tool_choice=named) as stream:
        streamed = stream.get_final_response()
    for answer in (first, streamed):
        call = answer.output[-1]
        assert (call.type, call.name) == ("function_call", "weather")
        assert json.loads(call.arguments)["city"] in {"Paris", "Rome"}
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "sunny"}
    turns = [{"role": "user", "content": question}, *first.output, result]
    second = client.responses.create(model=MODEL, input=turns, max_output_tokens=4)
    assert second.output[-1].type == "message"
    assert second.output_text


def test_a_tool_is_used_and_its_result_read(claude):
    tool = {"name": "weather", "description": "Weather.", "input_schema": SCHEMA}
    question = {"role": "user", "content": "What is the weather in Rome?"}
    asked = {"model": MODEL, "messages": [question], "tools": [tool], "max_tokens": 48}
    single = {"disable_parallel_tool_use": True}
    first = claude.messages.create(**asked, tool_choice={"type": "any", **single})
    with claude.messages.stream(**asked, tool_choice={"type": "tool", "name": "weather", **single}) as stream:
        streamed = stream.get_final_message()
    for answer in (first, streamed):
        used = answer.content[-1]
        assert (used.type, used.name, answer.stop_reason) == ("tool_use", "weather", "tool_use")
        assert used.input["city"] in {"Paris", "Rome"}
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "sunny"}
    turns = [question, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = claude.messages.create(model=MODEL, messages=turns, max_tokens=4)
    assert second.content[0].text


def test_too_long_a_prompt_is_a_400_streaming_or_not(client, claude):
    text = "word " * 9000
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model=MODEL, input=text, stream=stream)
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: 90\d\d tokens > "):
            claude.messages.create(
                model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=1, stream=stream
            )


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_client_that_goes_away_frees_what_it_held(served, traces, path, stream):
    story = "Tell me a long story."
    asked = {"input": story, "max_output_tokens": 5000}
    if path == "/v1/messages":
        asked = {"messages": [{"role": "user", "content": story}], "max_tokens": 5000}
    asked |= {"model": MODEL, "ignore_eos": True, "stream": stream}
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(raw(served, path, asked=asked))
        wait_for(lambda: len(traces.groups()) == 4, "not all are placed")
    traces.settle()
    assert {event["request"] for event in traces.events("request.aborted", actors="group-*")} == set(traces.groups())


def test_sixteen_at_once_get_their_own_answers(served):
    async def one(client, claude, number):
        text = f"{number} plus one is"
        response = {"model": MODEL, "input": text, "max_output_tokens": 8, "temperature": 0}
        message = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8, **GREEDY}
        match number % 4:
            case 0:
                return (await client.responses.create(**response)).output_text
            case 1:
                async with client.responses.stream(**response) as stream:
                    return "".join([each.delta async for each in stream if each.type == "response.output_text.delta"])
            case 2:
                return (await claude.messages.create(**message)).content[0].text
            case _:
                async with claude.messages.stream(**message) as stream:
                    return await stream.get_final_text()

    async def everyone():
        async with (
            openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as client,
            anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0, timeout=120) as claude,
        ):
            together = await asyncio.gather(*(one(client, claude, number) for number in range(16)))
            alone = [await one(client, claude, number) for number in (3, 4)]
        return together, alone

    together, alone = asyncio.run(everyone())
    assert [together[number] for number in (3, 4)] == alone
    assert len(set(together)) > 4
