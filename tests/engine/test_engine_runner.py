import pytest
import torch
from engine_net import PAGE_TOKENS, PAGES, SLOTS, Mesh, save_model

from edgemesh.engine.turns import StepRefusedError
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.ids import Layout, Plane
from edgemesh.wire.messages import (
    Chunk,
    Decode,
    Done,
    Grow,
    IdleDone,
    IdlePlan,
    Join,
    Plan,
    Prefill,
    Sampling,
    Verdict,
)

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    return path, save_model("llama", path, tie_word_embeddings=True)


class Stream:
    """One request as a group would drive it."""

    def __init__(self, name, prompt, sampling=GREEDY):
        self.name, self.prompt, self.sampling = name, list(prompt), sampling
        self.tokens = list(prompt)
        self.pages = []

    @property
    def output(self):
        return self.tokens[len(self.prompt) :]

    @property
    def history(self):
        return TokenArray.of(self.tokens) if self.sampling.needs_history else TokenArray()

    def take(self, free, positions):
        had = len(self.pages)
        while len(self.pages) * PAGE_TOKENS < positions:
            self.pages.append(free.pop())
        return tuple(self.pages[had:])

    def chunk(self, start, stop):
        final = stop == len(self.tokens)
        pages = tuple(self.pages[: -(-stop // PAGE_TOKENS)])
        return Chunk(
            self.name,
            start,
            stop - start,
            pages,
            final,
            self.sampling if final else None,
            len(self.output),
            self.history if final else TokenArray(),
        )

    def join(self, slot):
        position = len(self.tokens) - 1
        return Join(
            slot,
            self.name,
            self.tokens[-1],
            position,
            tuple(self.pages),
            self.sampling,
            len(self.output),
            self.history,
        )


class Driver:
    """A group that plans one tick after the other for one set of ranks, the other groups idle."""

    def __init__(self, mesh, member=0):
        self.mesh, self.member = mesh, member
        self.tick = 0
        self.free = list(range(1, PAGES))
        torch.manual_seed(3)
        self.rows = {}

    def step(self, prefill=None, decode=None, rows=0):
        count = (len(prefill.tokens) if prefill else 0) + rows
        tokens = [0] * self.mesh.groups
        tokens[self.member] = count
        verdict = Verdict(tuple(tokens), Layout.RAGGED, 0)
        plans = [IdlePlan(group, self.mesh.plane, 0, self.tick, verdict) for group in range(self.mesh.groups)]
        plans[self.member] = Plan(self.member, self.mesh.plane, 0, self.tick, verdict, prefill, decode)
        answers = self.mesh.execute(plans)
        for group, answer in enumerate(answers):
            assert type(answer) is (Done if group == self.member else IdleDone)
            assert answer.tick == self.tick
        self.tick += 1
        return answers[self.member]

    def prefill(self, *streams, chunk=100):
        """Whole prompts, each in pieces of ``chunk``; the first tokens."""
        at = dict.fromkeys(streams, 0)
        while any(at[each] < len(each.prompt) for each in streams):
            chunks, tokens, ends = [], [], []
            for each in streams:
                start, stop = at[each], min(at[each] + chunk, len(each.prompt))
                if start < stop:
                    each.take(self.free, stop)
                    chunks.append(each.chunk(start, stop))
                    tokens += each.prompt[start:stop]
                    at[each] = stop
                    ends += [each] if stop == len(each.prompt) else []
            done = self.step(Prefill(tuple(chunks), TokenArray.of(tokens)))
            assert len(done.firsts) == len(ends)
            for each, token in zip(ends, done.firsts, strict=True):
                assert token >= 0
                each.tokens.append(token)

    def decode(self, joins=(), leaves=(), sits=()):
        """One step of all rows but ``sits``."""
        for slot in leaves:
            self.free += self.rows.pop(slot).pages
        grows = []
        for slot, each in self.rows.items():
            pages = each.take(self.free, len(each.tokens))
            if pages:
                grows.append(Grow(slot, pages))
        entries = []
        for slot, each in dict(joins).items():
            each.take(self.free, len(each.tokens))
            entries.append(each.join(slot))
            self.rows[slot] = each
        ran = sorted(set(self.rows) - set(sits))
        done = self.step(decode=Decode(tuple(leaves), tuple(entries), tuple(grows), tuple(sits)), rows=len(ran))
        assert list(done.slots) == ran
        for slot, token in zip(done.slots, done.tokens, strict=True):
            if token >= 0:
                self.rows[slot].tokens.append(token)
        return done


@torch.inference_mode()
def generate(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def prompt(seed, length):
    return torch.randint(0, 131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("attn_tp", "groups", "member"), [(1, 1, 0), (2, 1, 0), (4, 1, 0), (2, 2, 1), (1, 2, 0), (2, 4, 2)]
)
def test_greedy_rows_that_come_and_go_equal_transformers(model, attn_tp, groups, member):
    path, reference = model
    driver = Driver(Mesh(path, attn_tp, groups, pads=groups > 1), member)
    a, b, c = (Stream(name, prompt(seed, length)) for name, seed, length in (("a", 1, 11), ("b", 2, 3), ("c", 3, 16)))
    driver.prefill(a, b, chunk=7)
    driver.decode(joins={3: a, 0: b})
    driver.decode(sits=(3,))
    driver.prefill(c)
    driver.decode(joins={1: c})
    driver.decode(leaves=(0,))
    driver.decode()
    for each in (a, b, c):
        assert each.output == generate(reference, each.prompt, len(each.output))
    assert [len(each.output) for each in (a, b, c)] == [5, 4, 4]
    again = Stream("b2", b.prompt)
    driver.prefill(again)
    driver.decode(joins={0: again})
    assert again.output == b.output[:2]


def test_chunks_and_rows_share_a_step(model):
    path, reference = model
    driver = Driver(Mesh(path, 2))
    a, b = Stream("a", prompt(4, 9)), Stream("b", prompt(5, 13))
    driver.prefill(a)
    a.take(driver.free, len(a.tokens))
    b.take(driver.free, len(b.tokens))
    done = driver.step(Prefill((b.chunk(0, 13),), TokenArray.of(b.tokens)), Decode(joins=(a.join(2),)), rows=1)
    assert (done.slots, done.tokens) == ((2,), (generate(reference, a.prompt, 2)[1],))
    assert done.firsts == (generate(reference, b.prompt, 1)[0],)


def test_penalties_follow_drawn_tokens_and_joins_know_the_history(model):
    path, reference = model
    sampling = Sampling(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.4)
    tokens = prompt(6, 10)
    wanted = list(tokens)
    for _ in range(8):
        with torch.inference_mode():
            logits = reference(torch.tensor([wanted])).logits[0, -1]
        logits = logits.clone()
        seen = torch.tensor(sorted(set(wanted)))
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 1.3, logits[seen] * 1.3)
        for token in wanted[len(tokens) :]:
            logits[token] -= 0.7
        for token in set(wanted[len(tokens) :]):
            logits[token] -= 0.4
        wanted.append(int(logits.argmax()))
    for attn_tp in (1, 3):
        driver = Driver(Mesh(path, attn_tp))
        a = Stream("a", tokens, sampling)
        driver.prefill(a)
        driver.decode(joins={0: a})
        for _ in range(2):
            driver.decode()
        driver.rows.pop(0)
        done = driver.step(decode=Decode(leaves=(0,), joins=(a.join(1),)), rows=1)
        a.tokens.append(done.tokens[0])
        driver.rows[1] = a
        for _ in range(3):
            driver.decode()
        assert a.tokens == wanted


def test_bad_words_are_never_completed_on_any_number_of_ranks_and_after_a_join(model):
    path, reference = model
    tokens = prompt(6, 10)
    free = generate(reference, tokens, 8)
    words = (free[:3], [7, 9, 7])
    sampling = Sampling(temperature=0.0, bad_words=tuple(map(tuple, words)))
    wanted = list(tokens)
    for _ in range(8):
        with torch.inference_mode():
            logits = reference(torch.tensor([wanted])).logits[0, -1]
        logits = logits.clone()
        output = wanted[len(tokens) :]
        for word in words:
            if output[1 - len(word) :] == word[:-1]:
                logits[word[-1]] = -1e30
        wanted.append(int(logits.argmax()))
    assert wanted[:-6] == tokens + free[:2]
    assert wanted[-6] != free[2]
    for attn_tp in (1, 3):
        driver = Driver(Mesh(path, attn_tp))
        a = Stream("a", tokens, sampling)
        driver.prefill(a)
        driver.decode(joins={0: a})
        for _ in range(2):
            driver.decode()
        driver.rows.pop(0)
        done = driver.step(decode=Decode(leaves=(0,), joins=(a.join(1),)), rows=1)
        a.tokens.append(done.tokens[0])
        driver.rows[1] = a
        for _ in range(3):
            driver.decode()
        assert a.tokens == wanted


def test_seeded_sampling_is_the_same_on_any_number_of_ranks_and_in_any_batch(model):
    path, _ = model
    settings = [
        Sampling(seed=1),
        Sampling(seed=2, temperature=0.7, top_k=20),
        Sampling(seed=3, top_p=0.8),
        Sampling(seed=4, temperature=1.5, min_p=0.02),
        Sampling(seed=1, choice=1),
    ]
    outputs = []
    for attn_tp in (1, 2, 3, 4):
        driver = Driver(Mesh(path, attn_tp))
        streams = [Stream(str(number), prompt(7, 6), each) for number, each in enumerate(settings)]
        driver.prefill(*streams)
        driver.decode(joins=dict(enumerate(streams)))
        for _ in range(4):
            driver.decode()
        outputs.append([each.output for each in streams])
    assert outputs[1:] == outputs[:1] * 3
    assert len({tuple(each) for each in outputs[0]}) == 5
    driver = Driver(Mesh(path, 1))
    lonely = Stream("2", prompt(7, 6), settings[2])
    driver.prefill(lonely)
    driver.decode(joins={4: lonely})
    assert lonely.output == outputs[0][2][:2]


def head(tick=0, tokens=(3,), bucket=0, layout=Layout.RAGGED, group=0, epoch=0, plane=Plane.MIXED):
    return group, plane, epoch, tick, Verdict(tokens, layout, bucket)


CHUNK = Chunk("r", 0, 3, (1,), final=True, sampling=GREEDY)
JOIN = Join(0, "r", 5, 3, (1,), GREEDY, 1)


def plan(*, chunk=CHUNK, tokens=(1, 2, 3), **changes):
    return Plan(*head(**{"tokens": (len(tokens),), **changes}), Prefill((chunk,), TokenArray.of(tokens)))


def decoding(**parts):
    count = parts.pop("rows", 1)
    return Plan(*head(tokens=(count,)), None, Decode(**parts))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (plan(tick=1), "tick: 1; this rank's next is 0"),
        (plan(epoch=1), "epoch: 1"),
        (plan(group=1), "group: 1"),
        (plan(plane=Plane.DECODE), "plane: decode"),
        (IdlePlan(*head(tick=7)), "tick: 7"),
        (Plan(0, Plane.MIXED, 0, 0, Verdict((3, 0), Layout.RAGGED, 0)), "2 groups; the coupled set has 1"),
        (Plan(0, Plane.MIXED, 0, 0, Verdict((3,), Layout.EVEN, 2)), "bucket 2 is less than 3"),
        (plan(tokens=(1, 2)), "2 tokens for chunks of 3"),
        (plan(tokens=(1, 2, 131)), "token 131 is not among 0 to 130"),
        (plan(chunk=Chunk("r", 46, 3, (1,) * 13)), "ends at position 49; the most is 48"),
        (plan(chunk=Chunk("r", 2, 3, (1,))), "1 pages of 4 tokens for 5 positions"),
        (plan(chunk=Chunk("r", 0, 3, (PAGES,))), f"page {PAGES} is not among 1 to {PAGES - 1}"),
        (plan(chunk=Chunk("r", 0, 3, (0,))), "page 0 is not among"),
        (plan(chunk=Chunk("r", 0, 3, (1,), final=True)), "a final chunk has sampling settings"),
        (
            plan(chunk=Chunk("r", 0, 3, (1,), final=True, sampling=Sampling(presence_penalty=1.0))),
            "a history of 0 tokens at position 3",
        ),
        (decoding(), "0 prompt tokens and 0 rows; the verdict grants 1 to 1"),
        (decoding(joins=(JOIN, JOIN)), "slot 0 joins: it has a row already"),
        (decoding(joins=(Join(SLOTS, "r", 5, 3, (1,), GREEDY, 1),)), f"slots are 0 to {SLOTS - 1}"),
        (decoding(joins=(Join(0, "r", 131, 3, (1,), GREEDY, 1),)), "token 131"),
        (decoding(joins=(Join(0, "r", 5, 4, (1,), GREEDY, 1),)), "too few for position 4"),
        (decoding(joins=(Join(0, "r", 5, 48, (1,) * 13, GREEDY, 1),)), "position 48"),
        (decoding(joins=(Join(0, "r", 5, 3, (1,), Sampling(presence_penalty=1.0), 1),)), "a history of 0"),
        (decoding(leaves=(0,)), "slot 0 leaves, but has no row"),
        (decoding(grows=(Grow(0, (1,)),)), "slot 0 grows: it has no row"),
        (decoding(joins=(JOIN,), grows=(Grow(0, (PAGES,)),)), f"page {PAGES}"),
        (decoding(sits=(0,)), "slot 0 sits out"),
        (decoding(joins=(JOIN,), masked=(0,)), "0 mask words for 1 rows"),
        (decoding(joins=(JOIN, Join(1, "s", 5, 3, (2,), GREEDY, 1))), "2 rows; the verdict grants 1 to 1"),
    ],
)
def test_a_wrong_plan_is_refused_and_changes_nothing(lone_runner, model, wrong, why):
    with pytest.raises(StepRefusedError) as refused:
        lone_runner.execute([wrong])
    assert why in str(refused.value)
    assert lone_runner.runners[0]._turns.tick == 0
    assert not lone_runner.runners[0]._batch.slots.seats


@pytest.fixture(scope="module")
def lone_runner(model):
    return Mesh(model[0], 1)


def test_rows_missing_from_a_plan_are_padding(model):
    path, reference = model
    mesh = Mesh(path, 2)
    tokens = prompt(9, 3)
    done = mesh.execute([plan(tokens=tokens)])[0]
    assert done.firsts == (generate(reference, tokens, 1)[0],)
    verdict = Verdict((4,), Layout.EVEN, 4)
    join = Join(0, "r", done.firsts[0], 3, (1,), GREEDY, 1)
    done = mesh.execute([Plan(0, Plane.MIXED, 0, 1, verdict, None, Decode(joins=(join,)))])[0]
    assert done.tokens == (generate(reference, tokens, 2)[1],)


def test_a_draw_without_a_token_goes_on_with_other_noise(model, monkeypatch):
    """Also when its row leaves and joins again, or its chunk is planned again."""
    path, _ = model
    mesh = Mesh(path, 1)
    runner = mesh.runners[0]
    keys = []

    def none(logits, rows):
        keys.extend(row.key(0) for row in rows)
        return type("Drawn", (), {"tokens": [-1] * len(rows), "logprobs": [None] * len(rows)})

    sampling = Sampling(seed=5, top_p=0.9)
    real = runner._sampler.draw
    monkeypatch.setattr(runner._sampler, "draw", none)
    chunk = Chunk("r", 0, 3, (1,), final=True, sampling=sampling)
    assert mesh.execute([plan(chunk=chunk)])[0].firsts == (-1,)
    again = Chunk("r", 2, 1, (1,), final=True, sampling=sampling)
    assert mesh.execute([plan(chunk=again, tokens=(3,), tick=1)])[0].firsts == (-1,)
    join = Join(0, "r", 5, 3, (1,), sampling, 1)
    for tick in (2, 3):
        step = Plan(*head(tick, (1,)), None, Decode(joins=(join,) if tick == 2 else ()))
        assert mesh.execute([step])[0].tokens == (-1,)
    step = Plan(*head(4, (1,)), None, Decode(leaves=(0,), joins=(join,)))
    assert mesh.execute([step])[0].tokens == (-1,)
    assert len(set(keys)) == 5
    monkeypatch.setattr(runner._sampler, "draw", real)
    assert mesh.execute([Plan(*head(5, (1,)), None, Decode())])[0].tokens[0] >= 0
    assert runner._redraws._failed == {}


def test_a_grammar_mask_leaves_its_tokens_alone_in_the_race(model):
    path, _ = model
    for attn_tp in (1, 3):
        mesh = Mesh(path, attn_tp)
        words = [0] * 5
        words[100 // 32] |= 1 << (100 % 32)
        words = [word - (1 << 32) if word >= 1 << 31 else word for word in words]
        decode = Decode(joins=(JOIN, Join(1, "s", 5, 3, (2,), GREEDY, 1)), masked=(1,), masks=TokenArray.of(words))
        done = mesh.execute([Plan(*head(tokens=(2,)), None, decode)])[0]
        assert done.tokens[1] == 100
        assert done.tokens[0] != 100


def test_logprobs_are_those_of_the_raw_distribution(model):
    path, reference = model
    tokens = prompt(10, 3)
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0, -1].log_softmax(dim=-1)
    sampling = Sampling(seed=8, temperature=2.0, logprobs=5, logit_bias=((7, 3.0),), top_k=50)
    answers = []
    for attn_tp in (1, 4):
        mesh = Mesh(path, attn_tp)
        chunk = Chunk("r", 0, 3, (1,), final=True, sampling=sampling)
        done = mesh.execute([plan(chunk=chunk, tokens=tokens)])[0]
        (found,) = done.first_logprobs
        assert found.token == done.firsts[0]
        assert found.logprob == pytest.approx(float(wanted[found.token]), abs=1e-3)
        best, ids = wanted.topk(5)
        assert [token for token, _ in found.top] == ids.tolist()
        assert [value for _, value in found.top] == pytest.approx(best.tolist(), abs=1e-3)
        answers.append(found.token)
    assert answers[0] == answers[1]
