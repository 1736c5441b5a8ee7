"""A real vault process on a card: every rank maps its one copy, and finds it whole after others have died."""

import json
import signal
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from cuda_processes import Rank

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
sys.path.insert(0, str(Path(__file__).parents[1] / "actors"))

from engine_vault_models import save_tiny
from test_actors_vault import Run

from edgemesh.engine.layout import Split
from edgemesh.engine.weights import shard_all
from edgemesh.topology import parse
from edgemesh.wire.messages import Fault, VaultReady

TOML = """
[mesh]
tp = 1
[model]
path = {path}
dtype = "bfloat16"
weights = "{weights}"
max_model_len = {longest}
[engine]
device = "cuda"
kv_pages = {pages}
memory_fraction = {fraction}
"""
BIG = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 8192,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}


def start(tmp_path, monkeypatch, path, weights="file", pages=9, longest=0, fraction=0.9):
    text = TOML.format(path=json.dumps(str(path)), weights=weights, pages=pages, longest=longest, fraction=fraction)
    monkeypatch.setattr("test_actors_vault.parse", lambda _: parse(text))
    return Run(tmp_path / "run", path)


@pytest.fixture
def ranks():
    held = []
    yield held
    for rank in held:
        rank.close()


def test_both_planes_map_the_one_copy_and_it_outlives_them(tmp_path, monkeypatch, ranks):
    model = tmp_path / "model"
    save_tiny("llama", model)
    vault = start(tmp_path, monkeypatch, model)
    try:
        ready = vault.until(VaultReady, 120)
        assert ready.budget.startswith("GPU 0, ")
        assert "KV" in ready.budget
        expected = shard_all(model, Split(), "bfloat16")
        for plane, found, filled in (("prefill", 0.0, 3.0), ("decode", 3.0, 5.0), ("prefill", 5.0, 7.0)):
            ranks.append(Rank("lease", tmp_path / "run", plane, filled))
            said = ranks[-1].line()
            assert said["found"] == found
            assert said["sums"] == {name: float(each.sum(dtype=torch.float64)) for name, each in expected.items()}
            assert ranks[-1].line() == {"filled": filled}
            if plane == "decode":
                ranks[0].process.send_signal(signal.SIGKILL)
                ranks[0].process.wait()
    finally:
        vault.close()


def test_a_card_holds_random_weights_once_and_its_budget_adds_up(tmp_path, monkeypatch, ranks):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(BIG))
    before = torch.cuda.mem_get_info()[0]
    vault = start(tmp_path, monkeypatch, model, "random", pages=0, fraction=0.5)
    try:
        ready = vault.until(VaultReady, 120)
        capacity = ready.capacity
        free, total = torch.cuda.mem_get_info()
        assert capacity.weights_bytes > 2 << 30
        taken = before - free
        assert 0 <= taken - capacity.weights_bytes - capacity.kv_bytes < 1 << 30
        assert total - free < total * 0.5
        for plane in ("prefill", "decode"):
            ranks.append(Rank("lease", tmp_path / "run", plane, 1.0))
            said = ranks[-1].line()
            assert said["sums"]["layers.0.input_norm"] == pytest.approx(2048, abs=8)
            assert 0 < abs(said["sums"]["layers.0.qkv"]) < 100
        assert free - said["free"] < 2 << 30, "two ranks took more than their contexts"
    finally:
        vault.close()


def test_a_vault_refuses_what_cannot_be_shared_or_held(tmp_path, monkeypatch):
    model = tmp_path / "model"
    save_tiny("llama", model)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    vault = start(tmp_path, monkeypatch, model)
    try:
        assert "unset PYTORCH_CUDA_ALLOC_CONF" in vault.until(Fault, 120).reason
    finally:
        vault.close()
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    (tmp_path / "run").rename(tmp_path / "first")
    vault = start(tmp_path, monkeypatch, model, pages=1 << 24)
    try:
        assert "than there is: GPU 0" in vault.until(Fault, 120).reason
    finally:
        vault.close()
