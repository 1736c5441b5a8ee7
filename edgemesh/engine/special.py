"""Which tokens begin and end a text, by a model's own files."""

from pathlib import Path
from typing import Any

from edgemesh.engine.shape import ModelError, read_json


def special_tokens(directory: Path, vocab: int) -> tuple[tuple[int, ...], int | None]:
    """(tokens that end a text, the token that begins one), from ``generation_config.json``, else ``config.json``."""
    eos: Any = None
    bos: Any = None
    for name in ("generation_config.json", "config.json"):
        if (path := directory / name).exists():
            config = read_json(path)
            eos = config.get("eos_token_id") if eos is None else eos
            bos = config.get("bos_token_id") if bos is None else bos
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    for token in [*ends, *([] if bos is None else [bos])]:
        if not isinstance(token, int) or not 0 <= token < vocab:
            message = f"{directory}: special token {token!r} is not an id from 0 to {vocab - 1}"
            raise ModelError(message)
    return tuple(dict.fromkeys(ends)), bos
