"""Log-probabilities of prompts on a GPU, alone and over sharded vocabularies, against `transformers` in float32."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from cuda_models import (
    PAGE_TOKENS,
    Driver,
    Stream,
    ThreadedRanks,
    believable,
    expected,
    make_runner,
    prompt,
    save_model,
)

from edgemesh.engine.cuda.attention import choose
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.messages import Chunk, Prefill, Scoring

LIMIT = 0.3
"""Most that a bfloat16 model's log-probabilities differ from those in float32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    return path, save_model("qwen3", path)


def kernels():
    return choose("torch", 256, 64, lambda _line: None)


def score(driver, stream, top, chunk, row=None):
    """Prefill a prompt in chunks, all positions scored, a running row beside the first; the scores in one list."""
    found = []
    for start in range(0, len(stream.prompt), chunk):
        stop = min(start + chunk, len(stream.prompt))
        driver._room(stream, stop + 1)
        final = stop == len(stream.prompt)
        targets = TokenArray.of(stream.prompt[start + 1 : stop + 1])
        scoring = Scoring(start, top, targets) if len(targets) else None
        sampling = stream.sampling if final else None
        pages = tuple(stream.pages[: -(-stop // PAGE_TOKENS)])
        chunks = (Chunk("scored", start, stop - start, pages, final, sampling, 0, scoring=scoring),)
        decode, running = driver._decode(joins={0: row}) if row and not start else (None, [])
        work = Prefill(chunks, TokenArray.of(stream.prompt[start:stop]))
        members = [*([stream] if final else []), *running]
        driver._send(stop - start + len(running), work, decode, members, graph=False)
        for piece in driver.take().prompt_logprobs:
            assert piece.start == len(found)
            numbers, values = piece.rows.tolist(), piece.rows.buffer.cast("f").tolist()
            for at in range(0, len(numbers), piece.width):
                pairs = [(numbers[each], values[each + 1]) for each in range(at + 2, at + piece.width, 2)]
                found.append((values[at], numbers[at + 1], pairs))
    return found


@pytest.mark.parametrize("shape", [None, (2, 1), (3, 1), (2, 2)])
def test_prompts_are_scored_beside_rows_that_draw(model, shape):
    path, right = model
    driver = Driver(make_runner(path, kernels()) if shape is None else ThreadedRanks(path, kernels(), *shape))
    row, stream = Stream("row", prompt(21, 40)), Stream("scored", prompt(22, 300))
    driver.prefill(row)
    found = score(driver, stream, 5, 128, row)
    wanted = expected(right, stream.prompt).log_softmax(dim=-1)
    assert len(found) == len(stream.prompt) - 1
    for (value, rank, pairs), line, token in zip(found, wanted, stream.prompt[1:], strict=False):
        assert value == pytest.approx(float(line[token]), abs=LIMIT)
        assert int((line > line[token] + 2 * LIMIT).sum()) < rank <= 1 + int((line > line[token] - 2 * LIMIT).sum())
        assert [each for _, each in pairs] == pytest.approx([float(line[each]) for each, _ in pairs], abs=LIMIT)
        assert (rank == 1) == (value == pairs[0][1])
    assert len(stream.output) == 1
    believable(right, row)
    believable(right, stream)
