"""A group, its gateway, and ranks that remember every KV slot, driven by a seeded random order of events."""

import random
from collections import deque

from edgemesh.decide.asks import Ask
from edgemesh.decide.request import Sequence
from edgemesh.decide.scheduling import Scheduler
from edgemesh.decide.state import Config, Note
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.ids import Finish, Layout, Plane
from edgemesh.wire.messages import (
    Accepted,
    Arrive,
    Done,
    Failed,
    IdleDone,
    IdlePlan,
    Place,
    Plan,
    PromptLogprobs,
    Release,
    Sampling,
    Submit,
    Verdict,
)

PAGE = 4
VOCAB = 50
EOS = 49


def draw(tokens: tuple[int, ...], allowed: int = 0) -> int:
    """The model: the next token is a function of all tokens before it, and of nothing else but the bits of what is ``allowed``."""
    token = hash(tokens) % VOCAB
    while allowed and not allowed >> token & 1:
        token = (token + 1) % VOCAB
    return token


def masks_of(part) -> dict[int, int]:
    """The masks of a plan's part as bits, by chunk or slot."""
    words = -(-VOCAB // 32)
    assert len(part.masks) == words * len(part.masked)
    rows = (part.masks.slice(at * words, at * words + words).buffer for at in range(len(part.masked)))
    return {key: int.from_bytes(row, "little") for key, row in zip(part.masked, rows, strict=True)}


def score(tokens: tuple[int, ...], target: int, top: int) -> list[int]:
    """A row of ``PromptLogprobs``: a function of the context, the token after it, and what was asked."""
    return [hash((*tokens, target)) & 0x7FFFFFFF, 1, *(number for place in range(top) for number in (place, 0))]


def scores(submit: Submit) -> list[int]:
    """All rows of a prompt that its client must get, those that it has left out."""
    prompt = submit.prompt.tolist()
    if submit.prompt_logprobs < 0:
        return []
    ends = range(submit.scored + 1, len(prompt))
    return [each for end in ends for each in score(tuple(prompt[:end]), prompt[end], submit.prompt_logprobs)]


def stream(submit: Submit) -> tuple[list[int], Finish]:
    """What a request must give, whatever is scheduled around it."""
    tokens = [*submit.prompt, *submit.emitted]
    out: list[int] = list(submit.emitted)
    while len(out) < submit.max_tokens:
        token = draw(tuple(tokens))
        if token in submit.sampling.stop_token_ids:
            return out, Finish.STOP
        out.append(token)
        tokens.append(token)
    return out, Finish.LENGTH


class Ranks:
    """One plane's ranks: they execute plans in order over a slab that both planes share.

    ``slab[page][offset]`` holds (position, token): attention over anything else than the row's own prefix fails.
    """

    def __init__(self, slab: dict[tuple[int, int], tuple[int, int]], rng: random.Random) -> None:
        self.slab = slab
        self.rng = rng
        self.plans: deque[Plan | IdlePlan] = deque()
        self.rows: dict[int, list] = {}
        self.wanted: dict[int, str] = {}
        self.submits: dict[str, Submit] = {}
        self.tick = -1
        self.step_ns = 0

    def write(self, pages, position: int, token: int) -> None:
        page = pages[position // PAGE]
        assert page > 0
        self.slab[page, position % PAGE] = (position, token)

    def read(self, pages, upto: int) -> tuple[int, ...]:
        tokens = []
        for position in range(upto):
            found = self.slab[pages[position // PAGE], position % PAGE]
            assert found[0] == position, f"position {position} reads the KV of position {found[0]}"
            tokens.append(found[1])
        return tuple(tokens)

    def last_position(self, slot: int) -> int:
        submit = self.submits[self.wanted[slot]]
        return len(submit.prompt) + submit.max_tokens - 1

    def run(self) -> Done | IdleDone:
        plan = self.plans.popleft()
        assert plan.tick == self.tick + 1
        self.tick = plan.tick
        if isinstance(plan, IdlePlan):
            return IdleDone(plan.group, plan.plane, plan.epoch, plan.tick)
        firsts = self.prefill(plan.prefill) if plan.prefill else ()
        scored = tuple(self.score(chunk) for chunk in plan.prefill.chunks if chunk.scoring) if plan.prefill else ()
        slots, tokens = self.decode(plan.decode) if plan.decode else ((), ())
        head = (plan.group, plan.plane, plan.epoch, plan.tick)
        return Done(*head, slots, tokens, firsts, prompt_logprobs=scored, step_ns=self.step_ns)

    def score(self, chunk) -> PromptLogprobs:
        wanted, rows = chunk.scoring, []
        assert chunk.start <= wanted.first
        assert wanted.first + len(wanted.targets) <= chunk.start + chunk.length
        for position, target in enumerate(wanted.targets, wanted.first):
            rows += score(self.read(chunk.pages, position + 1), target, wanted.top)
        return PromptLogprobs(wanted.first, wanted.top, TokenArray.of(rows))

    def prefill(self, prefill) -> tuple[int, ...]:
        at, firsts, masks = 0, [], masks_of(prefill)
        for number, chunk in enumerate(prefill.chunks):
            for offset in range(chunk.length):
                self.write(chunk.pages, chunk.start + offset, prefill.tokens[at + offset])
            at += chunk.length
            if chunk.final:
                tokens = self.read(chunk.pages, chunk.start + chunk.length)
                firsts.append(-1 if self.rng.random() < 0.1 else draw(tokens, masks.get(number, 0)))
        assert at == len(prefill.tokens)
        return tuple(firsts)

    def decode(self, decode) -> tuple[tuple[int, ...], tuple[int, ...]]:
        for slot in decode.leaves:
            del self.rows[slot]
        for join in decode.joins:
            assert join.slot not in self.rows
            self.rows[join.slot] = [list(join.pages), join.position, join.token]
            self.wanted[join.slot] = join.request
        for grow in decode.grows:
            self.rows[grow.slot][0].extend(grow.pages)
        drawn, masks = [], masks_of(decode)
        assert not set(masks) & set(decode.sits)
        slots = tuple(slot for slot in sorted(self.rows) if slot not in decode.sits)
        for slot in slots:
            pages, position, token = self.rows[slot]
            assert position < self.last_position(slot), "a step that cannot give a token that is wanted"
            self.write(pages, position, token)
            new = -1 if self.rng.random() < 0.1 else draw(self.read(pages, position + 1), masks.get(slot, 0))
            drawn.append(new)
            if new >= 0:
                self.rows[slot][1:] = [position + 1, new]
        return slots, tuple(drawn)


class World:
    """One group, its ranks and its gateway, driven by a seeded random order of everything that may happen."""

    def __init__(
        self, seed: int, planes, pages: int, slots: int, *, peers: bool, prefix: bool, park_ns=10**6, pace_ns=0
    ) -> None:
        self.rng = random.Random(seed)
        self.config = Config(
            group=0,
            member=0,
            epoch=0,
            planes=planes,
            pages=pages,
            page_tokens=PAGE,
            slots=slots,
            chunk_tokens=8,
            reserve_tokens=4,
            max_waiting=1000,
            quantum_tokens=8,
            age_ns=500,
            pause_ns=10**6,
            park_ns=park_ns,
            prefix_cache=prefix,
            eos_token_ids=(EOS,),
            pace_ns=pace_ns,
        )
        self.scheduler = Scheduler(self.config)
        slab: dict[tuple[int, int], tuple[int, int]] = {}
        self.ranks = {plane: Ranks(slab, self.rng) for plane in planes}
        self.peers = peers
        self.arrivals: dict[Plane, Arrive] = {}
        self.released: dict[Plane, int] = dict.fromkeys(planes, -1)
        self.now = 0
        self.submits: dict[str, Submit] = {}
        self.got: dict[str, list[int]] = {}
        self.scores: dict[str, list[int]] = {}
        self.ends: dict[str, Finish | Failed | str] = {}
        self.asks: list[Ask] = []
        self.dropped: list[Sequence] = []
        self.notes: list[Note] = []

    def submit(self, submit: Submit) -> None:
        self.submits[submit.request] = submit
        for ranks in self.ranks.values():
            ranks.submits[submit.request] = submit
        self.got[submit.request] = list(submit.emitted)
        self.scores[submit.request] = []
        self.scheduler.place(Place(0, submit), self.now)

    def settle(self) -> None:
        self.now += 1
        self.scheduler.advance(self.now)
        effects = self.scheduler.effects()
        self.asks.extend(effects.asks)
        self.dropped.extend(effects.dropped)
        self.notes.extend(effects.notes)
        for plan in effects.plans:
            self.ranks[plan.plane].plans.append(plan)
        for arrive in effects.arrivals:
            before = self.arrivals.get(arrive.plane)
            assert arrive.tick == self.released[arrive.plane] + 1
            assert before is None or before.tick < arrive.tick or before.revision < arrive.revision
            # An idle arrival that a real one has replaced may still be the one that the barrier decided by.
            if not (before and before.tick == arrive.tick and self.peers and self.rng.random() < 0.5):
                self.arrivals[arrive.plane] = arrive
        for reply in effects.replies:
            if isinstance(reply, Failed):
                self.ends[reply.request] = reply
            else:
                assert isinstance(reply, Accepted)
        for item in (item for items in effects.items.values() for item in items):
            assert item.request not in self.ends
            assert item.index == len(self.got[item.request])
            if item.prompt_logprobs is not None:
                assert self.got[item.request] == list(self.submits[item.request].emitted)
                self.scores[item.request].extend(item.prompt_logprobs.rows)
            self.got[item.request].extend(item.tokens)
            if item.finish:
                self.ends[item.request] = item.finish
        self.scheduler.check()

    def release(self, plane: Plane) -> bool:
        arrive = self.arrivals.get(plane)
        if arrive is None or arrive.tick != self.released[plane] + 1 or not (arrive.shape.tokens or self.peers):
            return False
        tokens = (arrive.shape.tokens, 1 if self.peers else 0)
        self.released[plane] = arrive.tick
        verdict = Verdict(tokens, Layout.RAGGED, 0)
        self.scheduler.release(Release(plane, 0, arrive.tick, verdict), self.now)
        return True

    def run(self, plane: Plane) -> bool:
        if not self.ranks[plane].plans:
            return False
        self.scheduler.done(self.ranks[plane].run(), self.now)
        return True

    def step(self) -> bool:
        moves = [(move, plane) for plane in self.ranks for move in (self.release, self.run)]
        self.rng.shuffle(moves)
        moved = any(move(plane) for move, plane in moves)
        held = self.scheduler.state.held_until_ns
        if not moved and held is not None:
            self.now, moved = max(self.now, held - 1), True
        self.settle()
        return moved

    def finish(self) -> None:
        for _ in range(20_000):
            self.step()
            if self.scheduler.quiet:
                return
        raise AssertionError(
            f"not finished: {[(s.submit.request, s.state) for s in self.scheduler.state.live.values()]}"
        )


def scripted(planes=(Plane.PREFILL, Plane.DECODE), pages=40, slots=4, **options) -> World:
    world = World(1, planes, pages, slots, peers=False, prefix=options.pop("prefix", True), **options)
    world.rng.random = lambda: 1.0  # every draw is accepted
    return world


def ask(world: World, name: str, prompt: list[int], output: int, **fields) -> None:
    sampling = fields.pop("sampling", Sampling())
    world.submit(Submit(name, fields.pop("attempt", 0), 0, TokenArray.of(prompt), sampling, output, **fields))
