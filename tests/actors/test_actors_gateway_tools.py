"""Calls of tools and reasoning through the real gateway: a scripted mesh says what the user quotes."""

import pytest
from gateway_fake_mesh import PATIENCE_S, FakeMesh, post, wait_for
from openai import OpenAI

TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "g"}},
]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é 🎉"}}\n</tool_call>'
TWO = f'{CALL}\n<tool_call>\n{{"name": "g", "arguments": {{}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def mesh():
    with FakeMesh(model={"reasoning_parser": "think"}) as running:
        yield running


@pytest.fixture(scope="module")
def client(mesh):
    with OpenAI(base_url=mesh.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


def asked(text, session="say", **fields):
    messages = [{"role": "user", "content": f"say «{text}»"}]
    extra = {"session": session} | fields.pop("extra", {})
    return {"model": "tiny", "messages": messages, "max_tokens": 600, "extra_body": extra} | fields


def streamed(client, wanted):
    """What a streamed answer puts together: (content, reasoning, calls, finish reason, usage)."""
    wanted = wanted | {"stream": True, "stream_options": {"include_usage": True}}
    content = reasoning = ""
    calls, reasons, usage = [], [], None
    for chunk in client.chat.completions.create(**wanted):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += (choice.delta.model_extra or {}).get("reasoning_content", "")
            reasons.append(choice.finish_reason)
            for part in choice.delta.tool_calls or ():
                if part.id is not None:
                    assert part.index == len(calls)
                    calls.append([part.function.name, ""])
                calls[part.index][1] += part.function.arguments
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    return content, reasoning, [tuple(call) for call in calls], reasons[-1], usage


def both(client, wanted):
    """The same of a whole answer, which must be that of a stream."""
    answer = client.chat.completions.create(**wanted)
    [choice] = answer.choices
    message = choice.message
    calls = [(each.function.name, each.function.arguments) for each in message.tool_calls or ()]
    reasoning = (message.model_extra or {}).get("reasoning_content", "")
    whole = (message.content or "", reasoning, calls, choice.finish_reason, answer.usage)
    assert streamed(client, wanted) == whole
    return message.content, reasoning, calls, choice.finish_reason, answer.usage


def test_calls_are_told_as_calls(client):
    content, _, calls, reason, _ = both(client, asked(TWO, tools=TOOLS))
    assert (content, reason) == (None, "tool_calls")
    assert calls == [("f", '{"a": "é 🎉"}'), ("g", "{}")]
    message = client.chat.completions.create(**asked(TWO, tools=TOOLS)).choices[0].message
    assert len({call.id for call in message.tool_calls}) == 2


def test_content_and_calls_and_reasoning(client):
    text = f"<think>\nwell\n</think>\n\nLet me see.\n{CALL}"
    content, reasoning, calls, reason, usage = both(client, asked(text, tools=TOOLS))
    assert (content, reasoning, reason) == ("Let me see.", "well", "tool_calls")
    assert [name for name, _ in calls] == ["f"]
    assert 10 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens - 20
    hidden = both(client, asked(text, tools=TOOLS, extra={"include_reasoning": False}))
    assert (hidden[0], hidden[1], hidden[4]) == (content, "", usage)


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS[1:]}, {"tools": TOOLS, "tool_choice": "none"}])
def test_what_calls_no_tool_of_the_request_is_content(client, fields):
    content, _, calls, reason, usage = both(client, asked(CALL, **fields))
    assert (content, calls, reason) == (CALL, [], "stop")
    assert usage.completion_tokens_details.reasoning_tokens == 0


def test_one_call_at_once_ends_behind_it(client, mesh):
    wanted = asked(TWO, tools=TOOLS, parallel_tool_calls=False)
    _, _, calls, reason, usage = both(client, wanted)
    assert (calls, reason) == ([("f", '{"a": "é 🎉"}')], "tool_calls")
    ended = CALL.removesuffix("}\n</tool_call>")
    assert usage.completion_tokens == len(mesh.tokenizer.encode(ended).ids)


def test_a_call_that_is_cut_off_ends_for_its_length(client, mesh):
    length = len(mesh.tokenizer.encode(CALL.partition("é")[0]).ids)
    _, _, calls, reason, _ = both(client, asked(CALL, tools=TOOLS, max_tokens=length))
    assert (calls, reason) == ([("f", '{"a": "')], "length")


def test_a_stop_string_ends_calls_too(client):
    _, _, calls, reason, _ = both(client, asked(TWO, tools=TOOLS, stop=["</tool_call>"]))
    assert (calls, reason) == ([("f", '{"a": "é 🎉"}')], "tool_calls")


def test_choices_are_read_apart(client):
    answer = client.chat.completions.create(**asked(CALL, tools=TOOLS, n=2))
    ids = [choice.message.tool_calls[0].id for choice in answer.choices]
    assert len(set(ids)) == 2


def test_logprobs_are_those_of_every_token(client):
    wanted = asked(f"<think>a</think>b {CALL}", tools=TOOLS, logprobs=True)
    whole = client.chat.completions.create(**wanted)
    tokens = [each.token for each in whole.choices[0].logprobs.content]
    assert len(tokens) == whole.usage.completion_tokens
    chunks = client.chat.completions.create(**wanted, stream=True)
    shown = [
        each for chunk in chunks for choice in chunk.choices if choice.logprobs for each in choice.logprobs.content
    ]
    assert [each.token for each in shown] == tokens


@pytest.mark.parametrize("budget", [1, 7, 40])
def test_reasoning_ends_where_its_budget_does(client, mesh, budget):
    before = len(mesh.submits)
    wanted = asked("", session="think", extra={"thinking_token_budget": budget}, logprobs=True)
    content, reasoning, _, reason, usage = both(client, wanted)
    closing = mesh.tokenizer.encode("\n</think>\n\n").ids
    opening = len(mesh.tokenizer.encode("<think>").ids)
    assert (content, reason) == ("yes", "stop")
    assert usage.completion_tokens_details.reasoning_tokens == max(budget, opening) + len(closing)
    assert ("<think>" + "so and " * 300).startswith("<think>" + reasoning)
    assert usage.prompt_tokens_details.cached_tokens == 2
    first, second, *_ = mesh.submits[before:]
    assert (second.attempt, second.request) == (1, first.request)
    assert second.emitted.tolist()[-len(closing) :] == closing
    wait_for(lambda: first.request in {cancel.request for cancel in mesh.cancels}, "the first attempt is cancelled")


def test_a_budget_without_room_for_an_answer_ends_for_its_length(client):
    wanted = asked("", session="think", max_tokens=24, extra={"thinking_token_budget": 20})
    content, _, _, reason, usage = both(client, wanted)
    assert (content, reason, usage.completion_tokens) == (None, "length", 20)


def test_a_budget_that_is_not_reached_changes_nothing(client, mesh):
    before = len(mesh.submits)
    both(client, asked("<think>a</think>b", extra={"thinking_token_budget": 50}))
    assert {submit.attempt for submit in mesh.submits[before:]} == {0}


def test_no_budget_at_all_ends_reasoning_in_the_prompt(client, mesh):
    content, reasoning, _, _, _ = both(client, asked("b", extra={"thinking_token_budget": 0}))
    assert (content, reasoning) == ("b", "")
    prompt = mesh.tokenizer.decode(mesh.submits[-1].prompt.tolist(), skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_tokenize_shows_what_tools_cost(mesh):
    body = {"messages": [{"role": "user", "content": "q"}]}
    counts = [post(f"{mesh.url}/tokenize", json=body | fields).json()["count"] for fields in ({}, {"tools": TOOLS})]
    assert counts[1] > counts[0] + 50


def test_an_effort_ends_the_reasoning_as_a_budget_does(client, mesh):
    wanted = asked("", session="think", reasoning_effort="minimal")
    content, _, _, reason, usage = both(client, wanted)
    closing = mesh.tokenizer.encode("\n</think>\n\n").ids
    assert (content, reason) == ("yes", "stop")
    assert usage.completion_tokens_details.reasoning_tokens == 512 + len(closing)


def test_calls_that_must_come_have_a_grammar(client, mesh):
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}, TOOLS[1]]
    named = {"type": "function", "function": {"name": "g"}}
    sources = []
    for fields in ({"tool_choice": "required"}, {"tool_choice": named}, {}):
        answer = client.chat.completions.create(**asked(CALL, tools=tools, **fields))
        assert answer.choices[0].finish_reason == ("stop" if fields.get("tool_choice") == named else "tool_calls")
        sources.append(mesh.submits[-1].grammar)
    assert [source.partition("\n")[0] for source in sources] == ["%llguidance {}", "%llguidance {}", ""]
    assert ('"required": ["a"]' in sources[0], '"required": ["a"]' in sources[1]) == (True, False)


def test_a_grammar_that_cannot_be_kept_to_names_the_tools(mesh):
    costly = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 1000003}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": costly}}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "q"}], "tools": tools, "tool_choice": "required"}
    answer = post(f"{mesh.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools[0].function.parameters"
