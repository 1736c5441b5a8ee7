"""Tokenizers of every supported kind, and small sources, for the tests of grammars."""

import functools
import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from edgemesh.engine.locate import models_dir

OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema(value):
    """The source of a JSON schema."""
    return json.dumps({"grammars": [{"json_schema": value}]})


def lark(text):
    """The source of a grammar in Lark's form."""
    return f"%llguidance {{}}\n{text}\n"


def byte_level(ignore_merges):
    """As GPT-2, Llama 3 (which looks whole words up first) and Qwen have it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: at for at, letter in enumerate(letters)}
    for piece in ("th", "the", "Ġthe", '{"', '":', "Ġ{", "12", "true"):
        vocab[piece] = len(vocab)
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("{", '"'), ('"', ":"), ("Ġ", "{"), ("1", "2")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback():
    """As SentencePiece models have it, Llama 2 among them, and GGUF files of the kind ``llama``."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in ("▁", "t", "h", "e", "th", "▁the", "{", '"', ":", "}", "1", "2", '{"', ",", "true"):
        vocab[piece] = len(vocab)
    merges = [("t", "h"), ("{", '"')]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def ended(tokenizer):
    """(the file's bytes, eos ids, tokens of the vocabulary), with two ends and a mark that is ordinary text."""
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|end|>", "<|turn|>")])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    eos = tuple(tokenizer.token_to_id(text) for text in ("<|end|>", "<|turn|>"))
    return tokenizer.to_str().encode(), eos, tokenizer.get_vocab_size(with_added_tokens=True)


KINDS = {
    "byte level": lambda: ended(byte_level(ignore_merges=False)),
    "whole words first": lambda: ended(byte_level(ignore_merges=True)),
    "byte fallback": lambda: ended(byte_fallback()),
    "smollm2": lambda: cached("smollm2-135m", (0, 2)),
    "qwen3": lambda: cached("../tokenizers/qwen3", (151645, 151643)),
}


def cached(name, eos):
    """One of the caches that other tests and `make test` fill; that of SmolLM2 was written from its GGUF file."""
    path = models_dir() / name / "tokenizer.json"
    if not path.exists():
        pytest.skip(f"{path} is not there yet")
    data = path.read_bytes()
    return data, eos, Tokenizer.from_str(data.decode()).get_vocab_size(with_added_tokens=True)


@functools.cache
def kind(name):
    return KINDS[name]()
