"""Masks against what they promise: every walk along them is a sentence, every sentence is a walk along them."""

import functools
import json
import random

import jsonschema
import pytest
from grammar_models import KINDS, OBJECT, kind, lark, schema
from tokenizers import Tokenizer

from edgemesh.grammar.matching import KEPT, GrammarError, Grammars

PADDING = 70


@functools.cache
def grammars(name):
    data, eos, size = kind(name)
    return Grammars(data, eos, size + PADDING), Tokenizer.from_str(data.decode())


def ids_of(mask):
    return [8 * at + bit for at, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]


def walk(matcher, rng, longest=400, ends=()):
    """Tokens drawn along the masks until only the end may follow, or (with ``ends``) one of those is drawn."""
    out = []
    for _ in range(longest):
        mask = matcher.mask()
        if matcher.ended:
            return out
        token = rng.choice(ids_of(mask))
        if token in ends:
            return out
        assert matcher.accept(token)
        out.append(token)
    return None


@pytest.mark.parametrize("name", KINDS)
def test_every_walk_along_the_masks_is_what_the_schema_describes(name):
    found, tokenizer = grammars(name)
    whole = 0
    for seed in range(2 if name in {"smollm2", "qwen3"} else 5):
        out = walk(found.matcher(schema(OBJECT)), random.Random(seed))
        if out is not None:
            whole += 1
            jsonschema.validate(json.loads(tokenizer.decode(out)), OBJECT)
    assert whole


@pytest.mark.parametrize("name", KINDS)
def test_a_mask_has_a_bit_for_each_logit_and_none_for_padding_or_what_is_no_text(name):
    found, tokenizer = grammars(name)
    _, eos, size = kind(name)
    mask = found.matcher(lark("start: /(.|\\n)*/")).mask()
    assert len(mask) == -(-(size + PADDING) // 32) * 4
    ids = ids_of(mask)
    assert max(ids) < size
    assert set(eos) <= set(ids), "an empty text is whole already"
    special = {at for at, token in tokenizer.get_added_tokens_decoder().items() if token.special} - set(eos)
    assert not special & set(ids)
    assert len(ids) > size - 300


@pytest.mark.parametrize("name", KINDS)
def test_the_end_may_follow_where_the_sentence_is_whole_and_nowhere_else(name):
    found, tokenizer = grammars(name)
    _, eos, _ = kind(name)
    matcher = found.matcher(lark('start: "a" "b"?'))
    a, b = (tokenizer.encode(letter, add_special_tokens=False).ids[-1] for letter in "ab")
    assert not set(eos) & set(ids_of(matcher.mask()))
    assert matcher.accept(a)
    assert set(eos) <= set(ids_of(matcher.mask()))
    assert not matcher.ended
    assert matcher.accept(b)
    matcher.mask()
    assert matcher.ended


@pytest.mark.parametrize("size", [320, 319, 321, 352])
def test_a_mask_has_just_the_words_that_the_vocabulary_needs(size):
    data, eos, _ = kind("byte level")
    mask = Grammars(data, eos, size).matcher(lark("start: /.*/")).mask()
    assert len(mask) == 4 * -(-size // 32)


def test_a_token_that_may_not_follow_is_not_taken():
    found, tokenizer = grammars("byte level")
    matcher = found.matcher(lark('start: "a"'))
    matcher.mask()
    assert not matcher.accept(tokenizer.token_to_id("b"))


def test_two_streams_of_one_grammar_do_not_know_of_each_other():
    found, _ = grammars("byte level")
    source = schema(OBJECT)
    walks = [walk(found.matcher(source), random.Random(seed)) for seed in range(4)]
    both = [found.matcher(source), found.matcher(source)]
    rngs, outs = [random.Random(0), random.Random(1)], ([], [])
    for _ in range(400):
        for matcher, rng, out in zip(both, rngs, outs, strict=True):
            mask = matcher.mask()
            if not matcher.ended:
                out.append(rng.choice(ids_of(mask)))
                assert matcher.accept(out[-1])
    assert [list(out) if walked is not None else None for out, walked in zip(outs, walks, strict=False)] == walks[:2]


def test_kept_grammars_have_a_bound():
    found = Grammars(*kind("byte level")[:2], 400)
    for number in range(KEPT + 10):
        found.matcher(lark(f'start: "{number}"'))
    assert len(found._kept) == KEPT
    big = lark(f'start: "{"a" * 900_000}"')
    for number in range(6):
        found.matcher(f"{big}// {number}\n")
    assert len(found._kept) < 6


BAD = {
    "": "empty",
    "nonsense": "",
    "{": "EOF",
    '{"grammars": []}': "",
    '{"grammars": [{"json_schema": {"type": "nope"}}]}': "nope",
    '{"grammars": [{"json_schema": {"type": "string", "pattern": "("}}]}': "regex",
    '{"grammars": [{"json_schema": {"not": {}}}]}': "not",
    '{"grammars": [{"json_schema": {"$ref": "#"}}]}': "no text can follow",
    '{"grammars": [{"json_schema": {"$ref": "http://example.com/x"}}]}': "",
    lark("start: missing"): "missing",
    lark("start: /(/"): "regex",
    lark("start: <|nosuchtoken|>"): "nosuchtoken",
    schema({"items": {}}).replace("{}", '{"items":' * 60_000 + "{}" + "}" * 60_000): "recursion limit",
    lark("start: " + "(" * 250_000 + '"a"' + ")" * 250_000): "nested",
    schema({"allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": {}}} for j in range(10)]} for i in range(60)]}): "large",
}


@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_bad_source_is_refused_in_a_sentence(number):
    source, about = list(BAD.items())[number]
    found, _ = grammars("byte level")
    reason = found.check(source)
    assert reason
    assert about.lower() in reason.lower()
    assert len(reason) <= 300
    assert "\n" not in reason


def test_a_good_source_has_no_reason():
    assert grammars("byte level")[0].check(schema(OBJECT)) == ""


@pytest.mark.parametrize("data", [b"", b"[]", b"/etc/passwd", b"gpt2", b"{}", b"\xff", b'{"model": 1}'])
def test_a_tokenizer_that_is_none_is_refused(data):
    with pytest.raises(GrammarError, match=r"tokenizer\.json: "):
        Grammars(data, (0,), 100)
