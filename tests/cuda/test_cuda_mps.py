"""A daemon of the run's own, its clients, the vault outside, and nothing left at the end."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from edgemesh.actors.reaper import reap
from edgemesh.runtime.cards import card_environment, provide
from edgemesh.runtime.mps import CONTROL, Mps, command, running
from edgemesh.runtime.process import RUN_MARK
from edgemesh.topology import derive, parse

if shutil.which(CONTROL) is None:
    pytest.skip(f"needs {CONTROL}", allow_module_level=True)

TOPOLOGY = parse('[mesh]\ntp = 1\n[engine]\ndevice = "cuda"\n[prefill]\nsm_percent = 60\n[decode]\nsm_percent = 100\n')
CLIENT = "import torch,sys; torch.ones(9, device='cuda').sum().item(); p = torch.cuda.get_device_properties(0); print(p.multi_processor_count, p.uuid, flush=True); sys.stdin.read()"


class Client:
    def __init__(self, environment):
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.multiprocessors, self.uuid = self.process.stdout.readline().split()

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def marked(run_dir):
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                marks = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"{RUN_MARK}={run_dir}".encode() in marks:
                found.append((process / "comm").read_text().strip())
    return found


def test_planes_share_a_card_through_a_daemon_that_leaves_with_the_run(tmp_path):
    run_dir = tmp_path / "em-mps"
    run_dir.mkdir()
    environment = dict(os.environ) | {RUN_MARK: str(run_dir)}
    began = time.monotonic()
    mps = provide(TOPOLOGY, run_dir, environment)
    assert isinstance(mps, Mps), mps
    assert mps.ours
    assert time.monotonic() - began < 10
    mesh = derive(TOPOLOGY, str(run_dir))
    clients = []
    try:
        for name in ("rank-0.prefill", "rank-0.decode", "vault-0"):
            told = card_environment(TOPOLOGY, mesh.actor(name), mps, run_dir, environment)
            clients.append(Client(environment | told))
        assert len({client.uuid for client in clients}) == 1
        total = int(clients[2].multiprocessors)
        assert int(clients[0].multiprocessors) == int(clients[1].multiprocessors) == total
        server = command("get_server_list", mps.pipe, environment).split()
        assert len(server) == 1
        served = {int(pid) for pid in command(f"get_client_list {server[0]}", mps.pipe, environment).split()}
        assert served == {client.process.pid for client in clients[:2]}
        assert running(environment | {"CUDA_MPS_PIPE_DIRECTORY": str(mps.pipe)}) == mps.pipe
        assert sum(name.startswith("nvidia-cuda-mps") for name in marked(run_dir)) >= 2
    finally:
        reading, writing = os.pipe()
        os.close(writing)
        reap(reading, run_dir)
        os.close(reading)
        for client in clients:
            client.close()
    assert marked(run_dir) == []
    assert not run_dir.exists()
