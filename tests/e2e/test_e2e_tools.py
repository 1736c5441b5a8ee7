"""Tools that must be called are, by the real model through the real client, and a stream says the same as a whole answer."""

import json

import jsonschema
import openai
import pytest

pytestmark = pytest.mark.parametrize("served", ["tp1 unified"], indirect=True)

MODEL = "smollm2-135m"
SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", "Köln", "東京"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "move": {
        "type": "object",
        "properties": {
            "direction": {"enum": ["left", "right"]},
            "steps": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["direction"],
        "additionalProperties": False,
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
STRICT = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]
NAMED = {"type": "function", "function": {"name": "move"}}
MESSAGES = [{"role": "user", "content": "How is the weather in Paris?"}]


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as found:
        yield found


def told(client, **wanted):
    """[(content, [(name, arguments)], finish reason)] of each choice, the same streamed and whole."""
    wanted = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200, "tools": TOOLS} | wanted
    answer = client.chat.completions.create(**wanted)
    whole = [
        (
            choice.message.content or "",
            [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()],
            choice.finish_reason,
        )
        for choice in answer.choices
    ]
    streamed = [["", [], None] for _ in whole]
    for chunk in client.chat.completions.create(**wanted, stream=True):
        for choice in chunk.choices:
            mine = streamed[choice.index]
            mine[0] += choice.delta.content or ""
            mine[2] = choice.finish_reason or mine[2]
            for part in choice.delta.tool_calls or ():
                if part.id is not None:
                    mine[1].append([part.function.name, ""])
                mine[1][part.index][1] += part.function.arguments
    assert [(content, [tuple(call) for call in calls], reason) for content, calls, reason in streamed] == whole
    return whole


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_calls_that_must_come_are_valid(client, traces, choice):
    for content, calls, reason in told(
        client, tool_choice=choice, seed=1, temperature=1.0, n=2, parallel_tool_calls=False
    ):
        assert (content, reason, len(calls)) == ("", "tool_calls", 1)
        [(name, arguments)] = calls
        assert choice == "required" or name == "move"
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def test_several_calls_may_come(client, traces):
    [(content, calls, reason)] = told(client, tool_choice="required", seed=4, temperature=1.0, max_tokens=150)
    assert content == ""
    assert calls
    whole = calls if reason == "tool_calls" else calls[:-1]
    for name, arguments in whole:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def test_strict_tools_may_stay_uncalled(client, traces):
    """The grammar waits for the tag: until then the model says what it would say without one."""
    wanted = {"temperature": 0, "max_tokens": 16}
    [(content, calls, _)] = told(client, tools=STRICT, **wanted)
    [(free, _, _)] = told(client, tools=TOOLS, **wanted)
    assert not calls
    assert content == free != ""


def test_a_schema_that_no_call_can_keep_to_is_refused(client, served):
    tool = {
        "type": "function",
        "function": {"name": "f", "strict": True, "parameters": {"type": "object", "properties": 5}},
    }
    with pytest.raises(openai.BadRequestError) as refused:
        told(client, tools=[tool], tool_choice="required")
    assert refused.value.body["param"] == "tools[0].function.parameters"
    assert served.health()[0] == 200


def test_a_conversation_with_calls_goes_on(client):
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris", "days": 1}'},
    }
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny, 23 degrees."},
    ]
    [(content, _, _)] = told(client, messages=turns, temperature=0, max_tokens=24)
    assert content
