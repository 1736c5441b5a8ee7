"""Times of the libraries that say which tokens a grammar allows: compiling a schema, and the mask of each token of an answer.

``python -m edgemesh.bench.grammars llguidance TOKENIZER_JSON``, or ``xgrammar`` where that is installed; of byte-level tokenizers. One
process for one library, so that memory is its own.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

SCHEMA: Final = {
    "type": "object",
    "properties": {
        "tool": {"enum": ["click", "type", "scroll", "wait"]},
        "x": {"type": "integer"},
        "text": {"type": "string"},
        "keys": {"type": "array", "items": {"type": "string"}},
        "why": {"type": "object", "properties": {"goal": {"type": "string"}, "sure": {"type": "number"}}},
    },
    "required": ["tool", "x", "text", "keys", "why"],
    "additionalProperties": False,
}
ANSWER: Final = {
    "tool": "type",
    "x": 1024,
    "text": "Dear Ms Lovelace, thank you for the notes on the engine.",
    "keys": ["ctrl", "enter"],
    "why": {"goal": "answer the letter that came on Tuesday", "sure": 0.95},
}
ROUNDS: Final = 20
LONGEST: Final = 16

Walk = tuple[Callable[[], bytes], Callable[[int], object]]
"""(the next mask, take a token)."""


def llguidance(data: str, vocab: int) -> Callable[[], Walk]:
    """As the grammar worker has it."""
    library: Any = importlib.import_module("llguidance")
    tokenizer = library.LLTokenizer(data, n_vocab=vocab)
    source = json.dumps({"grammars": [{"json_schema": SCHEMA}]})

    def begin() -> Walk:
        matcher = library.LLMatcher(tokenizer, source)
        return matcher.compute_bitmask, matcher.consume_token

    return begin


def xgrammar(data: str, vocab: int) -> Callable[[], Walk]:
    """With its cache of compiled grammars off, since each compiling is to be timed."""
    library: Any = importlib.import_module("xgrammar")
    tokenizers: Any = importlib.import_module("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_str(data)
    words = [tokenizer.id_to_token(each) or "" for each in range(vocab)]
    info = library.TokenizerInfo(words, library.VocabType.BYTE_LEVEL, vocab_size=vocab, stop_token_ids=[0])
    compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    mask = library.allocate_token_bitmask(1, vocab)

    def begin() -> Walk:
        matcher = library.GrammarMatcher(compiler.compile_json_schema(json.dumps(SCHEMA)))

        def fill() -> bytes:
            matcher.fill_next_token_bitmask(mask)
            return bytes(mask.numpy())

        return fill, matcher.accept_token

    return begin


def measure(begin: Callable[[], Walk], tokenizer: Any) -> str:  # noqa: ANN401 - the tokenizers package has no types
    """Compile, and walk the answer by the longest words that are allowed, again and again."""
    compiled: list[float] = []
    masks: list[float] = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        mask, take = begin()
        compiled.append((time.perf_counter() - start) * 1e3)
        left = json.dumps(ANSWER)
        while left:
            start = time.perf_counter()
            bits = mask()
            masks.append((time.perf_counter() - start) * 1e6)
            for length in range(LONGEST, 0, -1):
                token = tokenizer.token_to_id(left[:length].replace(" ", "\u0120"))
                if token is not None and bits[token // 8] >> token % 8 & 1:
                    break
            take(token)
            left = left[length:]
    masks.sort()
    return (
        f"compile {median(compiled):.2f} ms (first {compiled[0]:.1f}); {len(masks) // ROUNDS} masks, mean {fmean(masks):.0f} us, "
        f"median {median(masks):.0f}, p99 {masks[len(masks) * 99 // 100]:.0f}, worst {masks[-1]:.0f}"
    )


def resident_mb() -> float:
    """Memory of this process, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def main() -> None:
    """One library over one tokenizer."""
    name, path = sys.argv[1:]
    data = Path(path).read_text(encoding="utf-8")
    tokenizers: Any = importlib.import_module("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_str(data)
    vocab = tokenizer.get_vocab_size(with_added_tokens=True)
    before, start = resident_mb(), time.perf_counter()
    begin = {"llguidance": llguidance, "xgrammar": xgrammar}[name](data, vocab)
    ready = time.perf_counter() - start
    said = measure(begin, tokenizer)
    torch = "torch" if "torch" in sys.modules else "no torch"
    print(  # noqa: T201 - a command
        f"{name}, {vocab} ids: {ready:.2f} s until ready; {said}; {resident_mb() - before:.0f} MB more, {torch} loaded"
    )


if __name__ == "__main__":
    main()
