"""A grammar for calls allows what the parser reads as calls, and whatever it allows is read so."""

import functools
import itertools
import json
import random

import jsonschema
import msgspec
import pytest
from grammar_walks import EOS, allowed
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from edgemesh.api.calling import with_calls
from edgemesh.api.decode import BodyDecoder
from edgemesh.api.errors import ApiError
from edgemesh.api.events import gather
from edgemesh.api.grammar import constrained_by, constraint
from edgemesh.api.limits import Limits
from edgemesh.api.openai import ChatRequest
from edgemesh.api.parser import MARKS, MessageParser, Parsing
from edgemesh.api.resolve import resolve_chat
from edgemesh.api.tool_prompt import written
from edgemesh.api.tool_texts import Texts, texts_of
from edgemesh.api.tool_types import FunctionCall, Tool
from edgemesh.grammar.matching import Grammars

LIMITS = Limits(model="tiny", context=64, vocab_size=1000, eos_token_ids=(0,), groups=1)
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"enum": [1, 2]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
STRICT = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
NAMED = {"type": "function", "function": {"name": "now"}}
OUTPUT = {
    "type": "json_schema",
    "json_schema": {"name": "o", "schema": {"type": "object", "properties": {}, "additionalProperties": False}},
}
TEXTS = [
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "x"}}\n</tool_call>',
    '"parameters": {}',
    "<think>ab</think>",
]


@functools.cache
def tokenizer(tags):
    """A small vocabulary with every byte, and the tags as tokens of their own, or not."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=["<end>"],
    )
    found.train_from_iterator(TEXTS * 4, trainer)
    found.add_tokens([AddedToken(tag, special=tag == "<|python_tag|>") for tag in MARKS if tags])
    return found


@functools.cache
def grammars(tags):
    return Grammars(tokenizer(tags).to_str().encode(), (EOS,), tokenizer(tags).get_vocab_size())


def decode(**fields):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "q"}]} | fields
    return BodyDecoder().decode(json.dumps(body).encode(), ChatRequest)


def kept(parsing, tags, **fields):
    request = decode(**fields)
    job = msgspec.structs.replace(
        resolve_chat(request, [1], LIMITS, 0),
        parsing=parsing,
        grammar=constraint(request),
        grammar_of=constrained_by(request),
    )
    return with_calls(request, job, frozenset(MARKS if tags else ()))


def source(parsing, tags, **fields):
    job = kept(parsing, tags, **fields)
    return job.grammar, job.grammar_of


def takes(text, source, tags):
    matcher = grammars(tags).matcher(source)
    ids = tokenizer(tags).encode(text).ids
    if not all(matcher.accept(token) for token in ids):
        return False
    return EOS in allowed(matcher.mask()) or matcher.ended


def walk(source, tags, draw, limit=300):
    """A random output that the grammar allows, and whether it came to its end."""
    matcher, tokens = grammars(tags).matcher(source), []
    for step in range(limit):
        found = allowed(matcher.mask())
        if matcher.ended or (EOS in found and draw.random() < 0.3):
            return tokenizer(tags).decode(tokens, skip_special_tokens=False), True
        found = [token for token in found if token != EOS]
        closing = [token for token in found if set(spelled_by(tags, token)) <= set('"}\n<>/_tolcaghink ')]
        token = draw.choice(closing if closing and draw.random() < 0.3 + step / 200 else found)
        assert matcher.accept(token)
        tokens.append(token)
    return tokenizer(tags).decode(tokens, skip_special_tokens=False), False


@functools.cache
def spelled_by(tags, token):
    return tokenizer(tags).decode([token], skip_special_tokens=False)


def parsing_of(form="hermes", names=("get_weather", "now"), **fields):
    texts = texts_of(msgspec.convert(TOOLS, list[Tool])) if form == "qwen3_coder" else Texts()
    return Parsing(form=form, tools=frozenset(names), texts=texts, **fields)


def read(parsing, text):
    numbers = itertools.count()
    parser = MessageParser(parsing, lambda: f"c{next(numbers)}")
    return gather([*parser.feed(text), *parser.finish()])


def call(form, name="get_weather", arguments='{"city": "x"}'):
    if form == "llama":
        return f'{{"name": "{name}", "parameters": {arguments}}}'
    if form == "qwen3_coder":
        return written(FunctionCall(name=name, arguments=arguments), form)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


BETWEEN = {"hermes": "\n", "llama": "; ", "qwen3_coder": "\n"}
EVERY = pytest.mark.parametrize(("form", "tags"), list(itertools.product(BETWEEN, [True, False])))


@EVERY
@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_tool_that_must_be_called_is(form, tags, thinks, choice):
    names = ("now",) if choice is NAMED else ("get_weather", "now")
    parsing = parsing_of(form, names, thinks=thinks, most=1 if choice is NAMED else 0)
    text, asked = source(parsing, tags, tools=TOOLS, tool_choice=choice)
    assert asked == "tools"
    draw, whole = random.Random(5), 0
    for _ in range(25):
        output, ended = walk(text, tags, draw)
        if not ended:
            continue
        whole += 1
        message = read(parsing, output)
        assert message.calls, output
        assert message.content == "", output
        for each in message.calls:
            assert each.function.name in names
            arguments = json.loads(each.function.arguments)
            jsonschema.validate(arguments, WEATHER if each.function.name == "get_weather" else {"maxProperties": 0})
    assert whole > 3


@EVERY
def test_calls_as_models_write_them_are_allowed(form, tags):
    text, _ = source(parsing_of(form), tags, tools=TOOLS, tool_choice="required")
    one, other = call(form), call(form, "now", "{}")
    assert takes(one, text, tags)
    assert takes(BETWEEN[form].join([one, other, one]), text, tags)
    for wrong in ("hi", one[:-3], one + "x", call(form, "nobody"), call(form, arguments='{"town": "x"}'), ""):
        assert not takes(wrong, text, tags), wrong
    single, _ = source(parsing_of(form, most=1), tags, tools=TOOLS, tool_choice="required")
    assert takes(one, single, tags)
    assert not takes(BETWEEN[form].join([one, one]), single, tags)


@EVERY
def test_reasoning_comes_first(form, tags):
    thought = "<think>\na <b> </thi\n</think>\n\n"
    text, _ = source(parsing_of(form, thinks=True), tags, tools=TOOLS, tool_choice="required")
    assert takes(thought + call(form), text, tags)
    assert takes(call(form), text, tags)
    assert not takes(thought, text, tags)
    opened, _ = source(parsing_of(form, thinks=True, opened=True), tags, tools=TOOLS, tool_choice="required")
    assert takes(thought.removeprefix("<think>") + call(form), opened, tags)
    assert not takes(call(form), opened, tags)


@EVERY
@pytest.mark.parametrize("thinks", [True, False])
def test_strict_tools_are_kept_to_where_a_call_begins(form, tags, thinks):
    text, asked = source(parsing_of(form, thinks=thinks), tags, tools=STRICT)
    assert asked == "tools"
    good, bad = call(form), call(form, arguments='{"town": "x"}')
    tag = "<|python_tag|>" if form == "llama" else ""
    for right in ("", "hi <b> {", "a\n\nb", good, BETWEEN[form].join([good, good]), f"So: {tag}{good}"):
        assert takes(right, text, tags), right
    for wrong in (bad, f"So: {tag}{bad}", good[:-1], call(form, "nobody")):
        assert not takes(wrong, text, tags), wrong
    if thinks:
        assert takes("<think>well</think>\n\nSo.", text, tags)
        assert takes(f"<think>well</think>\n\n{good}", text, tags)


@EVERY
def test_tools_that_are_not_strict_may_be_called_in_any_way(form, tags):
    assert source(parsing_of(form), tags, tools=TOOLS) == ("", "")


@pytest.mark.parametrize("tags", [True, False])
@pytest.mark.parametrize("thinks", [True, False])
def test_an_output_with_a_format_is_that_or_calls(tags, thinks):
    for output, right in ((OUTPUT, "{}"), ({"type": "json_object"}, '{"name": "get_weather"}')):
        parsing = parsing_of(thinks=thinks)
        text, asked = source(parsing, tags, tools=TOOLS, response_format=output)
        assert asked == "tools"
        assert takes(right, text, tags)
        assert takes(call("hermes"), text, tags)
        assert not takes("hi", text, tags)
        assert takes(f"<think>a</think>{right}", text, tags) == thinks
    text, _ = source(parsing_of(), tags, tools=TOOLS, structured_outputs={"choice": ["yes", "no"]})
    assert takes("yes", text, tags)
    assert not takes("maybe", text, tags)


@pytest.mark.parametrize("tags", [True, False])
def test_reasoning_comes_before_an_output_with_a_format(tags):
    parsing = Parsing(thinks=True)
    text, asked = source(parsing, tags, response_format=OUTPUT)
    assert asked == "response_format.json_schema.schema"
    assert takes("<think>\nwell\n</think>\n\n{}", text, tags)
    assert takes("{}", text, tags)
    assert not takes("<think>\nwell\n</think>\n\nhi", text, tags)
    plain = source(None, tags, response_format=OUTPUT)[0]
    assert not takes("<think>\nwell\n</think>\n\n{}", plain, tags)


def test_an_output_that_could_be_a_call_is_refused_with_calls_without_a_tag():
    with pytest.raises(ApiError) as caught:
        source(parsing_of("llama"), tags=True, tools=TOOLS, response_format=OUTPUT)
    assert caught.value.detail.param == "response_format.json_schema.schema"
    source(parsing_of("llama"), tags=True, tools=TOOLS, response_format=OUTPUT, tool_choice="required")


def test_a_schema_that_cannot_be_kept_to_is_refused_where_it_must_be():
    odd = {"name": "now", "parameters": {"properties": 5}}
    for strict in (True, False):
        tools = [TOOLS[0], {"type": "function", "function": odd | {"strict": strict}}]
        if strict:
            with pytest.raises(ApiError) as caught:
                source(parsing_of(), tags=True, tools=tools, tool_choice="required")
            assert caught.value.detail.param == "tools[1].function.parameters"
            continue
        text, _ = source(parsing_of(), tags=True, tools=tools, tool_choice="required")
        assert takes(call("hermes", "now", '{"any": [1]}'), text, tags=True)


def test_every_part_is_tried_out_by_itself():
    """A trial of the whole walks a few tokens, and does not come to what stands behind other text."""
    job = kept(parsing_of(), tags=True, tools=TOOLS, tool_choice="required")
    assert [param for param, _ in job.trials] == ["tools[0].function.parameters", "tools[1].function.parameters"]
    assert takes('{"city": "x"}', job.trials[0][1], tags=False)
    job = kept(parsing_of(), tags=True, tools=TOOLS, response_format=OUTPUT)
    assert job.trials[0][0] == "response_format.json_schema.schema"
    assert len(job.trials) == 3
    job = kept(Parsing(thinks=True), tags=True, response_format=OUTPUT)
    assert [takes("{}", text, tags=False) for _, text in job.trials] == [True]
