"""What a request's sampling settings do to its row of logits before a token is drawn, on one vocabulary shard.

Penalties follow the usual rules: repetition (Keskar et al., 2019, CTRL) over prompt and output, presence and frequency over the output.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.messages import Sampling

BANNED: Final = -1e30
"""The logit of a banned token: below every real one, above that of a token that is not allowed at all."""


class Shaper:
    """One row's penalties, bias, allowed ids, bad words and banned stops; ids are those of ``[start, start + width)``.

    ``history`` holds all tokens so far where the settings need them, the last ``emitted`` of them output.
    """

    def __init__(
        self,
        sampling: Sampling,
        start: int,
        width: int,
        history: Sequence[int],
        emitted: int,
        device: torch.device | None = None,
    ) -> None:
        self._sampling = sampling
        self._device = device
        self._start, self._width = start, width
        self._bias = self._pairs(dict(sampling.logit_bias))
        self._allowed = self._local(sampling.allowed_token_ids) if sampling.allowed_token_ids else None
        self._stops = self._local(sampling.stop_token_ids)
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None
        if sampling.penalised:
            self._seen = torch.zeros(width, dtype=torch.bool, device=device)
            self._seen[self._local(history)] = True
            output = self._local(history[len(history) - emitted :], unique=False)
            self._counts = torch.bincount(output, minlength=width).to(torch.float32)
        self._bad = self._local([word[0] for word in sampling.bad_words if len(word) == 1])
        # Where a word's last token is another shard's, that shard sees to it.
        self._words = [word for word in sampling.bad_words if len(word) > 1 and start <= word[-1] < start + width]
        longest = max((len(word) for word in self._words), default=1) - 1
        self._tail: deque[int] = deque(history[len(history) - emitted :] if longest else (), maxlen=longest)

    def _local(self, ids: Sequence[int], *, unique: bool = True) -> Tensor:
        here = [each - self._start for each in ids if self._start <= each < self._start + self._width]
        return torch.tensor(sorted(set(here)) if unique else here, dtype=torch.int64, device=self._device)

    def _pairs(self, bias: dict[int, float]) -> tuple[Tensor, Tensor] | None:
        here = {token: value for token, value in bias.items() if self._start <= token < self._start + self._width}
        if not here:
            return None
        at = torch.tensor([token - self._start for token in here], dtype=torch.int64, device=self._device)
        return at, torch.tensor(list(here.values()), dtype=torch.float32, device=self._device)

    def extend(self, token: int) -> None:
        """One more output token."""
        self._tail.append(token)
        at = token - self._start
        if self._seen is not None and self._counts is not None and 0 <= at < self._width:
            self._seen[at] = True
            self._counts[at] += 1

    def apply(self, logits: Tensor, emitted: int) -> None:
        """Shape ``[width]`` float32 logits in place, before the ``emitted``-th output token is drawn."""
        sampling = self._sampling
        if self._seen is not None and self._counts is not None:
            if sampling.repetition_penalty != 1.0:
                rate = sampling.repetition_penalty
                logits.copy_(torch.where(self._seen, torch.where(logits > 0, logits / rate, logits * rate), logits))
            if sampling.frequency_penalty or sampling.presence_penalty:
                logits.sub_(self._counts, alpha=sampling.frequency_penalty)
                logits.sub_(self._counts.clamp(max=1), alpha=sampling.presence_penalty)
        if self._bias is not None:
            logits[self._bias[0]] += self._bias[1]
        if self._allowed is not None:
            kept = logits[self._allowed]
            logits.fill_(-math.inf)
            logits[self._allowed] = kept
        if emitted < sampling.min_tokens and len(self._stops):
            logits[self._stops] = logits[self._stops].clamp(max=BANNED)
        if len(self._bad):
            logits[self._bad] = logits[self._bad].clamp(max=BANNED)
        if self._words:
            tail = tuple(self._tail)
            ends = [word[-1] - self._start for word in self._words if tail[1 - len(word) :] == word[:-1]]
            if ends:
                logits[ends] = logits[ends].clamp(max=BANNED)


def shaper(
    sampling: Sampling,
    start: int,
    width: int,
    history: Sequence[int],
    emitted: int,
    device: torch.device | None = None,
) -> Shaper | None:
    """A shaper, or None for a row whose logits are left as they are."""
    bans = sampling.stop_token_ids and emitted < sampling.min_tokens
    if sampling.penalised or sampling.logit_bias or sampling.allowed_token_ids or sampling.bad_words or bans:
        return Shaper(sampling, start, width, history, emitted, device)
    return None


def mask_of(words: TokenArray, start: int, width: int, device: torch.device | None = None) -> Tensor:
    """Which ids of a shard are allowed, ``[width]`` of bool: one bit per id, in 32-bit words, lowest bit first."""
    packed = np.frombuffer(words.buffer, np.uint8)[start // 8 : -(-(start + width) // 8)]
    bits = np.unpackbits(packed, bitorder="little")[start % 8 : start % 8 + width]
    return torch.from_numpy(bits).to(torch.bool).to(device)


def masks_of(
    masked: Sequence[int], masks: TokenArray, start: int, width: int, device: torch.device | None = None
) -> dict[int, Tensor]:
    """Every mask of a plan's part, cut to a shard, by the row that it belongs to."""
    words = len(masks) // len(masked) if masked else 0
    return {
        row: mask_of(masks.slice(at * words, (at + 1) * words), start, width, device) for at, row in enumerate(masked)
    }
