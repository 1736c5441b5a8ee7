"""What `transformers` says on the same weights: greedy tokens in float32, each prompt on its own.

The tokens stand here, and each is checked: one forward pass over prompt and continuation says at every place which token is
the likeliest, which takes a tenth of the time that it takes to generate them.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple
from unittest import mock

from edgemesh.api.grammar import regex_source
from edgemesh.engine.special import special_tokens
from edgemesh.grammar.matching import Grammars

OUTPUT = 64
PATTERN = r"The sky is [a-z]{3,8}, and [0-9]{2} birds (sing|fly)\."
"""Of an output that must have a form."""
TOP = 20

TEXTS = (
    "Once upon a time",
    "The three most important inventions of the nineteenth century were",
    "Question: Why is the sky blue during the day, and red when the sun sets?\nAnswer: The sky is blue because",
    """Notes of the meeting on Tuesday.
Present: Anna, Boris, Chen and Dora. Boris said that the bridge over the river could be finished in May if the steel came in
March, and in August if it did not. Chen asked who had ordered the steel. Nobody knew. Anna will call the mill tomorrow, and
Dora will look for the letter. The next meeting is in a week, at the same time, in the room on the second floor.
Summary in one sentence:""",
    """The harbour had been quiet since the storm. Boats lay on their sides along the wall, ropes hung in knots from
the posts, and nobody had yet come to sort the nets that the sea had thrown over the steps of the old customs house.
Mara walked along the edge with her lantern, counting. Eleven boats, where there had been fourteen. She wrote the number on
the back of her hand, because paper would not have stayed dry, and went on to the lighthouse. The door was open. Inside, the
stairs were wet up to the third turn, and on the third turn sat the keeper, with a cup of tea that had gone cold hours
ago and a book that he was not reading. "You took your time," he said, and moved the cup so that she could sit down. "Three are
missing," she said. "I know," he said. "I counted their lights going out, one after the other, and I could do nothing but""",
)

OUTPUTS = (
    "28 260 2240 282 23324 27108 436 253 15114 39228 28 351 25854 41658 284 14055 9018 30 1249 347 260 929 3514 411 28 260 2240 2585 288 5946 624 2798 9615 30 378 2268 29 16591 20215 282 260 3925 2591 2585 288 25858 28 284 260 2268 29 16591 10959 282 260 5065 2585 288 25858 30 378 2268 29 16591",
    "260 13698 28 260 12020 1536 28 284 260 12020 1940 277 30 378 13698 436 11396 411 10472 22074 12585 281 216 33 40 39 37 30 378 12020 1536 436 11396 411 8193 292 389 2002 281 216 33 40 40 40 30 378 12020 1940 277 436 11396 411 8193 292 389 2002 281 216 33 40 41 32 30 198",
    "282 253 980 1217 13739 43464 24484 28 527 4149 645 1420 13242 6756 281 260 5264 30 1550 8118 9732 260 2591 506 5264 28 357 13242 6756 282 9004 284 4983 30 1216 6756 15802 1420 281 511 8939 28 564 634 282 601 28 1285 4461 1420 28 359 13490 540 670 550 4683 28 4422 281 253 4461 2380 30",
    "198 504 4751 335 14801 436 563 260 7395 690 260 4626 30 198 504 4751 436 563 260 4751 335 14801 30 198 504 4751 436 563 260 4751 335 14801 30 198 504 4751 436 563 260 4751 335 14801 30 198 504 4751 436 563 260 4751 335 14801 30 198 504 4751 436 563 260 4751 335 14801 30 198",
    "198 14757 418 601 30 339 856 441 963 601 30 339 856 441 963 601 30 339 856 441 963 601 30 339 856 441 963 601 30 339 856 441 198 4009 601 30 339 856 441 963 601 30 339 856 441 963 601 30 339 856 441 963 601 30 339 856 441 963 601 30 339 856 441 198",
)
"""The greedy continuation of each text, in tokens."""

CONSTRAINED = "504 6376 314 253 254 94 254 28 284 216 33 32 4255 6917 30"
"""That of the first text within the pattern."""


class Score(NamedTuple):
    """A token's log-probability after those before it, its rank (from 1), and the likeliest tokens there."""

    logprob: float
    rank: int
    top: list[tuple[int, float]]


class Case(NamedTuple):
    """One prompt and the only right continuation; ``margin`` is its closest call between two tokens, in logits.

    ``scores`` are those of all tokens but the first, prompt and continuation.
    """

    text: str
    ids: list[int]
    output: list[int]
    said: str
    margin: float
    scores: list[Score]


def compute(gguf) -> list[Case]:
    """All five cases; takes some fifteen seconds on one core, most of them to read the file."""
    tokenizer, model = _loaded(gguf)
    return [_case(text, _ids(output), tokenizer, model) for text, output in zip(TEXTS, OUTPUTS, strict=True)]


def constrain(gguf) -> Case:
    """The likeliest tokens among those that ``PATTERN`` allows, one after the other, to its end."""
    tokenizer, model = _loaded(gguf)
    vocab = model.config.vocab_size
    eos, _ = special_tokens(gguf.parent, vocab)
    matcher = Grammars((gguf.parent / "tokenizer.json").read_bytes(), eos, vocab).matcher(regex_source(PATTERN))
    ids, output = tokenizer(TEXTS[0]).input_ids, _ids(CONSTRAINED)
    margin = math.inf
    for logits, token in zip(_logits(model, ids + output)[len(ids) - 1 : -1], output, strict=True):
        mask = matcher.mask()
        allowed = [each for each in range(vocab) if mask[each // 8] >> each % 8 & 1 and each not in eos]
        best = logits[allowed].topk(min(2, len(allowed)))
        assert token == allowed[int(best.indices[0])]
        margin = min(margin, float(best.values[0] - best.values[-1]) if len(allowed) > 1 else math.inf)
        assert matcher.accept(token)
    matcher.mask()
    assert matcher.ended
    return Case(TEXTS[0], ids, output, tokenizer.decode(output), margin, [])


def _ids(tokens):
    return [int(token) for token in tokens.split()]


@functools.cache
def _loaded(gguf):
    import gguf as package
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    # The file is read, and its names are looked up, once instead of hundreds of times.
    once = {name: functools.cache(getattr(package, name)) for name in ("GGUFReader", "get_tensor_name_map")}
    with mock.patch.multiple(package, **once):
        tokenizer = AutoTokenizer.from_pretrained(**where)
        return tokenizer, AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)


def _logits(model, tokens):
    """What is said after each of the tokens: ``[tokens, vocabulary]``."""
    import torch

    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def _case(text, output, tokenizer, model) -> Case:
    ids = tokenizer(text).input_ids
    logits = _logits(model, ids + output)
    best = logits[len(ids) - 1 : -1].topk(2)
    assert best.indices[:, 0].tolist() == output, f"after {text!r}"
    margin = float((best.values[:, 0] - best.values[:, 1]).min())
    said = tokenizer.decode(output, skip_special_tokens=True)
    return Case(text, ids, output, said, margin, _scores(logits.log_softmax(dim=-1), ids + output))


def _scores(found, tokens) -> list[Score]:
    scores = []
    for row, token in zip(found, tokens[1:], strict=False):
        best = row.topk(TOP)
        rank = 1 + int((row > row[token]).sum())
        scores.append(
            Score(float(row[token]), rank, list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
        )
    return scores
