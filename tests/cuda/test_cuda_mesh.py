"""Whole meshes on a card: split under MPS, by turns, within shares, and unified; each leaves nothing behind."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from cuda_mesh import Mesh, save_noise

from edgemesh.runtime.mps import CONTROL

WAYS = {
    "split": {"mesh__split": True},
    "shares": {"mesh__split": True, "prefill__sm_percent": 60, "decode__sm_percent": 100},
    "pace": {"mesh__split": True, "prefill__chunk_tokens": 64, "decode__pace_ms": 40},
    "turns": {"mesh__split": True, "engine__mps": "off"},
    "unified": {"mesh__split": False},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("noise") / "model"
    save_noise(path)
    return path


def names(mesh):
    return [(Path("/proc") / str(pid) / "comm").read_text().strip() for pid in mesh.pids()]


@pytest.mark.parametrize("way", WAYS)
def test_a_mesh_serves_from_a_card_and_leaves_nothing(model, tmp_path, way):
    free = torch.cuda.mem_get_info()[0]
    mesh = Mesh(tmp_path, model, **WAYS[way])
    try:
        daemon = any(name.startswith("nvidia-cuda-mps") for name in names(mesh))
        assert daemon == (way in {"split", "shares", "pace"} and shutil.which(CONTROL) is not None)
        prompts = [[1 + (7 * seed + at) % 990 for at in range(40 + 60 * seed)] for seed in range(12)]
        alone = mesh.complete(prompts[3], 24)
        assert mesh.complete(prompts[3], 24) == alone
        with ThreadPoolExecutor(12) as clients:
            texts = list(clients.map(lambda prompt: mesh.complete(prompt, 48), prompts))
        assert all(len(text.split()) == 48 for text in texts)
        assert len(set(texts)) > 6, "one text for every prompt"
        drawn = [mesh.complete(prompts[0], 16, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]
        mesh.process.kill()
        assert mesh.leftovers(10) == []
    finally:
        mesh.close()
    assert torch.cuda.mem_get_info()[0] > free - (256 << 20)
