"""The doctor reads what real tools print, and tells what is wrong and what to do."""

import resource
import stat

import pytest
import typer
from typer.testing import CliRunner

from edgemesh.cli import doctor_gpu, doctor_machine
from edgemesh.cli.doctor import doctor, model_finding
from edgemesh.cli.doctor_gpu import (
    Wiring,
    allocator_finding,
    card_findings,
    gpu_findings,
    mps_finding,
    parse_gpus,
    parse_matrix,
    peer_finding,
    wiring_findings,
)
from edgemesh.cli.doctor_machine import Verdict, descriptors, machine_findings
from edgemesh.topology import parse

H200 = "0, NVIDIA H200, 580.159.04, 143771, 143156, 9.0, Default, Disabled, 5, 16, 16\n"
RTX = "".join(
    f"{at}, NVIDIA GeForce RTX 4090, 550.90.07, 24564, 24110, 8.9, Default, [N/A], 4, 16, 16\n" for at in range(4)
)
ONE_CARD = (
    " \t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\nGPU0\t X \t0-15\t0\t\tN/A\n\n"
    "Legend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
)
FOUR_CARDS = """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tPHB\tSYS\tSYS\tNODE\t0-15,32-47\t0\t\tN/A
GPU1\tPHB\t X \tSYS\tSYS\tNODE\t0-15,32-47\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tPHB\tSYS\t16-31,48-63\t1\t\tN/A
GPU3\tSYS\tSYS\tPHB\t X \tSYS\t16-31,48-63\t1\t\tN/A
NIC0\tNODE\tNODE\tSYS\tSYS\t X \t\t\t\t

Legend:
  X    = Self
"""
PEERS = """ \t\x1b[4mGPU0\tGPU1\t\x1b[0m
 GPU0\tX\t{0}\t
 GPU1\t{0}\tX\t

Legend:
  OK   = Status Ok
"""


def verdicts(findings):
    return {finding.what: finding.verdict for finding in findings}


def test_cards_are_read_as_nvidia_smi_prints_them():
    (card,) = parse_gpus(H200)
    assert (card.index, card.name, card.driver) == (0, "NVIDIA H200", "580.159.04")
    assert (card.memory_total, card.memory_free, card.compute) == (143771, 143156, 9.0)
    assert [card.index for card in parse_gpus(RTX)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "text", ["", "No devices were found\n", "NVIDIA-SMI has failed because it couldn't communicate", "a,b,c"]
)
def test_a_tool_that_fails_names_no_cards(text):
    assert parse_gpus(text) == []


def test_fields_that_a_card_does_not_know_are_zero():
    (card,) = parse_gpus("0, Old, 470.1, [N/A], [Unknown Error], [N/A], Default, [N/A], [N/A], [N/A], [N/A]")
    assert (card.memory_total, card.compute, card.pcie_width) == (0, 0.0, 0)


def test_wiring_is_read_as_nvidia_smi_prints_it():
    assert parse_matrix(ONE_CARD) == Wiring({}, {0: "0"})
    wiring = parse_matrix(FOUR_CARDS)
    assert wiring.numa == {0: "0", 1: "0", 2: "1", 3: "1"}
    assert len(wiring.links) == 12
    assert (wiring.links[0, 1], wiring.links[1, 3]) == ("PHB", "SYS")
    assert parse_matrix("nonsense\n\tGPUx\n") == Wiring({}, {})


def test_a_group_across_sockets_is_warned_about():
    wiring = parse_matrix(FOUR_CARDS)
    assert verdicts(wiring_findings(wiring, 2)) == {"wiring": Verdict.OK, "NUMA": Verdict.OK}
    assert verdicts(wiring_findings(wiring, 4))["NUMA"] is Verdict.WARN


@pytest.mark.parametrize(("cell", "verdict"), [("OK", Verdict.OK), ("CNS", Verdict.NOTE), ("NS", Verdict.NOTE)])
def test_peer_access_is_read(cell, verdict):
    wiring = parse_matrix(PEERS.format(cell))
    assert wiring.links == {(0, 1): cell, (1, 0): cell}
    assert peer_finding(wiring).verdict is verdict


@pytest.mark.parametrize(
    ("old", "new", "what", "verdict"),
    [
        ("550.90.07", "470.82.01", "driver", Verdict.FAIL),
        ("24110", "12000", "GPU 1", Verdict.WARN),
        ("8.9", "7.5", "GPU 1", Verdict.FAIL),
        ("Default", "Exclusive_Process", "GPU 1", Verdict.FAIL),
        ("[N/A]", "Enabled", "GPU 1", Verdict.WARN),
        ("16, 16", "16, 4", "GPU 1", Verdict.WARN),
    ],
)
def test_what_is_wrong_with_a_card_is_said_with_a_remedy(old, new, what, verdict):
    good, bad = parse_gpus(RTX), parse_gpus(RTX.replace(old, new))
    assert verdicts(card_findings(good, 4)) == {"GPUs": Verdict.OK, "driver": Verdict.OK}
    findings = [finding for finding in card_findings(bad, 4) if finding.what == what]
    assert [finding.verdict for finding in findings] == [verdict]
    assert findings[0].remedy


def test_too_few_cards_fail():
    assert verdicts(card_findings(parse_gpus(RTX), 8))["GPUs"] is Verdict.FAIL


def test_expandable_segments_fail():
    assert allocator_finding({}).verdict is Verdict.OK
    assert allocator_finding({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}).verdict is Verdict.OK
    bad = allocator_finding({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments: True"})
    assert bad.verdict is Verdict.FAIL
    assert "unset PYTORCH_CUDA_ALLOC_CONF" in bad.remedy


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A directory of programs that stand in for the driver's, alone on the path."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def tool(name, body):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    return tool


CUDA = '[mesh]\ntp = 4\ndp = 2\n[engine]\ndevice = "cuda"\n'


def test_without_a_driver_only_a_cuda_topology_fails(tools):
    assert verdicts(gpu_findings(parse(CUDA))) == {"GPUs": Verdict.FAIL}
    assert verdicts(gpu_findings(parse(""))) == {"GPUs": Verdict.NOTE}


def test_a_machine_with_cards_is_looked_through(tools, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "mps"))
    (tmp_path / "gpus").write_text(RTX)
    (tmp_path / "topo").write_text(FOUR_CARDS)
    tools("nvidia-smi", f'case "$1" in --query*) /bin/cat {tmp_path}/gpus ;; *) /bin/cat {tmp_path}/topo ;; esac')
    found = verdicts(gpu_findings(parse(CUDA)))
    assert found["GPUs"] is found["driver"] is found["wiring"] is found["NUMA"] is Verdict.OK
    assert found["MPS"] is Verdict.FAIL  # split over several cards, and it is not installed
    assert 'engine.mps = "off"' in mps_finding(parse(CUDA)).remedy
    alone = mps_finding(parse('[engine]\ndevice = "cuda"\n'))
    assert alone.verdict is Verdict.WARN
    assert "take turns" in alone.found
    tools("nvidia-cuda-mps-control", "")
    tools("nvidia-cuda-mps-server", "")
    assert mps_finding(parse(CUDA)).verdict is Verdict.OK
    (tmp_path / "mps").mkdir()
    (tmp_path / "mps" / "control").touch()
    assert mps_finding(parse(CUDA)).verdict is Verdict.NOTE


def test_a_driver_tool_that_fails_or_hangs_is_quoted(tools, monkeypatch):
    tools("nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    (finding,) = gpu_findings(parse(CUDA))
    assert finding.verdict is Verdict.FAIL
    assert finding.found == "NVIDIA-SMI has failed"
    monkeypatch.setattr(doctor_gpu, "TOOL_S", 0.2)
    tools("nvidia-smi", "exec /bin/sleep 30")
    (finding,) = gpu_findings(parse(CUDA))
    assert "did not answer within" in finding.found


def test_limits_of_open_files():
    assert descriptors(1024, 524288).verdict is Verdict.OK
    assert descriptors(1024, resource.RLIM_INFINITY).verdict is Verdict.OK
    assert descriptors(1024, 1024).verdict is Verdict.WARN


def test_every_line_but_good_ones_has_a_remedy(monkeypatch):
    monkeypatch.setattr(doctor_machine, "_meminfo", lambda _: 1 << 20)
    findings = list(machine_findings(parse("[mesh]\ntp = 64")))
    assert verdicts(findings)["memory"] is Verdict.FAIL
    assert verdicts(findings)["cores"] is Verdict.WARN
    assert all(finding.remedy for finding in findings if finding.verdict in {Verdict.WARN, Verdict.FAIL})


def test_a_missing_model_fails_unless_start_pulls_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_finding(parse("")).verdict is Verdict.NOTE
    assert model_finding(parse('[model]\npath = "/no/such"')).verdict is Verdict.FAIL


def test_the_command_prints_a_table_and_fails_if_the_mesh_would(tools, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    app = typer.Typer()
    app.command()(doctor)
    done = CliRunner().invoke(app, ["--topology", "demo", "--set", "gateway.port=0"])
    assert "shared memory" in done.stdout
    assert "verdict" in done.stdout
    done = CliRunner().invoke(app, ["--set", "trace.dir=/dev/null/none", "--set", "gateway.port=0"])
    assert done.exit_code == 1
    assert "trace.dir" in done.stdout
    done = CliRunner().invoke(app, ["--topology", "no-such-topology"])
    assert done.exit_code == 2
    assert "error:" in done.stderr
