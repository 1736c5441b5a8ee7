"""Small random models on a GPU, and a group that plans for one rank of them."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
import torch
import transformers

from edgemesh.engine.collectives import alone
from edgemesh.engine.cuda.attention import PagedAttention
from edgemesh.engine.cuda.runner import CudaRunner
from edgemesh.engine.layout import Split, local
from edgemesh.engine.local import local_collectives
from edgemesh.engine.shape import read_shape
from edgemesh.engine.turns import Limits, Station
from edgemesh.engine.weights import DTYPES, shard_all
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.ids import Layout, Plane
from edgemesh.wire.messages import Chunk, Decode, Grow, IdlePlan, Join, Plan, Prefill, Sampling, Verdict

PAGES, PAGE_TOKENS, SLOTS, POSITIONS = 64, 256, 12, 4096
SIZES = (1, 2, 4, 8, 12)
GREEDY = Sampling(temperature=0.0)

ERROR = 0.03
"""Most that bfloat16 logits differ from float32 ones, as a share of the row's norm (0.01 to 0.02 seen)."""

FEW = 8
"""Tokens from which most must be the reference's own; each of fewer may be one of two that are as good."""

COMMON = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1408,
    "vocab_size": 5003,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128},
    "qwen2": {"tie_word_embeddings": True, "num_attention_heads": 7, "num_key_value_heads": 1},
    "qwen3": {},
}


def save_model(family: str, path) -> transformers.PreTrainedModel:
    """A random model with weights that bfloat16 holds exactly, in float32 on the GPU; also as a directory."""
    config_type = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}[family]
    config = getattr(transformers, config_type)(**{**COMMON, **FAMILIES[family]})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "embed" not in name:
                parameter.mul_(2.0)
            parameter.copy_(parameter.bfloat16())
    model.save_pretrained(path)
    return model.eval().cuda()


def make_runner(
    path, attention: PagedAttention, sizes: Sequence[int] = SIZES, plane: Plane = Plane.MIXED
) -> CudaRunner:
    """A lone rank, warmed up; its slab is full of rubbish, as after other requests."""
    shape = read_shape(path / "config.json", "bfloat16")
    split = Split()
    tensors = {name: each.cuda() for name, each in shard_all(path, split, "bfloat16").items()}
    sizes_kv = (shape.layers, 2, PAGES, PAGE_TOKENS, local(shape, split).kv_local, shape.head_dim)
    tensors["kv"] = torch.full(sizes_kv, 1e3, dtype=DTYPES["bfloat16"], device="cuda")
    limits = Limits(PAGES, PAGE_TOKENS, SLOTS, POSITIONS, shape.vocab)
    torch.cuda.synchronize()
    torch.cuda.set_stream(torch.cuda.Stream())
    runner = CudaRunner(Station(0, plane, 0), limits, shape, split, tensors, alone(), attention, sizes)
    runner.warm_up(512, lambda _line: None)
    return runner


class ThreadedRanks:
    """Every rank of a coupled set in a thread of its own, all on one GPU and one stream; group 0 has work, the others idle.

    Collectives meet on the host, so steps run eagerly. It answers as the first rank.
    """

    def __init__(self, path, attention: PagedAttention, attn_tp: int, groups: int) -> None:
        shape = read_shape(path / "config.json", "bfloat16")
        limits = Limits(PAGES, PAGE_TOKENS, SLOTS, POSITIONS, shape.vocab)
        ends = local_collectives(attn_tp, groups, pads=groups > 1)
        self._attn_tp = attn_tp
        self._groups = groups
        self._runners = []
        for rank, end in enumerate(ends):
            group, attn_rank = divmod(rank, attn_tp)
            split = Split(attn_tp, attn_rank, attn_tp * groups, rank)
            tensors = {name: each.cuda() for name, each in shard_all(path, split, "bfloat16").items()}
            sizes_kv = (shape.layers, 2, PAGES, PAGE_TOKENS, local(shape, split).kv_local, shape.head_dim)
            tensors["kv"] = torch.full(sizes_kv, 1e3, dtype=DTYPES["bfloat16"], device="cuda")
            station = Station(group, Plane.MIXED, 0, group, groups)
            self._runners.append(CudaRunner(station, limits, shape, split, tensors, end, attention, ()))
        torch.cuda.synchronize()
        self._turns = self._runners[0]._turns
        self._flying = self._runners[0]._flying

    def allow(self, wait_ns: int) -> None:
        for runner in self._runners:
            runner.allow(wait_ns)

    def submit(self, plan: Plan) -> None:
        verdict = msgspec.structs.replace(plan.verdict, tokens=(*plan.verdict.tokens, *[0] * (self._groups - 1)))
        plans = [msgspec.structs.replace(plan, verdict=verdict)]
        plans += [IdlePlan(group, plan.plane, plan.epoch, plan.tick, verdict) for group in range(1, self._groups)]
        with ThreadPoolExecutor(len(self._runners)) as pool:
            each = [plans[rank // self._attn_tp] for rank in range(len(self._runners))]
            list(pool.map(lambda runner, mine: runner.submit(mine), self._runners, each))

    def finished(self):
        torch.cuda.synchronize()
        answers = [runner.finished() for runner in self._runners]
        for number, answer in enumerate(answers):
            first = answers[number // self._attn_tp * self._attn_tp]
            assert (answer.tick, type(answer)) == (first.tick, type(first))
            if number < self._attn_tp:
                assert (answer.tokens, answer.firsts) == (first.tokens, first.firsts)
        return answers[0]


@dataclass(eq=False)
class Stream:
    """One request: its tokens, and its pages; ``planned`` counts decode steps that are on their way."""

    name: str
    prompt: list[int]
    sampling: Sampling = GREEDY
    pages: list[int] = field(default_factory=list)
    planned: int = 0

    def __post_init__(self):
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def history(self) -> TokenArray:
        return TokenArray.of(self.tokens) if self.sampling.needs_history else TokenArray()


class Driver:
    """A group that plans one tick after the other; ``submit`` plans ahead, ``take`` waits for the oldest answer."""

    def __init__(self, runner: CudaRunner | ThreadedRanks) -> None:
        self.runner = runner
        self.tick = 0
        self.free = list(range(1, PAGES))
        self.rows: dict[int, Stream] = {}
        self.flying: list[list[Stream]] = []

    def _send(self, tokens: int, prefill: Prefill | None, decode: Decode | None, members, *, graph: bool) -> None:
        bucket = next((size for size in SIZES if size >= tokens), 0) if graph else 0
        verdict = Verdict((tokens,), Layout.EVEN if graph else Layout.RAGGED, bucket, graph)
        self.runner.allow(60_000_000_000)
        self.runner.submit(Plan(0, self.runner._turns.station.plane, 0, self.tick, verdict, prefill, decode))
        self.tick += 1
        self.flying.append(members)

    def idle(self, bucket: int) -> None:
        verdict = Verdict((0,), Layout.EVEN, bucket, graph=True)
        self.runner.execute(IdlePlan(0, self.runner._turns.station.plane, 0, self.tick, verdict))
        self.tick += 1

    def take(self):
        """The answer to the oldest plan; its tokens go to their streams."""
        self.runner._flying[0].inbox.wait()
        done = self.runner.finished()
        for stream, token in zip(self.flying.pop(0), (*done.firsts, *done.tokens), strict=True):
            stream.planned = max(stream.planned - 1, 0)
            if token >= 0:
                stream.tokens.append(token)
        return done

    def _room(self, stream: Stream, tokens: int) -> list[int]:
        had = len(stream.pages)
        while len(stream.pages) * PAGE_TOKENS < tokens:
            stream.pages.append(self.free.pop(0))
        return stream.pages[had:]

    def prefill(self, *streams: Stream, chunk: int = 512, decode: bool = False):
        """Whole prompts in chunks; ``decode``: the rows take a step beside each."""
        at = dict.fromkeys(streams, 0)
        done = None
        while any(at[each] < len(each.prompt) for each in streams):
            chunks, tokens, ends = [], [], []
            for each in streams:
                start, stop = at[each], min(at[each] + chunk, len(each.prompt))
                if start < stop:
                    self._room(each, stop + 1)
                    final = stop == len(each.prompt)
                    pages = tuple(each.pages[: -(-stop // PAGE_TOKENS)])
                    sampling = each.sampling if final else None
                    history = each.history if final else TokenArray()
                    chunks.append(Chunk(each.name, start, stop - start, pages, final, sampling, 0, history))
                    tokens += each.prompt[start:stop]
                    at[each] = stop
                    ends += [each] if final else []
            part, running = self._decode() if decode else (None, [])
            work = Prefill(tuple(chunks), TokenArray.of(tokens))
            self._send(len(tokens) + len(running), work, part, [*ends, *running], graph=False)
            done = self.take()
        return done

    def _decode(self, joins=(), leaves=(), sits=(), masked=(), masks=()):
        for slot in leaves:
            self.free += self.rows.pop(slot).pages
        grows = []
        for slot, each in self.rows.items():
            if pages := self._room(each, len(each.tokens) + each.planned):
                grows.append(Grow(slot, tuple(pages)))
        entries = []
        for slot, each in dict(joins).items():
            self._room(each, len(each.tokens))
            position = len(each.tokens) - 1
            out = len(each.output)
            entry = Join(
                slot, each.name, each.tokens[-1], position, tuple(each.pages), each.sampling, out, each.history
            )
            entries.append(entry)
            self.rows[slot] = each
        running = [self.rows[slot] for slot in sorted(set(self.rows) - set(sits))]
        for each in running:
            each.planned += 1
        decode = Decode(tuple(leaves), tuple(entries), tuple(grows), tuple(sits), tuple(masked), TokenArray.of(masks))
        return decode, running

    def submit(self, *, graph: bool = True, **delta) -> None:
        decode, running = self._decode(**delta)
        self._send(len(running), None, decode, running, graph=graph)

    def decode(self, *, graph: bool = True, **delta):
        self.submit(graph=graph, **delta)
        return self.take()


@torch.inference_mode()
def expected(model, tokens):
    return model(torch.tensor([tokens], device="cuda")).logits[0].float()


def prompt(seed, length):
    return torch.randint(3, 5000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def believable(model, stream):
    """Each token is the reference's best one after those before it, or as good within the stated error."""
    logits = expected(model, stream.tokens)[len(stream.prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(stream.output, device="cuda")[:, None])[:, 0]
    # An error of ERROR times the row's norm is spread over the row; no one logit is off by more than a few shares of it.
    slack = 6 * ERROR * logits.norm(dim=-1) / logits.shape[1] ** 0.5
    assert (logits.max(dim=-1).values - chosen <= slack).all()
    exact = (logits.argmax(dim=-1) == torch.tensor(stream.output, device="cuda")).float().mean()
    assert exact > 0.5 or len(stream.output) < FEW, exact
