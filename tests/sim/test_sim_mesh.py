"""Whole meshes of real groups, barriers and router under random troubles; ``EDGEMESH_SIM_SEED=n`` replays one run."""

import os

import pytest
from simulation import Simulation
from worlds import drawn

SEEDS = [int(os.environ["EDGEMESH_SIM_SEED"])] if "EDGEMESH_SIM_SEED" in os.environ else range(80)
MORE = range(1000, 1000 + int(os.environ.get("EDGEMESH_SIM_RUNS", "600")))


@pytest.mark.parametrize("shard", range(8))
def test_any_mesh_serves_every_stream_right_and_leaves_nothing_behind(shard):
    for seed in SEEDS[shard::8]:
        Simulation(seed, drawn(seed)).play()


@pytest.mark.full
def test_many_more_meshes():
    for seed in MORE:
        Simulation(seed, drawn(seed)).play()


@pytest.mark.parametrize("groups", range(1, 17))
def test_every_number_of_groups(groups):
    Simulation(groups, drawn(groups, groups)).play()
