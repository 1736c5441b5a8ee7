"""Outputs without a model: random tokens that a grammar allows, over a small vocabulary that has every byte."""

import functools
import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from edgemesh.grammar.matching import GrammarError, Grammars

EOS = 0
STRUCTURE = set('"}],:{[0123456789 \ntrufalsen')
TEXTS = ['{"name": "x", "value": 12.5}', "größer", "日本語", '["a", "b"]', "true false null", "\n    "]


@functools.cache
def tokenizer():
    """A byte-level BPE with the merges of JSON, and an end."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=["<end>"],
    )
    found.train_from_iterator(TEXTS * 4, trainer)
    found.add_tokens([AddedToken("<tool>", special=True)])
    return found


@functools.cache
def grammars():
    return Grammars(tokenizer().to_str().encode(), (EOS,), tokenizer().get_vocab_size())


def allowed(mask):
    bits = int.from_bytes(mask, "little")
    return [token for token in range(bits.bit_length()) if bits >> token & 1]


@functools.cache
def spelled(token):
    return tokenizer().decode([token])


def written(source, draw, limit=256):
    """One output, or None where it did not come to its end; raises ``GrammarError`` for a grammar that stops in the middle."""
    matcher = grammars().matcher(source)
    tokens = []
    for step in range(limit):
        found = allowed(matcher.mask())
        if matcher.ended or (EOS in found and draw.random() < 0.5):
            return text_of(tokens)
        found = [token for token in found if token != EOS]
        structure = [token for token in found if set(spelled(token)) <= STRUCTURE]
        token = draw.choice(structure if structure and draw.random() < 0.3 + step / limit else found)
        assert matcher.accept(token)
        tokens.append(token)
    return None


def takes(source, text):
    """Whether the whole of ``text`` may be an output."""
    matcher = grammars().matcher(source)
    if not all(matcher.accept(token) for token in tokenizer().encode(text).ids):
        return False
    try:
        return EOS in allowed(matcher.mask()) or matcher.ended
    except GrammarError:
        return False


def text_of(tokens):
    return tokenizer().decode(tokens)


def compact(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
