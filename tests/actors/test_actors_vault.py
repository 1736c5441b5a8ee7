"""A real vault process: it loads, says so, and lends the very same memory to every process that asks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch

from edgemesh.engine.layout import Split
from edgemesh.engine.lease import LeaseRefused, lease
from edgemesh.engine.weights import shard_all
from edgemesh.runtime.paths import make_run_dir, read_mesh
from edgemesh.runtime.trace import ListTrace
from edgemesh.runtime.zmq import ZmqPort
from edgemesh.topology import parse
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.messages import Fault, Hello, Lease, Loading, Stop, VaultReady

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from engine_vault_models import save_tiny

TOML = """
[mesh]
tp = {tp}
dp = {dp}
split = {split}
[model]
path = {path}
dtype = "float32"
[engine]
kv_pages = {pages}
kind = "{kind}"
"""


PATIENCE_S = 180.0
"""How long to wait for what must come, however busy the machine is."""


class Run:
    """A vault's process, seen from its supervisor."""

    def __init__(self, run_dir, path, tp=4, dp=2, split=True, pages=9, kind="model"):
        text = TOML.format(tp=tp, dp=dp, split=str(split).lower(), path=json.dumps(str(path)), pages=pages, kind=kind)
        make_run_dir(run_dir, parse(text))
        self.run_dir = run_dir
        self.mesh = read_mesh(run_dir)
        self.port = ZmqPort(self.mesh, "supervisor-0", 0, ListTrace())
        command = [sys.executable, "-m", "edgemesh.actors.vault", "--run-dir", str(run_dir), "--name", "vault-0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
        self.seen = []

    def until(self, kind, timeout=PATIENCE_S):
        """The first report of this kind."""
        end = time.monotonic() + timeout
        while not (found := [message for message in self.seen if isinstance(message, kind)]):
            assert time.monotonic() < end, f"no {kind.__name__} among {self.seen}"
            self.seen += [message for _, message in self.port.receive(100)]
        return found[0]

    def lease(self, rank, plane, epoch=0):
        actor = f"rank-{rank}.{plane}"
        return lease(self.run_dir / "sock" / "vault", Lease(actor, epoch, rank, plane), PATIENCE_S)

    def events(self, name):
        # What follows the last end of a line is being written now.
        lines = (self.run_dir / "trace" / "vault-0.jsonl").read_bytes().rpartition(b"\n")[0].splitlines()
        return [event for line in lines if (event := msgspec.json.decode(line))["event"] == name]

    def stop(self):
        self.port.send(LinkKind.COMMAND, Stop("the test is over"), "vault-0")
        return self.process.wait(PATIENCE_S)

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self.process.stderr.close()
        self.port.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_tiny("llama", path)
    return path


@pytest.fixture(scope="module")
def vault(model, tmp_path_factory):
    """Attention DP over four ranks: two groups of two, each MLP over all four; split."""
    run = Run(tmp_path_factory.mktemp("v") / "run", model)
    try:
        run.until(VaultReady)
        yield run
    finally:
        run.close()


def test_a_vault_says_what_it_does_and_what_it_has(vault):
    ready = vault.until(VaultReady)
    assert isinstance(vault.until(Hello), Hello)
    assert vault.until(Loading).actor == "vault-0"
    capacity = ready.capacity
    assert (capacity.pages, capacity.page_tokens, capacity.vocab_size) == (9, 16, 101)
    assert capacity.max_model_len == 128
    assert capacity.eos_token_ids == (2,)
    assert capacity.bos_token_id == 1
    assert capacity.kv_bytes == 4 * (2 * 2 * 9 * 16 * 2 * 4 * 4)


@pytest.mark.parametrize("rank", range(4))
def test_each_rank_gets_its_part_of_the_weights(vault, model, rank):
    leased = vault.lease(rank, "decode")
    part = vault.mesh.split_of(rank)
    expected = shard_all(model, Split(part.attn_tp, part.attn_rank, part.mlp_tp, part.mlp_rank))
    assert leased.tensors.keys() == expected.keys() | {"kv", "coll"}
    for name, tensor in expected.items():
        assert torch.equal(leased.tensors[name], tensor), name
    assert leased.tensors["kv"].shape == (2, 2, 9, 16, 2, 4)
    assert leased.shape.heads == 9


def inodes(pattern):
    """The memfds that this process maps, by their name."""
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        if pattern in line:
            parts = line.split()
            found.setdefault(parts[5], set()).add(parts[4])
    return found


def test_equal_shards_are_one_memory(vault):
    leases = [vault.lease(rank, plane) for rank in range(4) for plane in ("prefill", "decode")]
    mapped = inodes("edgemesh-")
    assert {name.removeprefix("/memfd:edgemesh-"): len(nodes) for name, nodes in mapped.items()} == {
        "common-0": 1,
        "attn-0": 1,
        "attn-1": 1,
        **{f"mlp-{rank}": 1 for rank in range(4)},
        **{f"kv-{rank}": 1 for rank in range(4)},
        "coll-0-prefill": 1,
        "coll-0-decode": 1,
    }
    del leases


def test_both_planes_share_the_kv_cache_and_ranks_do_not(vault):
    prefill, decode, other = vault.lease(2, "prefill"), vault.lease(2, "decode"), vault.lease(3, "decode")
    prefill.tensors["kv"][1, 0, 3].fill_(42)
    assert (decode.tensors["kv"][1, 0, 3] == 42).all()
    assert not other.tensors["kv"].any()
    prefill.tensors["kv"].zero_()


def test_memory_survives_a_rank_and_is_lent_again(vault):
    code = f"""
import os, sys
from edgemesh.engine.lease import lease
from edgemesh.wire.messages import Lease
leased = lease({str(vault.run_dir / "sock" / "vault")!r}, Lease("rank-1.decode", 0, 1, "decode"), {PATIENCE_S})
leased.tensors["kv"][0, 1, 5].fill_(7)
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert (vault.lease(1, "decode").tensors["kv"][0, 1, 5] == 7).all()


@pytest.mark.parametrize(
    ("actor", "rank", "plane"),
    [
        ("rank-9.decode", 9, "decode"),
        ("rank-1.decode", 2, "decode"),
        ("rank-1.decode", 1, "prefill"),
        ("group-0", 0, "decode"),
    ],
)
def test_who_is_no_rank_of_this_host_gets_nothing(vault, actor, rank, plane):
    with pytest.raises(LeaseRefused):
        lease(vault.run_dir / "sock" / "vault", Lease(actor, 0, rank, plane), PATIENCE_S)
    assert vault.lease(0, "decode").tensors


def test_each_epoch_has_fresh_memory_for_collectives_and_fences_the_past(model, tmp_path):
    run = Run(tmp_path / "run", model)
    try:
        run.until(VaultReady)
        old = run.lease(0, "decode", epoch=0)
        old.tensors["coll"].fill_(9)
        old.tensors["kv"][0, 0, 1].fill_(3)
        new = run.lease(0, "decode", epoch=1)
        assert not new.tensors["coll"].any()
        assert (new.tensors["kv"][0, 0, 1] == 3).all()
        with pytest.raises(LeaseRefused):
            run.lease(1, "decode", epoch=0)
        assert run.stop() == 0
        assert [event["step"] for event in run.events("load.step")] == [
            "opening the model",
            "reading weights",
            "KV memory",
        ]
        assert "epoch 1 has begun" in run.events("link.refused")[0]["error"]
    finally:
        run.close()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "model.safetensors").unlink(), "holds no .safetensors"),
        (lambda path: os.truncate(path / "model.safetensors", 1000), "model.safetensors"),
        (lambda path: (path / "config.json").write_text("{"), "config.json: is not JSON"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_a_fault_with_its_reason(damage, words, tmp_path):
    model = tmp_path / "model"
    save_tiny("qwen3", model)
    damage(model)
    run = Run(tmp_path / "run", model, tp=1, dp=1)
    try:
        assert words in run.until(Fault).reason
        assert run.process.wait(PATIENCE_S) != 0
    finally:
        run.close()


def test_a_null_engine_needs_no_weights(model, tmp_path):
    lean = tmp_path / "lean"
    lean.mkdir()
    (lean / "config.json").write_bytes((model / "config.json").read_bytes())
    run = Run(tmp_path / "run", lean, tp=1, dp=1, split=False, kind="null")
    try:
        assert run.until(VaultReady).capacity.pages == 9
        assert run.lease(0, "mixed").tensors == {}
    finally:
        run.close()
