"""Calls with tags instead of JSON, as Qwen3-Coder writes them: what they say, wherever they are cut."""

import json

import pytest
from api_events import events_of
from api_tokenizers import byte_level, model_text
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemesh.api.asking import ask
from edgemesh.api.decode import BodyDecoder
from edgemesh.api.dialect import Dialect
from edgemesh.api.events import CallArguments, CallBegin, CallEnd, Content, Reasoning, gather
from edgemesh.api.openai import ChatRequest
from edgemesh.api.parser import Parsing
from edgemesh.api.tool_texts import Texts, texts_of
from edgemesh.api.tool_types import Function, FunctionCall, Tool

NAMES = frozenset({"f", "get_weather"})
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "value": {"type": "integer"},
        "any": {},
        "kind": {"enum": ["a", "b"]},
        "there": {"$ref": "#/$defs/named"},
        "mixed": {"type": ["string", "integer"]},
        "round": {"$ref": "#/properties/round"},
        "odd": {"$ref": "elsewhere"},
        "one": {"const": None},
        "wrong": 5,
    },
    "$defs": {"named": {"oneOf": [{"const": "x"}, {"type": "string"}]}},
}
TEXTS = texts_of([Tool(type="function", function=Function(name="f", parameters=SCHEMA))])
CODER = Parsing(form="qwen3_coder", tools=NAMES, texts=TEXTS)
CUTS = st.lists(st.integers(0, 400), max_size=30)


def read(text, cuts=(), parsing=CODER):
    """(content, reasoning, [(name, arguments)]) of a text; the events' own order is checked on the way."""
    events = events_of(parsing, text, cuts)
    opened = False
    for event in events:
        assert opened == isinstance(event, CallArguments | CallEnd)
        assert isinstance(event, CallBegin | CallEnd | CallArguments | Content | Reasoning)
        opened = isinstance(event, CallBegin | CallArguments)
    assert not opened
    message = gather(events)
    return message.content, message.reasoning, [(c.function.name, c.function.arguments) for c in message.calls]


def written(name, arguments, *, outer=True):
    """A call as the model's own template writes it."""
    parts = [
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    ]
    text = f"<function={name}>\n{''.join(parts)}</function>"
    return f"<tool_call>\n{text}\n</tool_call>" if outer else text


def test_the_schema_says_which_arguments_are_texts():
    assert (
        Texts(always=frozenset({("f", "text"), ("f", "kind"), ("f", "there")}), nullable=frozenset({("f", "maybe")}))
        == TEXTS
    )
    assert texts_of([Tool(type="function", function=Function(name="f"))]) == Texts()
    odd = Function(name="f", parameters={"properties": []})
    assert texts_of([Tool(type="function", function=odd)]) == Texts()


TEXT = st.text('a"\\{}[]<>/\n é🎉:,5', max_size=12).filter(lambda text: "</parameter>" not in text)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXT,
        "kind": st.sampled_from("ab"),
        "there": TEXT,
        "value": st.integers() | st.booleans(),
        "any": st.none() | st.lists(st.integers(), max_size=3) | st.dictionaries(TEXT, TEXT, max_size=2),
    },
)
CALLS = st.tuples(st.sampled_from(["f"]), ARGUMENTS, st.booleans())
WORDS = st.text("ab >/_|é🎉\n{}\"'", max_size=12)


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(WORDS | CALLS, max_size=5), cuts=CUTS)
def test_calls_between_words(parts, cuts):
    text, calls, words = "", [], ""
    for part in parts:
        if isinstance(part, str):
            text += part
            words += part
        else:
            name, arguments, outer = part
            text += written(name, arguments, outer=outer)
            calls.append((name, arguments))
    content, reasoning, found = read(text, cuts)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert "".join(content.split()) == "".join(words.split())
    assert reasoning == ""
    assert calls or content == text


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool", "_call>", "<", "</", "<function=", "f>", "<function=f>", "<function=g>", "</function>",
    "<parameter=", "text>", "<parameter=text>", "<parameter=value>", "<parameter=maybe>", "</parameter>", "\n", " ", '"', "\\", "5",
    "null", "True", "{}", "x", "é🎉", "<think>", "</think>", ">", "=", "get_weather",
]  # fmt: skip
JUNK = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join)
ANY = st.builds(
    Parsing,
    form=st.just("qwen3_coder"),
    tools=st.sampled_from([frozenset(), NAMES]),
    most=st.sampled_from([0, 1, 2]),
    thinks=st.booleans(),
    opened=st.booleans(),
    thoughts=st.booleans(),
    texts=st.sampled_from([TEXTS, Texts()]),
)


@settings(max_examples=400, deadline=None)
@given(parsing=ANY, text=JUNK, cuts=CUTS)
def test_cuts_change_nothing(parsing, text, cuts):
    assert read(text, cuts, parsing) == read(text, (), parsing) == read(text, range(len(text)), parsing)


@settings(max_examples=200, deadline=None)
@given(text=JUNK, cuts=CUTS)
def test_what_calls_no_tool_of_the_request_is_content_to_the_letter(text, cuts):
    parsing = Parsing(form="qwen3_coder", tools=frozenset({"nobody"}))
    assert read(text, cuts, parsing) == (text, "", [])


def one(key, value):
    return f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        (one("text", "5"), "", '{"text": "5"}'),
        (one("text", ""), "", '{"text": ""}'),
        (one("text", "\n a\n\n"), "", '{"text": "\\n a\\n\\n"}'),
        (one("text", "<parameter=x>"), "", '{"text": "<parameter=x>"}'),
        (one("text", "null"), "", '{"text": "null"}'),
        (one("maybe", "null"), "", '{"maybe": null}'),
        (one("maybe", "5"), "", '{"maybe": "5"}'),
        (one("value", "5"), "", '{"value": 5}'),
        (one("value", "five"), "", '{"value": "five"}'),
        (one("value", "NaN"), "", '{"value": "NaN"}'),
        (one("value", "8e973"), "", '{"value": 8e973}'),
        (one("any", "[" * 9999), "", '{"any": "' + "[" * 9999 + '"}'),
        (one("any", "True"), "", '{"any": true}'),
        (one("any", "None"), "", '{"any": null}'),
        (one("any", '{"a":\n 1}'), "", '{"any": {"a":\n 1}}'),
        (one("any", ""), "", '{"any": ""}'),
        (one('a"b', "[1]"), "", '{"a\\"b": [1]}'),
        (one("text", "x").replace("\n", ""), "", '{"text": "x"}'),
        ("So:\n<tool_call>\n<function=f>\n</function>\n</tool_call>\n", "So:", "{}"),
        ("<function=f></function> ok", " ok", "{}"),
        ("<function=f>\n</function>\n</tool_call>", "", "{}"),
        ("<function=f> what </function>", "what </function>", "{}"),
        ("<tool_call>\n<function=f>\n<parameter=text>\nab\n", "", '{"text": "ab'),
        ("<tool_call>\n<function=f>\n<parameter=value>\n5", "", '{"value": '),
        ("<tool_call>\n<function=f>\n<parameter=val", "", "{"),
        ("<tool_call><tool_call>\n<function=f></function></tool_call>", "<tool_call>", "{}"),
    ],
)
def test_values_are_what_the_schema_says(text, content, arguments):
    assert read(text) == (content, "", [("f", arguments)])


@pytest.mark.parametrize(
    "text", ["<function=f", "<function=g>\n</function>", "<tool_call>\n{}", "<function=" + "f" * 200 + ">", "a < b"]
)
def test_what_is_no_call_is_content(text):
    assert read(text) == (text, "", [])


TEMPLATE = """{% if tools %}# Tools: {% for tool in tools %}{{ tool.function.name }} {% endfor %}as
<tool_call>
<function=name>
<parameter=key>
value
</parameter>
</function>
</tool_call>
{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content or '' }}
{% for call in message.tool_calls or [] %}<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}<parameter={{ key }}>
{{ value }}
</parameter>
{% endfor %}</function>
</tool_call>
{% endfor %}{% endfor %}"""


def test_the_template_shows_the_form():
    text = model_text(byte_level().tokenizer, b"{}", TEMPLATE)
    assert text.dialect == Dialect(form="qwen3_coder", native=True, system=True)
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    body = {"model": "m", "messages": [{"role": "user", "content": "q"}], "tools": tools}
    parsing = ask(text, BodyDecoder().decode(json.dumps(body).encode(), ChatRequest)).parsing
    assert parsing == Parsing(form="qwen3_coder", tools=frozenset("f"), texts=TEXTS)


@pytest.mark.parametrize("arguments", ['{"text": "a\\n\\"b", "value": 5, "any": {"é": [null]}}', "{}", "no object"])
def test_a_template_without_tools_is_given_them_in_this_form(arguments):
    source = "{% for message in messages %}{{ message.content }}|{% endfor %}"
    text = model_text(byte_level().tokenizer, b"{}", source, tool_parser="qwen3_coder")
    assert text.dialect == Dialect(form="qwen3_coder", native=False, system=True)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    body = {"model": "m", "messages": turns, "tools": tools}
    found = ask(text, BodyDecoder().decode(json.dumps(body).encode(), ChatRequest))
    prompt = text.decode(found.ids, skip_special_tokens=False)
    described, _, said = prompt.partition("|q|")
    assert "<parameter=" in described
    [(name, back)] = read(said.removesuffix("|"), parsing=found.parsing)[2]
    assert (name, json.loads(back)) == ("f", json.loads(arguments) if arguments != "no object" else {})
    assert FunctionCall(name="f", arguments=back)
