"""`transformers` generate on the same weights: what a mesh's tokens per second are measured beside.

``python -m edgemesh.bench.generate time DIR DTYPE BATCH INPUT OUTPUT REPEATS`` prints how long each batch took, in nanoseconds, with one
thread; ``... write DIR OUT DTYPE`` writes the weights as a Hugging Face directory, for peers that read no GGUF.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from edgemesh.bench.prompts import Shape, token_prompt


def load(directory: Path, dtype: str) -> Any:  # noqa: ANN401 - transformers has no types of its own
    """The model in a directory of safetensors, or of one GGUF."""
    gguf = next(directory.glob("*.gguf"), None)
    named = {"gguf_file": gguf.name} if gguf else {}
    return AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype), **named)


def timed(model: Any, batch: int, input_len: int, output_len: int, repeats: int) -> list[int]:  # noqa: ANN401
    """Greedy batches of random prompts, each timed from prompt to last token; the first, unmeasured, is short."""
    torch.set_num_threads(1)
    shape = Shape("", input_len=input_len)
    samples = []
    with torch.inference_mode():
        for repeat in range(repeats + 1):
            rows = [token_prompt(shape, repeat * batch + row) for row in range(batch)]
            ids = torch.tensor(rows)
            tokens = output_len if repeat else 2
            start = time.monotonic_ns()
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
            samples.append(time.monotonic_ns() - start)
    return samples[1:]


def write(directory: Path, out: Path, dtype: str) -> None:
    """The same weights as safetensors, with config and tokenizer."""
    model = load(directory, dtype)
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(directory).save_pretrained(out)


def main(words: list[str]) -> None:
    """Time or write."""
    match words:
        case ["time", directory, dtype, *numbers] if len(numbers) == 4:
            batch, input_len, output_len, repeats = map(int, numbers)
            samples = timed(load(Path(directory), dtype), batch, input_len, output_len, repeats)
            sys.stdout.buffer.write(msgspec.json.encode(samples))
        case ["write", directory, out, dtype]:
            write(Path(directory), Path(out), dtype)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
