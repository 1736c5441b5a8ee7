"""What a model writes becomes the same message however its text is cut, and nothing of it is lost or told twice."""

import json
import time

import pytest
from api_events import events_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgemesh.api.events import CallArguments, CallBegin, CallEnd, Content, Reasoning, gather
from edgemesh.api.parser import MessageParser, Parsing

NAMES = frozenset({"f", "get_weather"})
HERMES = Parsing(form="hermes", tools=NAMES)
LLAMA = Parsing(form="llama", tools=NAMES)
CUTS = st.lists(st.integers(0, 400), max_size=30)
FORMS = {"hermes": HERMES, "llama": LLAMA}


def read(parsing, text, cuts=()):
    """(content, reasoning, [(name, arguments)]) of a text; the events' own order is checked on the way."""
    events = events_of(parsing, text, cuts)
    opened = None
    for event in events:
        match event:
            case CallBegin(index, name, _):
                assert opened is None
                assert name == f"c{index}"
                opened = index
            case CallArguments(index, piece):
                assert index == opened
                assert piece
            case CallEnd(index):
                assert index == opened
                opened = None
            case Content(piece) | Reasoning(piece):
                assert opened is None
                assert piece
    assert opened is None
    message = gather(events)
    return message.content, message.reasoning, [(c.function.name, c.function.arguments) for c in message.calls]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a"\\{}[]<>/\n é🎉:,', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"\\}', max_size=4), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text('abc "\\{}é', max_size=5), JSON, max_size=4)
LAYOUT = st.fixed_dictionaries(
    {},
    optional={"indent": st.just(1), "ensure_ascii": st.booleans(), "separators": st.just((",", ":"))},
)
CALLS = st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS, LAYOUT, st.sampled_from(["", "\n", " \n"]))
WORDS = st.text("ab <>/_|é🎉\n{}\"'", max_size=12).filter(lambda text: "<tool" not in text and "<|" not in text)


def write_hermes(name, arguments, blank):
    return f'<tool_call>{blank}{{"name": "{name}", "arguments": {arguments}}}{blank}</tool_call>'


@settings(max_examples=150, deadline=None)
@given(parts=st.lists(WORDS | CALLS, max_size=5), cuts=CUTS)
def test_hermes_calls_between_words(parts, cuts):
    text, calls, words = "", [], []
    for part in parts:
        if isinstance(part, str):
            text += part
            words.append(part)
        else:
            name, arguments, layout, blank = part
            written = json.dumps(arguments, **layout)
            text += write_hermes(name, written, blank)
            words.append(None)
            calls.append((name, written))
    content, reasoning, found = read(HERMES, text, cuts)
    assert found == calls
    assert [json.loads(arguments) for _, arguments in found] == [part[1] for part in parts if not isinstance(part, str)]
    assert reasoning == ""
    # Blanks beside a call are the form's.
    assert "".join(content.split()) == "".join("".join(filter(None, words)).split())
    assert calls or content == text


@settings(max_examples=100, deadline=None)
@given(calls=st.lists(CALLS, min_size=1, max_size=4), tag=st.booleans(), cuts=CUTS, after=st.sampled_from(["", " ok"]))
def test_llama_calls_at_the_beginning(calls, tag, cuts, after):
    written = [json.dumps({"name": name, "parameters": arguments}, **layout) for name, arguments, layout, _ in calls]
    text = ("<|python_tag|>" if tag else "") + "; ".join(written) + after
    content, _, found = read(LLAMA, text, cuts)
    assert [(name, json.loads(arguments)) for name, arguments in found] == [each[:2] for each in calls]
    assert content == after


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool", "_call>", "<", "</", '{"name": "f"', '"name"', ": ", '"f"', '"g"', ",", "{", "}",
    '"arguments": ', "{}", '{"a": 1}', "}\n", "\n", " ", "<|python_tag|>", "<|", '{"name": "get_weather", "parameters": {"b": "}',
    '"', "\\", "<think>", "</think>", "x", ";", "é🎉", '"type": "function", ', "[", "]", '{"arguments": {"c": 2}, "name": "f"}',
]  # fmt: skip
JUNK = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join)
ANY = st.builds(
    Parsing,
    form=st.sampled_from(["hermes", "llama"]),
    tools=st.sampled_from([frozenset(), NAMES]),
    most=st.sampled_from([0, 1, 2]),
    thinks=st.booleans(),
    opened=st.booleans(),
    thoughts=st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(parsing=ANY, text=JUNK, cuts=CUTS)
def test_cuts_change_nothing(parsing, text, cuts):
    assert read(parsing, text, cuts) == read(parsing, text) == read(parsing, text, range(len(text)))


@settings(max_examples=150, deadline=None)
@given(form=st.sampled_from(["hermes", "llama"]), text=JUNK, cuts=CUTS)
def test_what_calls_no_tool_of_the_request_is_content_to_the_letter(form, text, cuts):
    assert read(Parsing(form=form, tools=frozenset({"nobody"})), text, cuts) == (text, "", [])


@settings(max_examples=150, deadline=None)
@given(form=st.sampled_from(["hermes", "llama"]), text=JUNK)
def test_everything_written_is_told_once(form, text):
    """The events' texts are parts of the text, in order; what is in none of them is an envelope."""
    told = [event.text for event in events_of(FORMS[form], text) if isinstance(event, Content | CallArguments)]
    at = 0
    for piece in told:
        if piece == "{}":  # a call without arguments, which may have no text of its own
            continue
        at = text.index(piece, at) + len(piece)
    for character in "é🎉[]\\x12":
        assert sum(piece.count(character) for piece in told) == text.count(character)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "parameters": {"a": [1]}}</tool_call>', "", [("f", '{"a": [1]}')]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"type": "function", "name": "f", "arguments": {}}</tool_call>', "", [("f", "{}")]),
        # the tag, or the last brace, forgotten
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> so', " so", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")] * 2),
        ('<tool_call>\n{"name": "f", "arguments": {"a": {"b": "}</tool_call>"}}}\n</tool_call>', "", [("f", '{"a": {"b": "}</tool_call>"}}')]),
        ('Let me see.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n\n', "Let me see.", [("f", "{}")]),
        # no call
        ('<tool_call>{"name": "g", "arguments": {}}</tool_call>', None, []),
        ("<tool_call>f()</tool_call>", None, []),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', None, []),
        ('<tool_call>{"name": 5}</tool_call> <tool', None, []),
        ("text <tool_call>", None, []),
        ('<tool_call>{"name": "f", "argu', None, []),
        ('{"name": "f", "arguments": {}}', None, []),
        # cut off, or not JSON: as it was written
        ('<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
        ('<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>', "", [("f", "{a: 1}")]),
        # a tag that a tag follows
        ('<tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>', "<tool_call>", [("f", "{}")]),
    ],
)  # fmt: skip
def test_hermes_texts(text, content, calls):
    assert read(HERMES, text, range(len(text))) == (text if content is None else content, "", calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ('\n {"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        ('<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        ('I call it. <|python_tag|>{"name": "f", "parameters": {}}', "I call it.", [("f", "{}")]),
        ('{"name": "f", "parameters": {}}; {"name": "f", "parameters": {"b": 2}}', "", [("f", "{}"), ("f", '{"b": 2}')]),
        ('{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}}', '\n{"name": "g", "parameters": {}}', [("f", "{}")]),
        # no call
        ('{"name": "Bob", "age": 5}', None, []),
        ('  {"a": 1}', None, []),
        ('So: {"name": "f", "parameters": {}}', None, []),
        ("<|python_tag|>print(1)", None, []),
        ("<|python_tag", None, []),
    ],
)  # fmt: skip
def test_llama_texts(text, content, calls):
    assert read(LLAMA, text, range(len(text))) == (text if content is None else content, "", calls)


THINKS = Parsing(thinks=True)
BOTH = Parsing(form="hermes", tools=NAMES, thinks=True)


@pytest.mark.parametrize(
    ("parsing", "text", "content", "reasoning"),
    [
        (THINKS, "<think>\nwell\n</think>\n\nyes", "yes", "well"),
        (THINKS, "\n<think>a\n\nb</think>c</think>", "c</think>", "a\n\nb"),
        (THINKS, "<think>\n\n</think>\n\nyes", "yes", ""),
        (THINKS, "yes <think>no</think>", "yes <think>no</think>", ""),
        (THINKS, " <thin", " <thin", ""),
        (THINKS, "<think>half\n</thi", "", "half\n</thi"),
        (THINKS, "", "", ""),
        (Parsing(thinks=True, opened=True), "\nwell</think>yes\n", "yes\n", "well"),
        (Parsing(thinks=True, opened=True), "well", "", "well"),
        (Parsing(thinks=True, thoughts=False), "<think>well</think>yes", "yes", ""),
        (Parsing(), "<think>well</think>yes", "<think>well</think>yes", ""),
        (BOTH, '<think><tool_call>{"name": "f"}</tool_call></think>\n\n', "", '<tool_call>{"name": "f"}</tool_call>'),
    ],
)
def test_reasoning_texts(parsing, text, content, reasoning):
    assert read(parsing, text, range(len(text))) == (content, reasoning, [])


@settings(max_examples=100, deadline=None)
@given(thought=st.text("ab \n<>/think", max_size=20), words=WORDS, call=CALLS, opened=st.booleans(), cuts=CUTS)
@example(thought="\n\n", words=" ", call=("f", {}, {}, ""), opened=False, cuts=[])
def test_reasoning_then_words_then_a_call(thought, words, call, opened, cuts):
    if "</think>" in thought:
        return
    written = json.dumps(call[1], **call[2])
    text = ("" if opened else "<think>") + thought + "</think>" + words + write_hermes(call[0], written, call[3])
    parsing = Parsing(form="hermes", tools=NAMES, thinks=True, opened=opened)
    content, reasoning, calls = read(parsing, text, cuts)
    assert (reasoning, calls) == (thought.strip("\n"), [(call[0], written)])
    assert content == words.lstrip("\n").rstrip(" \n")


def test_arguments_stream_as_they_are_written():
    parser = MessageParser(HERMES, lambda: "c0")
    assert parser.feed('<tool_call>{"name": "f", "arguments":') == []
    assert parser.feed(' {"pa') == [CallBegin(0, "c0", "f"), CallArguments(0, '{"pa')]
    assert parser.feed('th": "x') == [CallArguments(0, 'th": "x')]
    assert parser.feed('"}}') == [CallArguments(0, '"}'), CallEnd(0)]
    assert parser.feed("\n</tool_call>\n") == []
    assert parser.called
    assert parser.finish() == []


def test_text_is_told_at_once_unless_it_may_be_a_tag():
    parser = MessageParser(HERMES, lambda: "c0")
    assert parser.feed("a <b") == [Content("a <b")]
    assert parser.feed("<tool_") == []
    assert parser.feed("x") == [Content("<tool_x")]


@pytest.mark.parametrize("form", FORMS)
def test_the_last_call_that_may_come_ends_the_message(form):
    parsing = Parsing(form=form, tools=NAMES, most=1)
    parser = MessageParser(parsing, lambda: "c0")
    opening = "<tool_call>" if form == "hermes" else ""
    assert parser.exact
    parser.feed(opening + '{"name": "f", "parameters": {')
    assert not parser.done
    parser.feed("}")
    assert parser.done
    assert parser.feed('}</tool_call><tool_call>{"name": "f"}') == []
    assert parser.finish() == []


def test_thinking_is_known_token_by_token():
    parser = MessageParser(THINKS, lambda: "c0")
    states = []
    for piece in ("\n", "<think>", "a", "</think>", "b"):
        parser.feed(piece)
        states.append(parser.thinking)
    assert states == [True, True, True, True, False]
    assert parser.thought


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 20_000,
        '<tool_call>{"arguments": {' * 10_000,
        '<tool_call>{"name": "' * 10_000,
        '<tool_call>{"name": "f", "arguments": {' * 10_000,
        "<tool_call" * 20_000,
        " \n" * 100_000,
        "{" * 200_000,
    ],
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("piece", [4, 1 << 20])
def test_no_text_takes_long(form, text, piece):
    began = time.process_time()
    parser = MessageParser(FORMS[form], lambda: "c")
    for at in range(0, len(text), piece):
        parser.feed(text[at : at + piece])
    parser.finish()
    assert time.process_time() - began < 5
