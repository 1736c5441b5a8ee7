"""What `transformers` says on the same weights: greedy tokens in float32, each prompt on its own."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

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
    """All five cases; takes about half a minute on one core."""
    tokenizer, model = _loaded(gguf)
    return [_case(text, tokenizer, model) for text in TEXTS]


def constrain(gguf) -> Case:
    """The likeliest tokens among those that ``PATTERN`` allows, one after the other, to its end."""
    import torch

    tokenizer, model = _loaded(gguf)
    vocab = model.config.vocab_size
    eos, _ = special_tokens(gguf.parent, vocab)
    matcher = Grammars((gguf.parent / "tokenizer.json").read_bytes(), eos, vocab).matcher(regex_source(PATTERN))
    ids = tokenizer(TEXTS[0]).input_ids
    tokens, margin = list(ids), math.inf
    while True:
        mask = matcher.mask()
        if matcher.ended:
            break
        allowed = [each for each in range(vocab) if mask[each // 8] >> each % 8 & 1 and each not in eos]
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, -1][allowed]
        best = logits.topk(min(2, len(allowed)))
        margin = min(margin, float(best.values[0] - best.values[-1]) if len(allowed) > 1 else math.inf)
        tokens.append(allowed[int(best.indices[0])])
        assert matcher.accept(tokens[-1])
    output = tokens[len(ids) :]
    return Case(TEXTS[0], ids, output, tokenizer.decode(output), margin, [])


@functools.cache
def _loaded(gguf):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    return AutoTokenizer.from_pretrained(**where), AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)


def _case(text, tokenizer, model) -> Case:
    import torch

    prompt = tokenizer(text, return_tensors="pt")
    with torch.inference_mode():
        found = model.generate(
            **prompt,
            do_sample=False,
            max_new_tokens=OUTPUT,
            min_new_tokens=OUTPUT,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    output = found.sequences[0, prompt.input_ids.shape[1] :].tolist()
    best = torch.stack(found.logits)[:, 0].topk(2).values
    margin = float((best[:, 0] - best[:, 1]).min())
    ids = prompt.input_ids[0].tolist()
    return Case(
        text, ids, output, tokenizer.decode(output, skip_special_tokens=True), margin, _scores(model, ids + output)
    )


def _scores(model, tokens) -> list[Score]:
    import torch

    with torch.inference_mode():
        found = model(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)
    scores = []
    for row, token in zip(found, tokens[1:], strict=False):
        best = row.topk(TOP)
        rank = 1 + int((row > row[token]).sum())
        scores.append(
            Score(float(row[token]), rank, list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
        )
    return scores
