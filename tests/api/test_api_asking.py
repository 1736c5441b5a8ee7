import itertools
import json

import pytest
from api_tokenizers import byte_level, load, model_text, qwen3_directory, smollm2_directory
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from edgemesh.api.asking import ask
from edgemesh.api.decode import BodyDecoder
from edgemesh.api.errors import ApiError
from edgemesh.api.events import gather
from edgemesh.api.openai import ChatRequest
from edgemesh.api.parser import MessageParser, Parsing
from edgemesh.api.stream import TextStream
from edgemesh.api.telling import Telling
from edgemesh.wire.messages import Logprob

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
NAMED = {"type": "function", "function": {"name": "g"}}
EFFORT = "{{ reasoning_effort }}{{ messages[0].content }}"
OPENS = "{{ messages[0].content }}{% if add_generation_prompt %}<think>\n{% endif %}"
NONE = "{{ messages[0].content }}"


def request(**fields):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "q"}]} | fields
    return BodyDecoder().decode(json.dumps(body).encode(), ChatRequest)


def with_template(source, **parsers):
    return model_text(byte_level().tokenizer, b"{}", source, **parsers)


def asked(text, **fields):
    found = ask(text, request(**fields))
    return text.decode(found.ids, skip_special_tokens=False), found.parsing


@pytest.fixture(scope="module")
def qwen3():
    return load(qwen3_directory())


def test_without_tools_or_reasoning_nothing_is_looked_for():
    assert asked(load(smollm2_directory()))[1] is None
    assert asked(load(smollm2_directory()), tools=TOOLS, tool_choice="none")[1] is None


@pytest.mark.parametrize(
    ("fields", "names", "most"),
    [
        ({}, {"f", "g"}, 0),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, {"f", "g"}, 0),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"f", "g"}, 1),
        ({"tool_choice": NAMED}, {"g"}, 1),
    ],
)
def test_the_choice_says_which_tools_may_be_called(fields, names, most):
    prompt, parsing = asked(load(smollm2_directory()), tools=TOOLS, **fields)
    assert parsing == Parsing(form="hermes", tools=frozenset(names), most=most)
    assert '"name": "f"' in prompt


def test_tools_that_may_not_be_called_are_not_told_of(qwen3):
    prompt, parsing = asked(qwen3, tools=TOOLS, tool_choice="none")
    assert "tools" not in prompt
    assert parsing == Parsing(thinks=True)


def test_tools_are_refused_where_the_topology_says_so():
    text = with_template(NONE, tool_parser="none")
    with pytest.raises(ApiError) as caught:
        ask(text, request(tools=TOOLS))
    assert (caught.value.status, caught.value.detail.param) == (400, "tools")
    assert "tool_parser" in caught.value.detail.message
    assert asked(text, tools=TOOLS, tool_choice="none")[1] is None


def test_qwen3_thinks_unless_it_is_told_not_to(qwen3):
    assert asked(qwen3)[1] == Parsing(thinks=True)
    for fields in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        prompt, parsing = asked(qwen3, **fields)
        assert prompt.endswith("<think>\n\n</think>\n\n")
        assert parsing is None
    assert asked(qwen3, thinking_token_budget=0)[0] == prompt


def test_a_template_may_open_the_reasoning_itself():
    text = with_template(OPENS)
    assert asked(text)[1] == Parsing(thinks=True, opened=True)
    prompt, parsing = asked(text, thinking_token_budget=0)
    assert (prompt, parsing) == ("q<think>\n\n</think>\n\n", None)
    assert asked(text, add_generation_prompt=False)[1] == Parsing(thinks=True)


def test_a_message_that_goes_on_has_done_its_thinking(qwen3):
    def going_on(content):
        turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
        return asked(qwen3, messages=turns, continue_final_message=True, add_generation_prompt=False)[1]

    assert going_on("The answer is") is None


def test_a_budget_comes_with_the_tokens_that_end_the_reasoning(qwen3):
    parsing = asked(qwen3, thinking_token_budget=7)[1]
    assert parsing.budget == 7
    assert qwen3.decode(parsing.closing, skip_special_tokens=False) == "\n</think>\n\n"


@pytest.mark.parametrize(
    ("source", "fields", "param"),
    [
        (NONE, {"thinking_token_budget": 5}, "thinking_token_budget"),
        (NONE, {"reasoning_effort": "low"}, "reasoning_effort"),
        (NONE + "{{ enable_thinking }}", {"reasoning_effort": "low"}, "reasoning_effort"),
        (EFFORT, {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "reasoning_effort"),
    ],
)
def test_what_this_model_cannot_do_is_refused_by_name(source, fields, param):
    with pytest.raises(ApiError) as caught:
        ask(with_template(source), request(**fields))
    assert (caught.value.status, caught.value.detail.param) == (400, param)
    assert param in caught.value.detail.message


@pytest.mark.parametrize(
    ("effort", "asked_for", "budget"),
    [
        ("minimal", {}, 512),
        ("low", {}, 2048),
        ("medium", {}, 8192),
        ("high", {}, 0),
        ("max", {}, 0),
        ("low", {"thinking_token_budget": 9}, 9),
        ("low", {"thinking_token_budget": 9999}, 2048),
        ("high", {"thinking_token_budget": 9999}, 9999),
    ],
)
def test_an_effort_bounds_the_reasoning_where_the_template_knows_none(qwen3, effort, asked_for, budget):
    assert asked(qwen3, reasoning_effort=effort, **asked_for)[1].budget == budget
    assert asked(with_template(OPENS), reasoning_effort=effort, **asked_for)[1].budget == budget


def test_no_effort_at_all_is_what_a_model_without_reasoning_makes():
    assert asked(with_template(NONE), reasoning_effort="none") == ("q", None)
    assert asked(with_template(OPENS), reasoning_effort="none") == ("q<think>\n\n</think>\n\n", None)


def test_the_effort_reaches_a_template_that_reads_it():
    text = with_template(EFFORT)
    assert asked(text, reasoning_effort="low")[0] == "lowq"
    assert asked(text, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "low"})[0] == "lowq"


# --- tokens to events ---

CALL = '<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'
PARTS = st.lists(
    st.sampled_from(["<think>", "</think>", "\n", " ", "the ", "é", "<", CALL, CALL[:30], "stop", "sto"]), max_size=10
)


def telling(parsing, stops=(), **fields):
    numbers = itertools.count()
    text = TextStream(byte_level().marked_pieces, stops)
    return text, Telling(text, MessageParser(parsing, lambda: f"c{next(numbers)}"), **fields)


def run(parsing, tokens, cuts, stops, *, logprobs):
    """(message, tokens read, tokens of the reasoning, log-probabilities told) of tokens that come in pieces."""
    text, told = telling(parsing, stops)
    events, shown = [], []
    places = sorted({cut % (len(tokens) + 1) for cut in cuts} | {0, len(tokens)})
    for a, b in itertools.pairwise(places):
        entries = [Logprob(token, -1.0) for token in tokens[a:b]] if logprobs else []
        more, late = told.feed(tokens[a:b], entries)
        events, shown = events + more, shown + late
        if text.stopped or told.done:
            break
    more, late = told.finish()
    message = gather(events + more)
    return message, text.tokens, told.reasoning_tokens, [entry.token for entry in shown + late]


@settings(max_examples=150, deadline=None)
@given(
    parts=PARTS,
    cuts=st.lists(st.integers(0, 200), max_size=20),
    thinks=st.booleans(),
    most=st.sampled_from([0, 1]),
    stops=st.sampled_from([[], ["stop"]]),
    logprobs=st.booleans(),
)
def test_ticks_change_neither_the_message_nor_what_is_counted(parts, cuts, thinks, most, stops, logprobs):
    tokens = byte_level().encode("".join(parts), add_special_tokens=False)
    parsing = Parsing(tools=frozenset({"f"}), thinks=thinks, most=most)
    whole = run(parsing, tokens, [], stops, logprobs=logprobs)
    assert run(parsing, tokens, cuts, stops, logprobs=logprobs) == whole
    message, count, thought, shown = whole
    assert 0 <= thought <= count <= len(tokens)
    assert (thought > 0) >= bool(message.reasoning)
    assert len(message.calls) <= (most or len(tokens))
    assert not logprobs or stops or shown == tokens[:count]


def test_reasoning_is_counted_to_its_closing_tag():
    for text, thought in (("<think>a</think>b c", "<think>a</think>"), ("a <think>b</think>", ""), ("\n\n", "")):
        tokens = byte_level().encode(text, add_special_tokens=False)
        expected = len(byte_level().encode(thought, add_special_tokens=False))
        assert run(Parsing(thinks=True), tokens, [], [], logprobs=False)[2] == expected


@pytest.mark.parametrize("step", [1, 100])
def test_reading_stops_where_the_budget_is_spent(step):
    tokens = byte_level().encode("<think>" + "abc " * 20, add_special_tokens=False)
    text, told = telling(Parsing(thinks=True), budget=9)
    for at in range(0, len(tokens), step):
        told.feed(tokens[at : at + step])
        if told.overdrawn:
            break
    assert (text.tokens, told.reasoning_tokens) == (9, 9)
    told.release()
    assert not told.overdrawn
    answer = byte_level().encode("\n</think>\n\nyes", add_special_tokens=False)
    assert gather(told.feed(answer)[0]).content == "yes"


@pytest.mark.parametrize("special", [True, False])
def test_tags_that_are_special_tokens_are_read_all_the_same(special):
    tokenizer = Tokenizer.from_str(byte_level().tokenizer.to_str())
    tokenizer.add_tokens([AddedToken(tag, special=special) for tag in ("<tool_call>", "</tool_call>", "<|end|>")])
    text = model_text(tokenizer)
    tokens = text.encode(CALL + "<|end|>", add_special_tokens=False)
    parser = MessageParser(Parsing(tools=frozenset({"f"})), lambda: "c")
    told = Telling(TextStream(text.marked_pieces), parser)
    events = told.feed(tokens)[0] + told.finish()[0]
    message = gather(events)
    assert [call.function.arguments for call in message.calls] == ['{"a": "é"}']
    assert message.content == ("" if special else "<|end|>")
    assert ("<tool_call>" in TextStream(text.pieces).feed(tokens)) is not special
