"""A model whose every token depends on every KV cell it reads, so that a wrong page can never go unnoticed.

The state after a prefix is a 64-bit chain: ``h[i] = mix(h[i - 1], token[i])``. A KV cell holds (h[i - 1], h[i]); to attend
over a context is to check that its cells chain from the start to the end. The next token is a function of the last state.
"""

from dataclasses import dataclass, field

from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.messages import PromptLogprobs

START = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
VOCAB = 97


def mix(state, token):
    value = (state ^ (token + 1) * 0xBF58476D1CE4E5B9) & MASK
    value = (value ^ value >> 31) * 0x94D049BB133111EB & MASK
    return value ^ value >> 29


def draw(state, sampling, emitted, allowed=None):
    """The next token of the ``allowed`` ones; stop tokens are banned until ``min_tokens`` are out, if there are others."""
    token = mix(state, sampling.seed * 131 + sampling.choice) % VOCAB
    some = frozenset(range(VOCAB)) if allowed is None else allowed
    if emitted < sampling.min_tokens:
        some = some - set(sampling.stop_token_ids) or some
    while token not in some:
        token = (token + 1) % VOCAB
    return token


def score(state, target, top):
    """A row of the log-probabilities of ``target`` after a prefix, as ``PromptLogprobs`` lays it out."""
    value = mix(state, target) & 0x7FFFFFFF
    return [value, value % VOCAB + 1, *(number for place in range(top) for number in (place, value - place))]


def scores(submit):
    """All rows of a prompt that a client must get."""
    state, rows = START, []
    for token, target in zip(submit.prompt, [*submit.prompt][1:], strict=False):
        state = mix(state, token)
        rows += score(state, target, submit.prompt_logprobs)
    return rows if submit.prompt_logprobs >= 0 else []


def oracle(submit, may=lambda _submit, _out: None, eos=None):
    """(tokens, finish) that a client must get, computed from the request alone; ``may`` says what its grammar allows."""
    state = START
    for token in [*submit.prompt, *submit.emitted]:
        state = mix(state, token)
    out = list(submit.emitted)
    if not submit.max_tokens:
        return out, "length"
    while True:
        try:
            allowed = may(submit, out)
        except ValueError:
            return out, "error 400"
        if allowed is not None and not allowed:
            return out, "stop"
        token = draw(state, submit.sampling, len(out), allowed)
        if token in submit.sampling.stop_token_ids and len(out) >= submit.sampling.min_tokens:
            return out, "stop"
        if allowed is not None and token == eos:
            return out, "stop"
        out.append(token)
        if len(out) >= submit.max_tokens:
            return out, "length"
        state = mix(state, token)


class Slab:
    """The KV cells of one group, by page and place in the page."""

    def __init__(self, pages, page_tokens):
        self.pages, self.page_tokens = pages, page_tokens
        self.cells = {}

    def at(self, pages, position):
        page = pages[position // self.page_tokens]
        assert 1 <= page < self.pages, f"page {page} of a block table is not in 1..{self.pages - 1}"
        return page, position % self.page_tokens

    def write(self, pages, position, before, token):
        after = mix(before, token)
        self.cells[self.at(pages, position)] = (before, after)
        return after

    def attend(self, pages, length, what):
        """The state after ``length`` cells, each of which must follow the one before it."""
        state = START
        for position in range(length):
            cell = self.cells.get(self.at(pages, position))
            assert cell is not None, f"{what}: the KV of position {position} was never written"
            assert cell[0] == state, f"{what}: the KV of position {position} belongs to another prefix"
            state = cell[1]
        return state


def masks_of(part):
    """The ids that a plan's part allows, by chunk or slot."""
    words = -(-VOCAB // 32)
    assert len(part.masks) == words * len(part.masked)
    rows = (part.masks.slice(at * words, at * words + words).buffer for at in range(len(part.masked)))
    numbers = (int.from_bytes(row, "little") for row in rows)
    sets = (frozenset(each for each in range(VOCAB) if number >> each & 1) for number in numbers)
    return dict(zip(part.masked, sets, strict=True))


@dataclass
class Row:
    request: str
    token: int
    position: int
    pages: list
    sampling: object
    emitted: int


@dataclass
class Touch:
    """What a running step does to the slab for one request: cells [0, start) are read, [start, start + tokens) written."""

    request: str
    pages: tuple
    start: int
    tokens: list

    def named(self, slab):
        return set(self.pages[: -(-(self.start + len(self.tokens)) // slab.page_tokens)])

    def written(self, slab):
        return set(self.pages[self.start // slab.page_tokens :]) & self.named(slab)


@dataclass
class Device:
    """The ranks of one group: one slab for both planes, the decode batch, and the steps that run now."""

    slab: Slab
    rows: dict = field(default_factory=dict)
    running: dict = field(default_factory=dict)

    def begin(self, plan, random, retries):
        """Start a step; returns its Done's fields. Cells are written now, and again when it ends."""
        touches, firsts, slots, tokens, scored = [], [], [], [], []
        if plan.prefill is not None:
            at, masks = 0, masks_of(plan.prefill)
            for number, chunk in enumerate(plan.prefill.chunks):
                ids = [plan.prefill.tokens[at + each] for each in range(chunk.length)]
                at += chunk.length
                touch = Touch(chunk.request, chunk.pages, chunk.start, ids)
                state = self.run(touch, touches)
                if chunk.scoring is not None:
                    scored.append(self.score(chunk))
                if chunk.final:
                    failed = random.random() < retries
                    token = draw(state, chunk.sampling, chunk.emitted, masks.get(number))
                    firsts.append(-1 if failed else token)
                assert chunk.final or number not in masks, f"{chunk.request}: a mask, and no token"
            assert at == len(plan.prefill.tokens), "tokens that belong to no chunk"
        if plan.decode is not None:
            self.delta(plan.decode)
            masks = masks_of(plan.decode)
            assert not set(masks) & set(plan.decode.sits), "a row has a mask that sits out"
            for slot, row in sorted(self.rows.items()):
                if slot in plan.decode.sits:
                    continue
                state = self.run(Touch(row.request, tuple(row.pages), row.position, [row.token]), touches)
                token = draw(state, row.sampling, row.emitted, masks.get(slot))
                token = -1 if random.random() < retries else token
                slots.append(slot)
                tokens.append(token)
                if token >= 0:
                    row.token, row.position, row.emitted = token, row.position + 1, row.emitted + 1
        count = sum(len(touch.tokens) for touch in touches)
        self.running[plan.plane] = touches
        drawn = {"firsts": tuple(firsts), "slots": tuple(slots), "tokens": tuple(tokens)}
        return drawn | {"prompt_logprobs": tuple(scored)}, count

    def score(self, chunk):
        wanted, stop, rows = chunk.scoring, chunk.start + chunk.length, []
        end = wanted.first + len(wanted.targets)
        assert chunk.start <= wanted.first < end <= stop, f"positions {wanted.first} to {end} of {chunk}"
        for position, target in enumerate(wanted.targets, wanted.first):
            rows += score(self.slab.cells[self.slab.at(chunk.pages, position)][1], target, wanted.top)
        return PromptLogprobs(wanted.first, wanted.top, TokenArray.of(rows))

    def delta(self, decode):
        for slot in decode.leaves:
            assert slot in self.rows, f"slot {slot} leaves, but is not in the batch"
            del self.rows[slot]
        for join in decode.joins:
            assert join.slot not in self.rows, f"slot {join.slot} is joined twice"
            self.rows[join.slot] = Row(
                join.request, join.token, join.position, list(join.pages), join.sampling, join.emitted
            )
        for grow in decode.grows:
            self.rows[grow.slot].pages.extend(grow.pages)
        assert set(decode.sits) <= set(self.rows), "a slot sits out that is not in the batch"

    def run(self, touch, touches):
        """Read and write one request's cells; no other running step may write what it names, or name what it writes."""
        slab = self.slab
        named, written = touch.named(slab), touch.written(slab)
        for other in [each for step in self.running.values() for each in step] + touches:
            if other.request != touch.request:
                clash = named & other.written(slab) | written & other.named(slab)
                assert not clash, (
                    f"pages {clash} are shared by steps of {touch.request} and {other.request}, and written"
                )
        touches.append(touch)
        return self.perform(touch)

    def perform(self, touch):
        state = self.slab.attend(touch.pages, touch.start, touch.request)
        for each, token in enumerate(touch.tokens):
            state = self.slab.write(touch.pages, touch.start + each, state, token)
        return state

    def end(self, plane):
        """The step ends: what it read must still be there, and what it wrote is written once more."""
        for touch in self.running.pop(plane, ()):
            self.perform(touch)
