"""The tokenizer inside a GGUF file, as the ``tokenizer.json`` and ``tokenizer_config.json`` that Hugging Face has.

GGUF keeps tokens, merges (or SentencePiece scores) and the name of a pre-tokenizer, but not its expression: the ones here are
those of the models' own published tokenizers. Neither torch nor transformers is needed.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from edgemesh.engine.gguf_file import GgufFile
from edgemesh.engine.shape import ModelError

_CONTROL: Final = 3
_USER_DEFINED: Final = 4

_QWEN2: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3: Final = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: Final = {
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "tekken": _TEKKEN,
}
"""How text is cut into words before merging, by ``tokenizer.ggml.pre``."""

DIGITS: Final = {"smollm", "gpt-2", "gpt2"}
"""Pre-tokenizers that cut like GPT-2; SmolLM's takes each digit alone."""


def tokenizer_files(file: GgufFile) -> dict[str, bytes]:
    """Both files, by name. Raises ``ModelError`` for a kind of tokenizer that is not known."""
    meta = file.metadata
    tokens = meta.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        message = f"{file.path}: tokenizer.ggml.tokens: is missing; put the model's tokenizer.json beside the file"
        raise ModelError(message)
    kind = meta.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(meta, tokens)
    else:
        message = (
            f"{file.path}: tokenizer.ggml.model: {kind!r} is not known (allowed: gpt2, llama); "
            "put the model's own tokenizer.json beside the file"
        )
        raise ModelError(message)
    _add_special(tokenizer, meta, tokens)
    config = _config(meta, tokens)
    _frame(tokenizer, meta, config)
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2).encode(),
    }


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    meta = file.metadata
    kind = meta.get("tokenizer.ggml.pre", "gpt-2")
    merges = [tuple(merge.split(" ", 1)) for merge in meta.get("tokenizer.ggml.merges", [])]
    vocab = {token: index for index, token in enumerate(tokens)}
    llama3 = SPLITS.get(kind) is _LLAMA3
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=llama3))
    if kind in SPLITS:
        cut = pre_tokenizers.Split(Regex(SPLITS[kind]), behavior="isolated")
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, bytewise])
        if SPLITS[kind] is _QWEN2:
            tokenizer.normalizer = normalizers.NFC()
    elif kind in DIGITS:
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        alone = [pre_tokenizers.Digits(individual_digits=True)] if kind == "smollm" else []
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*alone, bytewise])
    else:
        message = (
            f"{file.path}: tokenizer.ggml.pre: {kind!r} is not known (allowed: {', '.join(sorted({*SPLITS, *DIGITS}))}); "
            "put the model's own tokenizer.json beside the file"
        )
        raise ModelError(message)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(meta: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    stated = meta.get("tokenizer.ggml.merges")
    if stated is None:
        merges = score_merges(vocab, dict(zip(tokens, meta.get("tokenizer.ggml.scores", []), strict=False)))
    else:
        merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in stated)]
    unknown = meta.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            fuse_unk=True,
            byte_fallback=True,
            unk_token=tokens[unknown] if unknown is not None else None,
        )
    )
    prefix = meta.get("tokenizer.ggml.add_space_prefix", True)
    scheme = "first" if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def score_merges(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """SentencePiece keeps no merges: every way to make a token of two others, the likeliest tokens first."""
    found = [
        (-score, -len(left), -len(token), vocab[left], left, token[len(left) :])
        for token, score in scores.items()
        for left in (token[:at] for at in range(1, len(token)))
        if left in vocab and token[len(left) :] in vocab
    ]
    return [(left, right) for *_, left, right in sorted(found)]


def _add_special(tokenizer: Tokenizer, meta: Mapping[str, Any], tokens: list[str]) -> None:
    """Control tokens are special; user-defined ones are ordinary text that is always matched whole."""
    kinds = meta.get("tokenizer.ggml.token_type", [])
    marked = list(zip(tokens, kinds, strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text, kind in marked if kind == _CONTROL]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text, kind in marked if kind == _USER_DEFINED])


def _config(meta: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    sentencepiece = meta.get("tokenizer.ggml.model") == "llama"
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", sentencepiece)),
        "add_eos_token": bool(meta.get("tokenizer.ggml.add_eos_token", False)),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = meta.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token, int) and 0 <= token < len(tokens):
            config[f"{name}_token"] = tokens[token]
    if template := meta.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _frame(tokenizer: Tokenizer, meta: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Put the begin and end tokens where the file wants them."""
    ends = []
    for name in ("bos", "eos"):
        token = config.get(f"{name}_token") if config[f"add_{name}_token"] else None
        ends.append((token, meta.get(f"tokenizer.ggml.{name}_token_id")) if token else None)
    begin, end = ends
    if begin is None and end is None:
        if meta.get("tokenizer.ggml.model") == "gpt2":
            tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        return
    single = [begin[0]] if begin else []
    single += ["$A", *([end[0]] if end else [])]
    second = [f"{piece}:1" for piece in single]
    pair = [*single, *(piece.replace("$A", "$B") for piece in second)]
    specials = [each for each in (begin, end) if each]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=specials)
