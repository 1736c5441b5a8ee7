"""Ranks of one coupled set in processes of their own, over NCCL; on one card they pass for ranks of several hosts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from cuda_models import Stream, believable, save_model
from test_cuda_nccl import environment

SCRIPT = Path(__file__).parent / "cuda_set_rank.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("set")
    return path, save_model("qwen3", path)


def run(path, store, attn_tp, groups):
    cards = min(attn_tp * groups, torch.cuda.device_count())
    processes = []
    for rank in range(attn_tp * groups):
        arguments = (rank, attn_tp, groups, path, store, rank % cards)
        own = os.environ | {"OMP_NUM_THREADS": "1"} | environment(rank)
        processes.append(
            subprocess.Popen(
                [sys.executable, str(SCRIPT), *map(str, arguments)],
                env=own,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, complaint) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, complaint[-3000:]
    return [json.loads(output.strip().splitlines()[-1]) for output, _ in outputs]


@pytest.mark.parametrize(("attn_tp", "groups"), [(2, 1), (1, 2)], ids=["tp2", "attention-dp2"])
def test_a_set_of_two_ranks_draws_what_the_reference_draws(model, tmp_path, attn_tp, groups):
    path, reference = model
    answers = run(path, tmp_path / "store", attn_tp, groups)
    assert [answer["graphs"] for answer in answers] == [7, 7]
    assert attn_tp == 1 or answers[0] == answers[1]
    prompts = [300, 20, 70, 30]
    for tokens, length in zip(answers[0]["tokens"], prompts, strict=True):
        stream = Stream("any", tokens[:length])
        stream.tokens = tokens
        believable(reference, stream)
    assert [len(tokens) - length for tokens, length in zip(answers[0]["tokens"], prompts, strict=True)] == [
        10,
        5,
        10,
        6,
    ]
