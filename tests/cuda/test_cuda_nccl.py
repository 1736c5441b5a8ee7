"""NCCL groups of real processes: what they exchange, in graphs too, and how a rank that stays away is named."""

import functools
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from cuda_processes import Rank

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from engine_group_worker import values
from engine_net import run_ranks

from edgemesh.engine.collectives import Deadline
from edgemesh.engine.local import LocalBackend, LocalHub

SIZE = 2


def environment(rank):
    """On one card, ranks pass for ranks of several hosts: NCCL refuses two of one host on a card."""
    if torch.cuda.device_count() >= SIZE:
        return {}
    return {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo"}


def start(tmp_path, **more):
    cards = min(SIZE, torch.cuda.device_count())
    return [
        Rank("nccl", rank, SIZE, tmp_path / "store", rank % cards, **environment(rank), **more) for rank in range(SIZE)
    ]


@pytest.mark.parametrize("way", [{}, {"NCCL_P2P_DISABLE": "1"}], ids=["default", "no-p2p"])
def test_ranks_exchange_what_they_must_and_name_who_stays_away(tmp_path, way, record_testsuite_property):
    if way and torch.cuda.device_count() < SIZE:
        pytest.skip("needs two CUDA devices: ranks on one card reach each other through a socket")
    hub = LocalHub("world", SIZE)
    ends = [LocalBackend(hub, rank, Deadline()) for rank in range(SIZE)]
    expected = run_ranks([functools.partial(values, end, rank, SIZE) for rank, end in enumerate(ends)])
    ranks = start(tmp_path, **way)
    try:
        # Two parts are added alike in any order, so even the last bit is the same.
        assert [rank.line()["values"] for rank in ranks] == expected
        assert [rank.line()["graphed"] for rank in ranks] == [0.0, 0.0]
        record_testsuite_property("all_reduce_us", str(ranks[0].line()["us"]))
        ranks[1].line()
        said = ranks[0].line()
        assert said["missing"] == [1]
        assert "group 'world'" in said["error"]
        assert 0.9 <= said["took"] < 10
        assert ranks[0].line()["free_again"]
    finally:
        for rank in ranks:
            rank.close()
