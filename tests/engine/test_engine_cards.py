"""What surrounds cards and needs none: budgets, refusals, channels, bounded waits; and weights of noise."""

import json
import threading
import time

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemesh.engine.collectives import CollectiveError, Collectives, Deadline, Group
from edgemesh.engine.cuda import nccl
from edgemesh.engine.cuda.budget import Card, deal, numbers_of
from edgemesh.engine.cuda.devices import check_allocator, device_of, ranks_on
from edgemesh.engine.cuda.ipc import HANDLE_BYTES, DeviceRegion, opened
from edgemesh.engine.cuda.nccl import PREFILL_CHANNELS, CommunicatorError, NcclBackend, channels_of, settle, within
from edgemesh.engine.cuda.proof import ProductError, prove_products
from edgemesh.engine.layout import Run, Split, source_shapes, targets
from edgemesh.engine.memory import MemoryFault
from edgemesh.engine.shape import ModelError, parse_shape
from edgemesh.engine.untrained import SPREAD, Untrained
from edgemesh.engine.weights import DTYPES, fill
from edgemesh.topology import derive, parse
from edgemesh.topology.budget import overheads
from edgemesh.wire.ids import Plane
from edgemesh.wire.messages import Capacity, CardMemory, Grant

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
SHAPE = parse_shape(CONFIG, "bfloat16")
GIB = 1 << 30
CARD = Card(0, 140 * GIB, GIB)
WEIGHTS = 16 * GIB
PAGE = 36 * 2 * 256 * 8 * 128 * 2


def topology(more="", tp=1):
    return parse(f'[mesh]\ntp = {tp}\n[engine]\ndevice = "cuda"\n' + more)


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(30, 200),
    taken=st.integers(0, 3),
    fraction=st.floats(0.8, 1.0),
    other=st.integers(30, 200),
)
def test_a_cards_budget_adds_up_and_stays_within_its_share(total, taken, fraction, other):
    cards = [Card(0, total * GIB, taken * GIB), Card(1, other * GIB, 0)]
    chosen = topology(f"memory_fraction = {fraction}", tp=2)
    kv, budgets = deal(chosen, SHAPE, cards, 9 * GIB)
    page = PAGE // 2
    for card, each in zip(cards, budgets, strict=True):
        used = each.taken + each.weights + each.contexts + each.communicators + each.graphs + each.activations + each.kv
        assert used + each.spare == each.total == card.total
        assert used <= card.total * fraction
        assert each.kv == kv.pages * page
    # The tightest card has no room for one more page.
    assert any(each.total * fraction - (each.total - each.spare) < page for each in budgets)


def test_a_budget_says_where_the_memory_goes():
    kv, (budget,) = deal(topology("kv_pages = 1000"), SHAPE, [CARD], WEIGHTS)
    need = overheads(topology(), numbers_of(SHAPE))
    assert kv.pages == 1000
    assert kv.max_model_len == 40960
    assert str(budget) == (
        f"GPU 0, 140.0 GiB: weights 16.0, KV {1000 * PAGE / GIB:.1f}, contexts {1 + need.contexts / GIB:.1f}, "
        f"graphs {need.graphs / GIB:.1f}, activations {need.activations / GIB:.1f}, spare {budget.spare / GIB:.1f}"
    )


def test_pages_that_a_card_has_no_room_for_are_refused():
    with pytest.raises(ModelError, match=r"engine\.kv_pages = 9000 takes \d+ MiB more than there is: GPU 0"):
        deal(topology("kv_pages = 9000"), SHAPE, [CARD], WEIGHTS)
    with pytest.raises(ModelError, match="the KV cache holds 0 tokens"):
        deal(topology(), SHAPE, [Card(0, 17 * GIB, GIB)], WEIGHTS)


def test_a_rank_number_has_the_card_of_its_place_on_its_host():
    text = '[mesh]\ntp = 4\nhosts = ["10.0.0.1", "10.0.0.2"]\nkeys_dir = "/keys"\n[engine]\ndevice = "cuda"\n'
    mesh = derive(parse(text), "/run")
    assert [device_of(mesh, rank) for rank in range(4)] == [0, 1, 0, 1]
    assert ranks_on(mesh, 1) == [2, 3]


@pytest.mark.parametrize("key", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused(key):
    check_allocator({key: "expandable_segments:False,garbage_collection_threshold:0.6"})
    with pytest.raises(MemoryFault, match=f"unset {key}"):
        check_allocator({key: "garbage_collection_threshold:0.6, expandable_segments : True"})


def grant(**changes):
    card = {"device": 0, "uuid": "GPU-1", "torch": str(torch.__version__), "handles": (b"h" * HANDLE_BYTES,)}
    capacity = Capacity(
        pages=2,
        page_tokens=256,
        max_model_len=256,
        vocab_size=8,
        eos_token_ids=(),
        bos_token_id=None,
        weights_bytes=0,
        kv_bytes=0,
    )
    return Grant(0, 0, capacity, b"{}", (1 << 21,), (), CardMemory(**(card | changes)))


def test_a_grant_on_a_card_goes_over_the_wire():
    made = grant()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Grant) == made
    with pytest.raises(msgspec.ValidationError, match="length"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(grant(handles=(b"short",))), type=Grant)


@pytest.mark.parametrize(
    ("changes", "environment", "reason"),
    [
        ({"torch": "1.0"}, {}, "the vault runs torch 1.0 and this rank"),
        ({"handles": ()}, {}, "1 regions were granted, 0 handles came"),
        ({"device": 63}, {}, "memory of GPU 63, and this rank sees"),
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "cannot be shared between processes"),
    ],
)
def test_a_rank_opens_only_what_means_the_same_to_it(changes, environment, reason):
    with pytest.raises(MemoryFault, match=reason):
        opened(grant(**changes), environment)


def test_a_handle_of_another_size_is_refused():
    with pytest.raises(MemoryFault, match="a handle of 3 bytes"):
        DeviceRegion.open(b"abc", 1, 0)


@pytest.mark.parametrize(
    ("plane", "peers", "environment", "channels"),
    [
        (Plane.PREFILL, False, {}, PREFILL_CHANNELS),
        (Plane.PREFILL, True, {}, 0),
        (Plane.PREFILL, True, {"NCCL_P2P_DISABLE": "1"}, PREFILL_CHANNELS),
        (Plane.DECODE, False, {}, 0),
        (Plane.MIXED, False, {}, 0),
    ],
)
def test_prefill_leaves_the_link_to_decode_where_it_is_scarce(plane, peers, environment, channels):
    assert channels_of(plane, peers=peers, environment=environment) == channels


def test_work_that_hangs_is_given_up_with_the_remedy():
    release = threading.Event()
    began = time.monotonic()
    with pytest.raises(CommunicatorError, match=r"the group did not come up and add within 0 s.*NCCL_P2P_DISABLE=1"):
        within(0.05, "the group", release.wait)
    release.set()
    assert time.monotonic() - began < 60
    assert within(60, "the group", lambda: 7) == 7


def test_what_goes_wrong_in_the_work_is_told():
    def fails():
        raise OSError("no such interface")

    with pytest.raises(CommunicatorError, match=r"the group failed: no such interface.*NCCL_P2P_DISABLE=1"):
        within(60, "the group", fails)


class Never:
    def query(self):
        return False


class Gone(NcclBackend):
    """A backend whose peers do not come."""

    def __init__(self, name):
        self.name = name
        self.ended = 0

    def give_up(self):
        self.ended += 1
        return CommunicatorError(f"group {self.name}")


def test_a_wait_ends_at_its_deadline_and_ends_every_group():
    attn, world = Gone("attn"), Gone("world")
    deadline = Deadline(50_000_000)
    groups = Collectives(Group("attn", 0, 2, attn), Group("world", 0, 4, world), deadline)
    began = time.monotonic()
    with pytest.raises(CollectiveError, match="group world"):
        settle(Never(), groups)
    assert 0.04 < time.monotonic() - began < 60
    assert (attn.ended, world.ended) == (1, 1)


def test_a_build_without_nccl_says_so(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch._C._distributed_c10d", object())
    with pytest.raises(CommunicatorError, match="was built without NCCL"):
        nccl._process_group_class()


TINY = {
    "model_type": "qwen2",
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "vocab_size": 50,
}


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def sharded(checkpoint, split):
    tensors = {}
    for target in targets(checkpoint.shape, split):
        if not target.same_as:
            tensors[target.name] = torch.zeros(target.shape, dtype=DTYPES[checkpoint.shape.dtype])
            fill(checkpoint, [(target, tensors[target.name])], lambda _name, _nbytes: None)
    return tensors


def test_noise_is_the_same_however_it_is_sharded(tiny):
    whole = sharded(Untrained(tiny, "float32"), Split())
    parts = [sharded(Untrained(tiny, "float32"), Split(2, rank, 2, rank)) for rank in range(2)]
    down = torch.cat([part["layers.1.down"] for part in parts], dim=1)
    rows = 10
    assert torch.equal(down[:, :rows], whole["layers.1.down"][:, :rows])
    assert torch.equal(torch.cat([part["embed"] for part in parts])[:50], whole["embed"][:50])
    assert all(torch.equal(part["layers.0.input_norm"], whole["layers.0.input_norm"]) for part in parts)


def test_noise_is_small_and_norms_are_near_one(tiny):
    checkpoint = Untrained(tiny, "float32")
    for source, shape in source_shapes(checkpoint.shape).items():
        assert checkpoint.size(source) == shape
        drawn = checkpoint.read(Run(source, 0, 0, shape[0], 0))
        center = 1.0 if "norm" in source else 0.0
        assert 0 < (drawn - center).abs().max() <= SPREAD * 1.001
    with pytest.raises(ModelError, match="no tensor of that name"):
        checkpoint.read(Run("other", 0, 0, 1, 0))


def weights_of(shape):
    rows = {"layers.0.qkv": 48, "layers.0.gate_up": 80, "layers.0.down": 24, "lm_head": 200}
    return {name: torch.randn(count, shape, dtype=torch.bfloat16) for name, count in rows.items()}


def test_right_products_are_proven_and_wrong_ones_come_with_a_remedy(monkeypatch):
    weights = weights_of(32)
    prove_products(weights, 512)
    real = torch.mm

    def skipping(x, weight, out):
        """What was seen: some tiles are left as they were."""
        part = real(x, weight)
        out[:, : len(part[0]) - 8] = part[:, :-8]

    monkeypatch.setattr(torch, "mm", skipping)
    with pytest.raises(
        ProductError, match=r"1 rows times layers.0.qkv \[48, 32\] come out wrong: 8 of 48 elements"
    ) as told:
        prove_products(weights, 512)
    assert "Set prefill.sm_percent and decode.sm_percent to 100" in str(told.value)


def test_products_that_are_written_but_wrong_are_found(monkeypatch):
    monkeypatch.setattr(torch, "mm", lambda x, weight, out: out.copy_(x @ weight * 1.2))
    with pytest.raises(ProductError, match=r"0 of 48 elements are no number, relative error 0\.(2|19).*dmesg"):
        prove_products(weights_of(32), 512)
