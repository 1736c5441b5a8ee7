"""What /proc says of a process that is known: this one, a busy one, a stopped one, one that is gone."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from edgemesh.bench import children, processes

SPIN = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint(flush=True)\ninput()"


@pytest.fixture
def busy():
    environment = os.environ | {"EDGEMESH_TEST_MARK": "blue = green"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", SPIN], env=environment, **pipes)
    yield process
    process.kill()
    process.communicate()


def test_processor_time_and_memory_are_those_that_psutil_sees(busy):
    busy.stdout.readline()
    times = psutil.Process(busy.pid).cpu_times()
    assert processes.cpu_ns(busy.pid) / 1e9 == pytest.approx(times.user + times.system, abs=0.05)
    assert processes.cpu_ns(busy.pid) >= 290_000_000
    memory = processes.memory_of(busy.pid)
    assert memory.rss == pytest.approx(psutil.Process(busy.pid).memory_info().rss, rel=0.2)
    assert 0 < memory.pss <= memory.rss


def test_a_process_is_found_by_its_mark_until_it_ends(busy):
    assert processes.marked("EDGEMESH_TEST_MARK", "blue = green") == [busy.pid]
    assert processes.words_of(busy.pid)[1] == "-c"
    os.kill(busy.pid, signal.SIGSTOP)
    due = time.monotonic() + 60
    while processes.state_of(busy.pid) != "T":
        assert time.monotonic() < due
    os.kill(busy.pid, signal.SIGKILL)
    while processes.marked("EDGEMESH_TEST_MARK", "blue = green"):
        assert time.monotonic() < due
    busy.wait()
    assert (processes.state_of(busy.pid), processes.cpu_ns(busy.pid), processes.words_of(busy.pid)) == ("", 0, [])


def test_children_hand_back_their_samples_and_their_faults(tmp_path):
    endpoint = f"ipc://{tmp_path}/s"
    groups = [["edgemesh.bench.sockets", "arrive", endpoint, str(group), "20"] for group in range(3)]
    samples = children.run(groups, [["edgemesh.bench.sockets", "serve", endpoint, "3"]], deadline_s=120)
    assert [len(each) for each in samples] == [20, 20, 20]
    assert all(sample > 0 for each in samples for sample in each)
    with pytest.raises(children.ChildError, match="serve ENDPOINT"):
        children.run([["edgemesh.bench.sockets", "nonsense"]], deadline_s=120)
    with pytest.raises(children.ChildError, match="did not end in time"):
        children.run([["edgemesh.bench.sockets", "arrive", endpoint, "0", "5"]], deadline_s=1)
