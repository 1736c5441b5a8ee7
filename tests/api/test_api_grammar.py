"""What a request wants its output to be: its source, or a refusal that names the parameter."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, regex_to_lark
from test_api_requests import CHAT, COMPLETION, DECODER

from edgemesh.api.errors import ApiError
from edgemesh.api.formats import MAX_SCHEMA_CHARS
from edgemesh.api.grammar import (
    check_constraints,
    choice_source,
    constrained_by,
    constraint,
    guided,
    lark_source,
    object_source,
    regex_source,
    schema_source,
)
from edgemesh.api.openai import ChatRequest, CompletionRequest
from edgemesh.wire.messages import Submit

BYTES = LLTokenizer("byte", n_vocab=257, eos_token=256)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def takes(source, text):
    """Whether the whole of ``text`` may be an output."""
    matcher = LLMatcher(BYTES, source, log_level=0)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def decoded(extra, kind=CompletionRequest):
    body = (COMPLETION if kind is CompletionRequest else CHAT) | extra
    return DECODER.decode(json.dumps(body).encode(), kind)


def refusal(call, *arguments):
    with pytest.raises(ApiError) as caught:
        call(*arguments)
    assert caught.value.status == 400
    return caught.value.detail


ASKED = {
    "response_format": ({"type": "json_object"}, '{"b":[]}', '["b"]'),
    "response_format.json_schema.schema": (
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": False}},
        '{"a":1}',
        '{"a":"1"}',
    ),
    "structured_outputs.json": ({"json": SCHEMA}, '{"a":1}', '{"a":"1"}'),
    "structured_outputs.regex": ({"regex": "a+"}, "aa", "ab"),
    "structured_outputs.choice": ({"choice": ["yes", "no"]}, "no", "nope"),
    "structured_outputs.grammar": ({"grammar": 'start: "a" /[0-9]/'}, "a1", "a"),
    "structured_outputs.json_object": ({"json_object": True}, "{}", "[]"),
    "guided_json": (json.dumps(SCHEMA), '{"a":1}', "{}"),
    "guided_regex": (r"[a-c]{2}/\d", "ab/1", "ab/"),
    "guided_choice": (["a", "ab"], "ab", "b"),
    "guided_grammar": ('root ::= "x" [0-9]', "x5", "x"),
}


@pytest.mark.parametrize("param", ASKED)
@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_a_constraint_is_the_source_of_what_it_asks_for(param, kind):
    value, fits, does_not = ASKED[param]
    request = decoded({param.partition(".")[0]: value}, kind)
    check_constraints(request)
    assert constrained_by(request) == param
    source = constraint(request)
    assert takes(source, fits)
    assert not takes(source, does_not)


def test_text_asks_for_nothing():
    for extra in ({}, {"response_format": {"type": "text"}}, {"response_format": None, "guided_json": None}):
        request = decoded(extra)
        check_constraints(request)
        assert (constraint(request), constrained_by(request)) == ("", "")


def test_two_constraints_are_refused_and_both_are_named():
    params = list(ASKED)
    for one, other in zip(params, params[1:] + params[:1], strict=True):
        if one.partition(".")[0] == other.partition(".")[0]:
            continue
        request = decoded({name.partition(".")[0]: ASKED[name][0] for name in (one, other)})
        error = refusal(check_constraints, request)
        assert error.code == "conflicting_constraints"
        assert f"`{one}`" in error.message
        assert f"`{other}`" in error.message
    error = refusal(check_constraints, decoded({"structured_outputs": {"regex": "a", "choice": ["b"]}}))
    assert "`structured_outputs.regex` and `structured_outputs.choice`" in error.message


@pytest.mark.parametrize(
    ("extra", "param", "code"),
    [
        ({"guided_json": "{"}, "guided_json", "invalid_schema"),
        ({"guided_json": "[1]"}, "guided_json", "invalid_schema"),
        ({"guided_json": {"type": "banana"}}, "guided_json", "invalid_schema"),
        ({"guided_json": {"x": "y" * MAX_SCHEMA_CHARS}}, "guided_json", "invalid_schema"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json", "invalid_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"items": 5}}}},
            "response_format.json_schema.schema",
            "invalid_schema",
        ),
        ({"guided_grammar": 'root ::= "a" b'}, "guided_grammar", "invalid_grammar"),
        ({"guided_choice": ["\x01" * 1000 + str(place) for place in range(1000)]}, "guided_choice", "invalid_grammar"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(extra, param, code):
    error = refusal(constraint, decoded(extra))
    assert (error.param, error.code) == (param, code)
    assert f"`{param}`" in error.message
    assert len(error.message) < 1000


def test_no_source_is_longer_than_its_message_takes():
    from edgemesh.api.grammar import MAX_SOURCE_CHARS

    assert f"max_length={MAX_SOURCE_CHARS}" in str(Submit.__annotations__["grammar"]).replace("1 << 20", str(1 << 20))


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ('{"a":1}', True),
        ('{ "a": 1 }', True),
        ('{\n  "a": 1\n}', True),
        ('{\n\t"a":\n\t\t1}', True),
        ('{  "a":1}', False),
        ('{\n\n"a":1}', False),
        ("{\n" + " " * 33 + '"a":1}', False),
        (' {"a":1}', False),
        ('{"a":1} ', False),
        ('{"\\u0061":1}', False),
    ],
)
def test_white_space_between_the_tokens_of_json_has_a_bound(text, fine):
    assert takes(schema_source(SCHEMA, "guided_json"), text) is fine


@settings(deadline=None, max_examples=200)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=6), st.text(max_size=12))
def test_a_choice_is_one_of_its_texts_and_nothing_else(choices, other):
    source = choice_source(choices)
    assert all(takes(source, each) for each in choices)
    assert takes(source, other) is (other in choices)


@settings(deadline=None, max_examples=200)
@given(st.text(min_size=1, max_size=12))
def test_any_text_can_be_written_as_a_pattern(text):
    source = regex_source(re.escape(text))
    assert takes(source, text)
    assert not takes(source, text + "x")


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet='/\\ab\n\r."#[]*+(|){}^$ \t', min_size=1, max_size=12))
def test_a_pattern_never_leaves_its_place(pattern):
    """Whatever is in it, it is read as the library reads a pattern that it places itself, or does not compile."""
    ours, theirs = regex_source(pattern), LLMatcher.grammar_from_regex(regex_to_lark(pattern, ""))
    if LLMatcher(BYTES, ours, log_level=0).is_error():
        return
    for text in ("a", "b", "ab", "/", "\\", "\n", "", "a/b", "#", '"'):
        assert takes(ours, text) is takes(theirs, text), text


def test_a_schema_within_a_larger_grammar_is_the_same():
    source = f'%llguidance {{}}\nstart: "<tool>" args "</tool>"\nargs: %json {json.dumps(guided(SCHEMA, "tools"))}'
    assert takes(source, '<tool>{"a":1}</tool>')
    assert not takes(source, '<tool>{"\\u0061":1}</tool>')
    assert not takes(source, '<tool>{"a":1   }</tool>')


def test_any_object_is_an_object():
    for text, fine in (('{"a":{"b":[1,null]}}', True), ("{}", True), ("[]", False), ("1", False)):
        assert takes(object_source(), text) is fine


def test_a_grammar_in_lark_stays_as_it_is():
    for text in ('%llguidance {}\nstart: "::="', 'start: "::=" b\nb: "x"', "  start : /a/"):
        assert lark_source(text, "guided_grammar").endswith(text)
