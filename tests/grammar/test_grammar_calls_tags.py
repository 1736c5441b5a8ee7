"""Calls whose arguments have tags: what their schema says is kept to, or refused where it must be and cannot."""

import functools
import itertools
import json
import random

import jsonschema
import msgspec
import pytest
from grammar_walks import EOS, allowed
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from edgemesh.api.calling import with_calls
from edgemesh.api.decode import BodyDecoder
from edgemesh.api.errors import ApiError
from edgemesh.api.events import gather
from edgemesh.api.limits import Limits
from edgemesh.api.openai import ChatRequest
from edgemesh.api.parser import MessageParser, Parsing
from edgemesh.api.resolve import resolve_chat
from edgemesh.api.tool_prompt import written
from edgemesh.api.tool_texts import texts_of
from edgemesh.api.tool_types import FunctionCall, Tool
from edgemesh.grammar.matching import Grammars

LIMITS = Limits(model="tiny", context=64, vocab_size=1000, eos_token_ids=(0,), groups=1)


@functools.cache
def tokenizer():
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False, special_tokens=["<|end|>"]
    )
    found.train_from_iterator(["<parameter=a>\nx\n</parameter>\n</function>"], trainer)
    return found


@functools.cache
def grammars():
    return Grammars(tokenizer().to_str().encode(), (EOS,), tokenizer().get_vocab_size())


class Asked:
    """A request with one tool, and what its grammar takes."""

    def __init__(self, schema, *, choice="required", **function):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema} | function}
        body = {"model": "tiny", "messages": [{"role": "user", "content": "q"}], "tools": [tool]}
        body |= {} if choice is None else {"tool_choice": choice}
        request = BodyDecoder().decode(json.dumps(body).encode(), ChatRequest)
        texts = texts_of(msgspec.convert([tool], list[Tool]))
        self.parsing = Parsing(form="qwen3_coder", tools=frozenset("f"), texts=texts)
        job = msgspec.structs.replace(resolve_chat(request, [1], LIMITS, 0), parsing=self.parsing)
        self.source = with_calls(request, job, frozenset()).grammar

    def takes(self, text):
        matcher = grammars().matcher(self.source)
        if not all(matcher.accept(token) for token in tokenizer().encode(text).ids):
            return False
        return matcher.ended or EOS in allowed(matcher.mask())

    def call(self, **arguments):
        return self.takes(written(FunctionCall(name="f", arguments=json.dumps(arguments)), "qwen3_coder"))

    def walk(self, draw, limit=160):
        """A random output that the grammar allows; None where it does not end in time."""
        matcher, tokens = grammars().matcher(self.source), []
        for step in range(limit):
            found = allowed(matcher.mask())
            if matcher.ended or EOS in found:
                return tokenizer().decode(tokens, skip_special_tokens=False)
            closing = [token for token in found if set(tokenizer().decode([token])) <= set('"}]\n<>/=_acefilmnoprtuxz')]
            token = draw.choice(closing if closing and draw.random() < 0.5 + step / 200 else found)
            assert matcher.accept(token)
            tokens.append(token)
        return None

    def read(self, text):
        numbers = itertools.count()
        parser = MessageParser(self.parsing, lambda: f"c{next(numbers)}")
        return gather([*parser.feed(text), *parser.finish()])


def properties(required=(), **schemas):
    return {"type": "object", "properties": schemas, "required": list(required), "additionalProperties": False}


SCHEMAS = [
    (properties(a={"type": "string"}), [{}, {"a": ""}, {"a": "x\n<b>\n"}], [{"b": "x"}, {"a": "x</parameter>\n"}]),
    (properties(["a"], a={"enum": ["x", "yy"]}), [{"a": "x"}, {"a": "yy"}], [{}, {"a": "z"}]),
    (properties(["a"], a={"type": "string", "pattern": "^[ab]+$"}), [{"a": "ab"}], [{"a": ""}, {"a": "c"}]),
    (properties(["a"], a={"type": "string", "minLength": 2, "maxLength": 3}), [{"a": "é🎉"}], [{"a": "x"}, {"a": "xxxx"}]),
    (properties(["a"], a={"type": ["string", "null"], "maxLength": 2}), [{"a": "x"}, {"a": None}], [{"a": "xxx"}]),
    (properties(["a"], a={"type": "integer", "minimum": 5}), [{"a": 7}], [{"a": 4}, {"a": "x"}]),
    (properties(["a", "b"], a={"$ref": "#/$defs/n"}) | {"$defs": {"n": {"type": "number"}}, "additionalProperties": True}, [{"a": 1.5, "b": [1]}], [{"a": 1}]),
    (properties(["a"], a={"type": "array", "items": {"enum": ["x"]}}), [{"a": ["x"]}], [{"a": ["y"]}]),
    ({"type": "object"}, [{}, {"a": "x", "b": "y"}], []),
    (properties(), [{}], [{"a": 1}]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong"), SCHEMAS)
@pytest.mark.parametrize("strict", [True, False])
def test_a_call_that_must_come_keeps_to_its_schema(schema, right, wrong, strict):
    asked = Asked(schema, strict=strict)
    for arguments in right:
        assert asked.call(**arguments), arguments
    for arguments in wrong:
        assert not asked.call(**arguments), arguments


@pytest.mark.parametrize("schema", [schema for schema, *_ in SCHEMAS])
def test_whatever_is_allowed_is_read_as_a_call_of_this_schema(schema):
    asked, draw, whole = Asked(schema, choice={"type": "function", "function": {"name": "f"}}), random.Random(3), 0
    for _ in range(40):
        output = asked.walk(draw)
        if output is None:
            continue
        whole += 1
        message = asked.read(output)
        assert message.content == "", output
        for each in message.calls:
            jsonschema.validate(json.loads(each.function.arguments), schema)
    assert whole > 3


def test_a_strict_tool_is_kept_to_with_and_without_the_outer_tag():
    asked = Asked(properties(["a"], a={"type": "integer"}), choice=None, strict=True)
    good = written(FunctionCall(name="f", arguments='{"a": 1}'), "qwen3_coder")
    for right in ("", "a < b", f"So:\n{good}", f"{good}{good}"):
        assert asked.takes(right), right
    bare = good.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    for wrong in (bare, f"So: {bare}", good.replace("1", "x"), f"{good} <function=f>"):
        assert not asked.takes(wrong), wrong


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (properties(a={"type": "string", "format": "uuid"}), "/properties/a/format"),
        (properties(a={"type": "string", "pattern": "a"}), "/properties/a"),
        (properties(a={"type": "string", "maxLength": 5000}), "/properties/a/maxLength"),
        (properties(a={"$ref": "#/$defs/n"}) | {"$defs": {"n": {"type": "string"}}}, "/properties/a"),
        (properties(a={}) | {"minProperties": 1}, "/minProperties"),
        (properties(**{"a>b": {}}), "/properties/a>b"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_where_it_must_be(schema, place):
    with pytest.raises(ApiError, match=place) as refused:
        Asked(schema, strict=True)
    assert refused.value.detail.param == "tools[0].function.parameters"
    assert Asked(schema).source
