"""How planes share cards: who is told what, when a mesh must not start, and a daemon's life with a stand-in for NVIDIA's tool."""

import os
import re
import shutil
from pathlib import Path

import pytest

from edgemesh.actors.reaper import reap
from edgemesh.actors.supervisor import sharing
from edgemesh.runtime.cards import COST, NOWHERE_DIR, MpsError, card_environment, provide, refuse, wanted
from edgemesh.runtime.mps import CONTROL, SERVER, Absent, Mps, command, driver_version, mismatched, running
from edgemesh.runtime.process import RUN_MARK
from edgemesh.topology import derive, parse

STAND_IN = """#!/bin/sh
# A daemon is a sleeper whose number is in its pipe directory; what it saw is beside it.
pipe="$CUDA_MPS_PIPE_DIRECTORY"
if [ "$1" = -d ]; then
    echo "$0: $BROKEN" >&2; [ -n "$BROKEN" ] && exit 3
    [ -n "$MUTE" ] && exit 0
    env >"$pipe/seen"
    "$(dirname "$0")/nvidia-cuda-mps-sleeper" 300 </dev/null >/dev/null 2>&1 &
    echo $! >"$pipe/control"
    exit 0
fi
[ -f "$pipe/control" ] || { echo "Cannot find MPS control daemon process"; exit 1; }
read -r words
case "$words" in
    quit*) kill "$(cat "$pipe/control")"; rm "$pipe/control"; echo "$words" >>"$SAID" ;;
    get_server_list) ;;
    *) echo "$words?" ;;
esac
"""


def topology(more="", split="true", tp=1):
    return parse(
        f'[mesh]\ntp = {tp}\nsplit = {split}\n[engine]\ndevice = "cuda"\n{more}\n'
        "[prefill]\nsm_percent = 70\n[decode]\nsm_percent = 90\n"
    )


@pytest.fixture
def run_dir(tmp_path):
    made = tmp_path / "em-run"
    made.mkdir()
    return made


@pytest.fixture
def environment(tmp_path, run_dir, monkeypatch):
    monkeypatch.setattr("edgemesh.runtime.mps.ANSWER_S", 60.0)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in (CONTROL, SERVER):
        (tools / name).write_text(STAND_IN)
        (tools / name).chmod(0o755)
    # The name by which the daemon's own processes are known; those are ended by a word, not killed.
    shutil.copy(shutil.which("sleep"), tools / "nvidia-cuda-mps-sleeper")
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    return {
        "PATH": f"{tools}:/usr/bin:/bin",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "11",
        "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "nobody"),
        RUN_MARK: str(run_dir),
    }


def end(run_dir):
    """What the reaper does once its supervisor is gone."""
    reading, writing = os.pipe()
    os.close(writing)
    try:
        reap(reading, run_dir)
    finally:
        os.close(reading)


def alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_only_two_planes_of_a_model_on_cards_want_a_daemon(run_dir):
    assert wanted(topology())
    assert not wanted(topology(split="false"))
    assert not wanted(topology('kind = "null"'))
    assert not wanted(parse("[mesh]\ntp = 2\n"))
    assert provide(topology(split="false"), run_dir, {"PATH": ""}) is None


def test_a_run_starts_a_daemon_of_its_own_and_takes_it_along(run_dir, environment, tmp_path, monkeypatch):
    mps = provide(topology(tp=2), run_dir, environment)
    assert mps == Mps(run_dir / "mps", ours=True)
    seen = dict(line.split("=", 1) for line in (run_dir / "mps" / "seen").read_text().splitlines() if "=" in line)
    assert seen["CUDA_MPS_LOG_DIRECTORY"] == str(run_dir / "mps-log")
    assert seen[RUN_MARK] == str(run_dir)
    assert not {"CUDA_VISIBLE_DEVICES", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"} & seen.keys()
    assert [note.event for note in sharing(mps)] == ["mps.found"]
    pid = int((run_dir / "mps" / "control").read_text())
    assert alive(pid)
    monkeypatch.setenv("PATH", environment["PATH"])
    end(run_dir)
    assert (tmp_path / "said").read_text() == "quit -t 1\n"
    assert not alive(pid)
    assert not run_dir.exists()


def test_a_daemon_of_the_same_user_is_joined_and_left_alone(run_dir, environment, tmp_path, monkeypatch):
    theirs = tmp_path / "nobody"
    theirs.mkdir()
    assert running(environment) is None
    (theirs / "control").write_text("1")
    assert provide(topology(tp=2), run_dir, environment) == Mps(theirs, ours=False)
    assert command("hello", theirs, environment) == "hello?\n"
    monkeypatch.setenv("PATH", environment["PATH"])
    end(run_dir)
    assert (theirs / "control").exists()
    assert not (tmp_path / "said").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"PATH": ""}, "is not on the PATH"),
        ({"BROKEN": "no such driver"}, "exited with code 3: .*no such driver"),
    ],
)
def test_what_keeps_a_daemon_from_starting_is_told(run_dir, environment, changes, reason):
    absent = provide(topology(), run_dir, environment | changes)
    assert isinstance(absent, Absent)
    assert re.search(reason, absent.reason)
    (note,) = sharing(absent)
    assert note.fields["cost"].endswith(COST)
    assert absent.reason in note.fields["cost"]


def test_a_daemon_that_does_not_answer_is_none(run_dir, environment, monkeypatch):
    monkeypatch.setattr("edgemesh.runtime.mps.ANSWER_S", 3.0)
    absent = provide(topology(), run_dir, environment | {"MUTE": "1"})
    assert "does not answer: it wrote no log" in absent.reason


@pytest.mark.parametrize(
    ("text", "driver", "reason"),
    [
        (b"\x00580.159.04\x00", "580.159.04", ""),
        (b"\x00570.86.15\x00", "580.159.04", "is of driver 570.86.15, and the kernel's is 580.159.04"),
        (b"1.2.3 and 127.0.0.100", "580.159.04", ""),
        (b"\x00570.86.15\x00", "", ""),
    ],
)
def test_a_server_of_another_driver_is_not_used(tmp_path, text, driver, reason):
    (tmp_path / SERVER).write_bytes(text)
    assert reason in (found := mismatched([tmp_path / SERVER], driver))
    assert bool(reason) == bool(found)


def test_the_kernel_says_its_drivers_version(tmp_path):
    assert driver_version(tmp_path / "none") == ""
    (tmp_path / "version").write_text("580.159.04\n")
    assert driver_version(tmp_path / "version") == "580.159.04"


def test_several_cards_need_a_daemon_unless_they_are_forced():
    absent = Absent("gone fishing")
    refuse(topology(), absent)
    with pytest.raises(MpsError, match=r"no MPS: gone fishing\..*mesh\.split = false.*engine\.mps = \"off\""):
        refuse(topology(tp=2), absent)
    with pytest.raises(MpsError, match=r'engine\.mps = "on", and there is no MPS: gone fishing'):
        refuse(topology('mps = "on"'), absent)


def test_planes_take_turns_where_it_is_asked_for(run_dir, environment):
    absent = provide(topology('mps = "off"', tp=2), run_dir, environment)
    assert absent == Absent('engine.mps = "off"')
    assert not (run_dir / "mps").exists()


def test_each_process_is_told_its_daemon_and_its_share(run_dir):
    chosen = topology()
    mesh = derive(chosen, str(run_dir))
    mps = Mps(run_dir / "mps", ours=True)

    def told(name, found=mps, **environment):
        return card_environment(chosen, mesh.actor(name), found, run_dir, environment)

    nowhere = str(run_dir / NOWHERE_DIR)
    assert told("rank-0.prefill") == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_MPS_PIPE_DIRECTORY": str(run_dir / "mps"),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100",
    }
    assert told("vault-0") == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_MPS_PIPE_DIRECTORY": nowhere}
    assert told("rank-0.decode", Absent("x"))["CUDA_MPS_PIPE_DIRECTORY"] == nowhere
    assert told("vault-0", CUDA_DEVICE_ORDER="FASTEST_FIRST")["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
    assert told("router-0") == {}
    assert card_environment(parse("[mesh]\ntp = 1\n"), mesh.actor("vault-0"), None, run_dir, {}) == {}
