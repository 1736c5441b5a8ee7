import functools

import pytest
import torch
from engine_net import PAGE_TOKENS, PAGES, POSITIONS, run_ranks, save_model, slab

from edgemesh.engine.attention.sdpa import SdpaAttention
from edgemesh.engine.collectives import alone
from edgemesh.engine.inputs import DecodeRows, build
from edgemesh.engine.layout import Split
from edgemesh.engine.local import local_collectives
from edgemesh.engine.model import Network
from edgemesh.engine.shape import read_shape
from edgemesh.engine.streams import stream
from edgemesh.engine.weights import shard_all
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.ids import Layout
from edgemesh.wire.messages import Chunk, Prefill, Sampling, Verdict

FAMILIES = ("llama", "qwen2", "qwen3")
LIMIT = 1e-4


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    @functools.cache
    def make(family):
        path = tmp_path_factory.mktemp(family)
        scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        changes = {
            "llama": {
                "attention_bias": True,
                "rope_parameters": {**scaling, "rope_theta": 10000.0, "original_max_position_embeddings": 16},
            },
            "qwen2": {"tie_word_embeddings": True},
            "qwen3": {"num_hidden_layers": 3},
        }[family]
        return path, save_model(family, path, **changes)

    return make


class Ranks:
    """The networks of all ranks of a coupled set over in-process collectives, without sampling."""

    def __init__(self, path, attn_tp, groups=1, *, pads=False, scatters=True, dtype="float32"):
        self.attn_tp, self.groups = attn_tp, groups
        shape = read_shape(path / "config.json", dtype)
        self.ends = (
            local_collectives(attn_tp, groups, pads=pads, scatters=scatters) if attn_tp * groups > 1 else [alone()]
        )
        self.networks = []
        for rank in range(attn_tp * groups):
            split = Split(attn_tp, rank % attn_tp, attn_tp * groups, rank)
            attention = SdpaAttention(slab(shape, split, dtype))
            self.networks.append(Network(shape, split, shard_all(path, split, dtype), attention, POSITIONS))

    def logits(self, verdict, work):
        """``work[group]`` is (prefill, rows) or None; the whole logits of each group's wanted rows."""

        @torch.inference_mode()
        def job(rank):
            member = rank // self.attn_tp
            prefill, rows = work[member] or (None, None)
            flow = stream(self.ends[rank], verdict)
            network = self.networks[rank]
            hidden = network.forward(build(flow, PAGE_TOKENS, prefill, rows))
            return network.logits(hidden)

        shards = run_ranks([functools.partial(job, rank) for rank in range(len(self.networks))])
        return [torch.cat(shards[at : at + self.attn_tp], dim=-1) for at in range(0, len(shards), self.attn_tp)]


class Sequence:
    """A prompt in the pages of one group."""

    def __init__(self, tokens, pages, written=0):
        self.tokens, self.pages, self.written = tokens, pages, written

    def chunk(self, length):
        start, stop = self.written, self.written + length
        self.written = stop
        pages = tuple(self.pages[: -(-stop // PAGE_TOKENS)])
        chunk = Chunk("r", start, length, pages, final=True, sampling=Sampling())
        return chunk, self.tokens[start:stop]


def prefill(*parts):
    chunks, tokens = zip(*parts, strict=True)
    return Prefill(chunks, TokenArray.of([token for each in tokens for token in each]))


def rows(*sequences):
    """A decode row for the next token of each sequence."""
    positions = torch.tensor([each.written for each in sequences])
    table = torch.zeros((len(sequences), POSITIONS // PAGE_TOKENS), dtype=torch.int64)
    for number, each in enumerate(sequences):
        table[number, : len(each.pages)] = torch.tensor(each.pages)
    tokens = torch.tensor([each.tokens[each.written] for each in sequences])
    for each in sequences:
        each.written += 1
    return DecodeRows(tokens, positions, table, int(positions.max()) + 1)


def verdict(*tokens, attn_tp=1, layout=Layout.RAGGED):
    bucket = -(-max(tokens) // attn_tp) * attn_tp if layout is Layout.EVEN else 0
    return Verdict(tokens, layout, bucket)


@torch.inference_mode()
def expected(model, tokens):
    return model(torch.tensor([tokens])).logits[0]


def close(found, wanted, limit=LIMIT):
    error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert error.max() < limit, error


def random_tokens(seed, length):
    return torch.randint(0, 131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def pages_of(seed, count, avoid=()):
    order = torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(seed)) + 1
    return [page for page in order.tolist() if page not in avoid][:count]


@pytest.mark.parametrize("attn_tp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_chunks_and_decode_equal_transformers(models, family, attn_tp):
    path, model = models(family)
    ranks = Ranks(path, attn_tp)
    tokens = random_tokens(1, 23)
    wanted = expected(model, tokens)
    sequence = Sequence(tokens, pages_of(1, 6))
    for length in (10, 6, 1):
        (found,) = ranks.logits(verdict(length), [(prefill(sequence.chunk(length)), None)])
        close(found, wanted[[sequence.written - 1]])
    for _ in range(4):
        (found,) = ranks.logits(verdict(1), [(None, rows(sequence))])
        close(found, wanted[[sequence.written - 1]])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_position_equals_transformers(models, family):
    path, model = models(family)
    ranks = Ranks(path, 1)
    tokens = random_tokens(2, 17)
    wanted = expected(model, tokens)
    for length in range(1, 18):
        (found,) = ranks.logits(verdict(length), [(prefill(Sequence(tokens, pages_of(2, 5)).chunk(length)), None)])
        close(found, wanted[[length - 1]])


@pytest.mark.parametrize("attn_tp", [1, 3])
def test_packed_prompts_cached_prefix_and_decode_rows_in_one_step(models, attn_tp):
    path, model = models("llama")
    ranks = Ranks(path, attn_tp)
    prompts = [random_tokens(seed, length) for seed, length in ((3, 20), (4, 9), (5, 14))]
    prompts.append([*prompts[0][:8], *random_tokens(6, 7)])
    pages = pages_of(3, 22)
    first = Sequence(prompts[0], pages[:5])
    second = Sequence(prompts[1], pages[5:8])
    third = Sequence(prompts[2], pages[8:12])
    ranks.logits(verdict(26), [(prefill(first.chunk(17), second.chunk(5), third.chunk(4)), None)])
    cached = Sequence(prompts[3], [*pages[:2], *pages[12:14]], written=8)
    work = prefill(cached.chunk(7), third.chunk(6))
    (found,) = ranks.logits(verdict(15), [(work, rows(first, second))])
    wanted = [(3, 14), (2, 9), (0, 17), (1, 5)]
    close(found, torch.stack([expected(model, prompts[prompt])[position] for prompt, position in wanted]))


@pytest.mark.parametrize(("groups", "attn_tp"), [(2, 2), (4, 1), (2, 4), (4, 2), (2, 3)])
@pytest.mark.parametrize(("pads", "scatters"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("layout", list(Layout))
def test_attention_groups_with_different_work_equal_transformers(models, groups, attn_tp, pads, scatters, layout):
    path, model = models("qwen3")
    ranks = Ranks(path, attn_tp, groups, pads=pads, scatters=scatters)
    prompts = [random_tokens(seed, 14) for seed in range(groups)]
    sequences = [Sequence(prompt, pages_of(9, 4)) for prompt in prompts]
    lengths = [10, 0, 3, 1][:groups]
    every = [
        (prefill(each.chunk(length)), None) if length else None for each, length in zip(sequences, lengths, strict=True)
    ]
    found = ranks.logits(verdict(*lengths, attn_tp=attn_tp, layout=layout), every)
    for group, length in enumerate(lengths):
        if length:
            close(found[group], expected(model, prompts[group])[[length - 1]])
    counts = [1] * groups
    counts[-1] = 0
    every = [(None, rows(each)) if count else None for each, count in zip(sequences, counts, strict=True)]
    found = ranks.logits(verdict(*counts, attn_tp=attn_tp, layout=layout), every)
    for group, count in enumerate(counts):
        if count:
            close(found[group], expected(model, prompts[group])[[sequences[group].written - 1]])


def test_a_step_with_padding_rows_leaves_the_others_unchanged(models):
    path, model = models("qwen2")
    ranks = Ranks(path, 2)
    tokens = random_tokens(8, 12)
    sequence = Sequence(tokens, pages_of(8, 3))
    (found,) = ranks.logits(verdict(15), [(prefill(sequence.chunk(11)), None)])
    close(found, expected(model, tokens)[[10]])
    (found,) = ranks.logits(verdict(3), [(None, rows(sequence))])
    close(found, expected(model, tokens)[[11]])


@pytest.mark.parametrize("attn_tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_stays_near_float32(models, family, attn_tp):
    path, model = models(family)
    ranks = Ranks(path, attn_tp, dtype="bfloat16")
    tokens = random_tokens(11, 20)
    wanted = expected(model, tokens)
    sequence = Sequence(tokens, pages_of(11, 5))
    for length in (12, 6):
        (found,) = ranks.logits(verdict(length), [(prefill(sequence.chunk(length)), None)])
        close(found, wanted[[sequence.written - 1]], 0.06)
    for _ in range(2):
        (found,) = ranks.logits(verdict(1), [(None, rows(sequence))])
        close(found, wanted[[sequence.written - 1]], 0.06)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "attention_factor": 0.8},
    ],
)
def test_stretched_rotary_frequencies_equal_transformers(tmp_path, rope):
    model = save_model("llama", tmp_path, num_hidden_layers=1, rope_parameters={**rope, "rope_theta": 5000.0})
    ranks = Ranks(tmp_path, 1)
    tokens = random_tokens(12, 40)
    (found,) = ranks.logits(verdict(40), [(prefill(Sequence(tokens, pages_of(12, 10)).chunk(40)), None)])
    close(found, expected(model, tokens)[[39]])
