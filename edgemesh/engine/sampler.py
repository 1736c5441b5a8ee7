"""Draws one token per row from logits whose vocabulary is sharded over the attention group.

Whole logits never leave a rank. A greedy or temperature row exchanges one (value, id) pair per rank (Gumbel-max samples exactly). A row that is
cut by top-k, top-p or min-p exchanges each shard's best candidates and its log-sum-exp; if those cannot hold all that the cut keeps,
it draws from the whole vocabulary and accepts what the cut keeps. The sequence of collectives depends on the rows'
settings alone, and every decision on gathered values, so all ranks of the group take the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from edgemesh.engine.collectives import Group
from edgemesh.engine.cuts import CANDIDATES, Candidates, bits, first_best, floats, keeps, kept_of, top
from edgemesh.engine.noise import gumbel, row_key
from edgemesh.engine.shaping import Shaper
from edgemesh.wire.messages import Logprob, Sampling

ROUNDS: Final = 4
"""Draws from the whole vocabulary per step and row, before the row yields no token."""

TOP: Final = 20
"""Most alternatives beside the drawn token, as in ``Sampling.logprobs``."""

NO_TOKEN: Final = -1
COLDEST: Final = 1e-5
"""Temperatures below this are greedy."""


@dataclass(slots=True)
class Row:
    """A sequence about to draw the token at ``position``, the ``emitted``-th of its output; ``attempt`` counts draws that gave none.

    ``mask``: which ids of this rank's shard a grammar allows in this draw, ``[width]`` of bool; None for all.
    """

    sampling: Sampling
    position: int
    emitted: int
    shaper: Shaper | None = None
    attempt: int = 0
    mask: Tensor | None = None

    @property
    def hot(self) -> bool:
        """Whether chance plays a part."""
        return self.sampling.temperature >= COLDEST

    @property
    def cut(self) -> bool:
        """Whether unlikely tokens are left out."""
        sampling = self.sampling
        return self.hot and (sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0)

    def took(self, token: int) -> None:
        """The token that was drawn: the row moves on, or (``NO_TOKEN``) will try again with other noise."""
        self.mask = None
        if token == NO_TOKEN:
            self.attempt += 1
            return
        self.position, self.emitted, self.attempt = self.position + 1, self.emitted + 1, 0
        if self.shaper is not None:
            self.shaper.extend(token)

    def key(self, draw: int) -> tuple[int, int]:
        """The noise key of this step's ``draw``-th draw."""
        sampling = self.sampling
        return row_key(sampling.seed, sampling.choice, self.position, self.attempt * ROUNDS + draw)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token per row (``NO_TOKEN`` for none), and its log-probability where asked for."""

    tokens: list[int]
    logprobs: list[Logprob | None]


@dataclass(slots=True)
class _Pick:
    """A row's token with its raw logit."""

    token: int = NO_TOKEN
    raw: float = 0.0


class Sampler:
    """One rank's part of drawing; its logits are those of ids ``[start, start + width)``."""

    def __init__(self, start: int, width: int, vocab: int, group: Group, device: torch.device | None = None) -> None:
        self._start, self._width, self._vocab = start, width, vocab
        self._group = group
        self._ids = torch.arange(start, start + max(width, 1), dtype=torch.int32, device=device)
        self._device = device

    def draw(self, logits: Tensor, rows: Sequence[Row]) -> Drawn:
        """A token for each row of ``logits`` ``[rows, width]``, which may be changed."""
        if not self._width:
            logits = torch.full((len(rows), 1), -math.inf, device=self._device)
        if all(not row.hot and row.sampling.logprobs < 0 and row.shaper is None for row in rows):
            self._mask(logits, rows)
            return self._greedy(logits)
        raw = logits.float().contiguous()
        shaped = self._shape(raw, rows)
        picks = [_Pick() for _ in rows]
        self._plain(raw, shaped, rows, picks)
        self._cut(raw, shaped, rows, picks)
        return Drawn([pick.token for pick in picks], self._logprobs(raw, rows, picks))

    def _greedy(self, logits: Tensor) -> Drawn:
        """The whole batch takes its best token: one argmax, one exchange."""
        values, at = logits.max(dim=-1)
        if self._group.size == 1:
            return Drawn((at + self._start).tolist(), [None] * len(at))
        every = self._group.gather(torch.stack((bits(values.float()), at.to(torch.int32) + self._start)))
        _, ids = first_best(floats(every[:, 0]), every[:, 1])
        return Drawn(ids.tolist(), [None] * len(at))

    def _mask(self, logits: Tensor, rows: Sequence[Row]) -> None:
        """Forbid, in place, what the rows' grammars do not allow."""
        for row, own in zip(rows, logits, strict=True):
            if row.mask is not None:
                own[: self._width].masked_fill_(~row.mask, -math.inf)

    def _shape(self, raw: Tensor, rows: Sequence[Row]) -> Tensor:
        """Masks, penalties, bias and bans, then temperature; a row without either shares the raw logits' memory."""
        heat = [row.sampling.temperature if row.hot else 1.0 for row in rows]
        if all(row.shaper is None and row.mask is None for row in rows) and all(each == 1.0 for each in heat):
            return raw
        shaped = raw.clone()
        self._mask(shaped, rows)
        for row, logits in zip(rows, shaped, strict=True):
            if row.shaper is not None:
                row.shaper.apply(logits[: self._width], row.emitted)
        return shaped.div_(torch.tensor(heat, device=self._device)[:, None])

    def _plain(self, raw: Tensor, shaped: Tensor, rows: Sequence[Row], picks: list[_Pick]) -> None:
        """Rows without a cut: the largest of logit, or of logit plus noise."""
        plain = [at for at, row in enumerate(rows) if not row.cut]
        if not plain:
            return
        scores = shaped[plain]
        hot = [at for at, row in enumerate(plain) if rows[row].hot]
        if hot:
            scores[hot] += gumbel([rows[plain[at]].key(0) for at in hot], self._ids)
        values, at = scores.max(dim=-1)
        raws = raw[plain].gather(1, at[:, None])[:, 0]
        every = self._group.gather(torch.stack((bits(values), self._ids[at], bits(raws))))
        best, ids = first_best(floats(every[:, 0]), every[:, 1])
        found = floats(every[:, 2]).gather(0, best[None])[0]
        for row, token, value in zip(plain, ids.tolist(), found.tolist(), strict=True):
            picks[row] = _Pick(token, value)

    def _cut(self, raw: Tensor, shaped: Tensor, rows: Sequence[Row], picks: list[_Pick]) -> None:
        """Rows with a cut: from the candidates where they suffice, else by drawing and accepting."""
        cut = [at for at, row in enumerate(rows) if row.cut]
        if not cut:
            return
        scaled, raws, who = shaped[cut], raw[cut], [rows[at] for at in cut]
        merged = self._candidates(scaled, raws)
        kept, covered = kept_of(merged, [row.sampling for row in who], self._vocab)
        open_rows = [at for at, whole in enumerate(covered.tolist()) if not whole]
        scores = merged.values + gumbel([row.key(0) for row in who], merged.ids)
        best = scores.masked_fill(~kept, -math.inf).argmax(dim=-1, keepdim=True)
        tokens, found = (each.gather(1, best)[:, 0].tolist() for each in (merged.ids, merged.raws))
        for at, token, value in zip(cut, tokens, found, strict=True):
            picks[at] = _Pick(token, value)
        accepted = self._accept(scaled, raws, who, merged, open_rows)
        for at, pick in zip(open_rows, accepted, strict=True):
            picks[cut[at]] = pick

    def _candidates(self, scaled: Tensor, raws: Tensor) -> Candidates:
        """The best of every shard, best first, equal ones by id."""
        values, at = top(scaled, CANDIDATES)
        ids, found = self._ids[at], raws.gather(1, at)
        lse = scaled.logsumexp(dim=-1, keepdim=True)
        every = self._group.gather(torch.cat((bits(values), ids, bits(found), bits(lse)), dim=-1))
        values, ids, found = (each.transpose(0, 1).flatten(1) for each in every[..., :-1].chunk(3, dim=-1))
        order = floats(values).sort(dim=-1, descending=True, stable=True).indices[:, :CANDIDATES]
        return Candidates(
            floats(values.gather(1, order)),
            ids.gather(1, order),
            floats(found.gather(1, order)),
            floats(every[..., -1]).logsumexp(dim=0),
        )

    def _accept(
        self, scaled: Tensor, raws: Tensor, rows: Sequence[Row], merged: Candidates, open_rows: list[int]
    ) -> list[_Pick]:
        """Draw ``ROUNDS`` times from the whole vocabulary, take the first draw that the cut keeps.

        Both exchanges are made for all rows, whether any is open or not.
        """
        drawn = torch.zeros((len(rows), ROUNDS, 4), dtype=torch.int32, device=self._device)
        for at in open_rows:
            scores = scaled[at] + gumbel([rows[at].key(draw) for draw in range(ROUNDS)], self._ids)
            values, best = scores.max(dim=-1)
            local = (bits(values), self._ids[best], bits(raws[at][best]), bits(scaled[at][best]))
            drawn[at] = torch.stack(local, dim=-1)
        every = self._group.gather(drawn)
        winners, ids = first_best(floats(every[..., 0]), every[..., 1])
        found, logits = (floats(every[..., part]).gather(0, winners[None])[0] for part in (2, 3))
        above = torch.zeros((len(rows), ROUNDS, 2), device=self._device)
        for at in open_rows:
            ahead = scaled[at] > logits[at][:, None]
            ahead |= (scaled[at] == logits[at][:, None]) & (self._ids < ids[at][:, None])
            mass = (scaled[at] - merged.lse[at]).exp()
            above[at] = torch.stack(((ahead * mass).sum(dim=-1), ahead.sum(dim=-1)), dim=-1)
        above = self._group.gather(above).sum(dim=0)
        picks = []
        for at in open_rows:
            kept = keeps(rows[at].sampling, logits[at], above[at], merged.values[at, 0])
            which = int(kept.int().argmax())
            picks.append(_Pick(int(ids[at, which]), float(found[at, which])) if kept[which] else _Pick())
        return picks

    def _logprobs(self, raw: Tensor, rows: Sequence[Row], picks: Sequence[_Pick]) -> list[Logprob | None]:
        """Log-probabilities of the raw logits, before penalties and temperature."""
        made: list[Logprob | None] = [None] * len(rows)
        asking = [at for at, row in enumerate(rows) if row.sampling.logprobs >= 0]
        if not asking:
            return made
        asked = raw[asking]
        values, at = top(asked, TOP)
        lse = asked.logsumexp(dim=-1, keepdim=True)
        every = self._group.gather(torch.cat((bits(values), self._ids[at], bits(lse)), dim=-1))
        best, ids = (each.transpose(0, 1).flatten(1) for each in every[..., :-1].chunk(2, dim=-1))
        total = floats(every[..., -1]).logsumexp(dim=0)
        best, order = floats(best).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(1, order)
        for number, row in enumerate(asking):
            pick, count = picks[row], rows[row].sampling.logprobs
            if pick.token == NO_TOKEN:
                continue
            alternatives = (best[number] - total[number])[:count].tolist()
            likeliest = tuple(zip(ids[number, :count].tolist(), alternatives, strict=True))
            made[row] = Logprob(pick.token, pick.raw - float(total[number]), likeliest)
        return made
