"""What only sockets have: bounds, absent peers, identities, large frames, keys."""

import contextlib
import itertools
import os
import shutil
import socket
import time
from pathlib import Path

import msgspec
import pytest
import zmq.auth

from edgemesh.runtime.link import LinkError, LinkFull, LinkRefused, PeerAbsent
from edgemesh.runtime.trace import ListTrace
from edgemesh.runtime.zmq import BATCH, BATCH_BYTES, ZmqPort
from edgemesh.topology import derive, parse
from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.catalogue import LinkKind
from edgemesh.wire.ids import Layout, Plane
from edgemesh.wire.messages import (
    Attached,
    Cancel,
    Hello,
    IdlePlan,
    Lease,
    LoadReport,
    Place,
    Progress,
    Sampling,
    Stop,
    Submit,
    Verdict,
)

PLAN = IdlePlan(0, Plane.MIXED, 0, 0, Verdict((0, 0), Layout.EVEN, 0))


def submit(tokens: int = 3) -> Submit:
    return Submit("r", 0, 0, TokenArray.of(range(tokens)), Sampling(), 5)


def receive_all(port: ZmqPort, count: int) -> list[object]:
    messages: list[object] = []
    deadline = time.monotonic() + 60
    while len(messages) < count:
        assert time.monotonic() < deadline, f"{len(messages)} of {count}"
        messages += [message for _, message in port.receive(1000)]
    return messages


def send_until_refused(group: ZmqPort) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        group.send(LinkKind.PLAN, PLAN, "rank-0.mixed")
        group.receive(5)


def test_a_full_link_is_an_error_and_loses_nothing(port_of):
    router = port_of("router-0", hwm=4)
    place = Place(0, submit(100_000))
    sent = 0
    with pytest.raises(LinkFull, match="group-0 is behind"):  # noqa: PT012 - the loop counts
        while sent < 1000:
            router.send(LinkKind.PLACE, place, "group-0")
            sent += 1
    assert sent >= 4
    group = port_of("group-0", hwm=4)
    assert len(receive_all(group, sent)) == sent


def test_a_peer_that_never_spoke_or_is_gone_is_absent(port_of):
    group, rank = port_of("group-0"), port_of("rank-0.mixed")
    with pytest.raises(PeerAbsent, match="has not connected"):
        group.send(LinkKind.PLAN, PLAN, "rank-0.mixed")
    rank.send(LinkKind.RESULT, Attached(0, Plane.MIXED, 0, 0), "group-0")
    receive_all(group, 1)
    group.send(LinkKind.PLAN, PLAN, "rank-0.mixed")
    assert receive_all(rank, 1) == [PLAN]
    rank.close()
    with pytest.raises(PeerAbsent, match="is gone"):
        send_until_refused(group)


def test_a_newer_epoch_of_a_peer_takes_over_and_an_older_one_does_not(port_of):
    supervisor, old, new = port_of("supervisor-0"), port_of("group-0", 0), port_of("group-0", 3)
    for port in (new, old):
        port.send(LinkKind.REPORT, Hello("group-0", port.epoch, 1), "supervisor-0")
        receive_all(supervisor, 1)
    supervisor.send(LinkKind.COMMAND, Stop("for the newer"), "group-0")
    assert receive_all(new, 1) == [Stop("for the newer")]
    assert old.receive(0) == []


def test_a_second_socket_of_an_actor_reports_and_is_sent_nothing(port_of):
    supervisor, main = port_of("supervisor-0"), port_of("group-0")
    thread = port_of("group-0", only=LinkKind.REPORT, alias=":progress", context=main.context)
    thread.send(LinkKind.REPORT, Progress("group-0", 0, ()), "supervisor-0")
    receive_all(supervisor, 1)
    with pytest.raises(PeerAbsent):
        supervisor.send(LinkKind.COMMAND, Stop(""), "group-0")
    main.send(LinkKind.REPORT, Hello("group-0", 0, 1), "supervisor-0")
    receive_all(supervisor, 1)
    supervisor.send(LinkKind.COMMAND, Stop(""), "group-0")
    assert receive_all(main, 1) == [Stop("")]
    with pytest.raises(LinkRefused):
        thread.send(LinkKind.EMIT, PLAN, "gateway-0")


def test_large_arrays_arrive_whole(port_of):
    router, group = port_of("router-0"), port_of("group-1")
    place = Place(1, submit(300_000))
    router.send(LinkKind.PLACE, place, "group-1")
    assert receive_all(group, 1) == [place]


def test_a_batch_is_bounded_and_the_rest_stays(port_of):
    group, gateway = port_of("group-0"), port_of("gateway-0")
    for _ in range(2 * BATCH):
        gateway.send(LinkKind.STEER, Cancel(0, "r", 0), "group-0")
    batches = []
    while sum(batches) < 2 * BATCH:
        batches.append(len(group.receive(5000)))
    assert max(batches) <= BATCH


def test_a_batch_of_large_messages_ends_early(port_of):
    router, group = port_of("router-0"), port_of("group-1")
    large = Submit("r", 0, 0, TokenArray.of(range(3)), Sampling(), 5, grammar="x" * (BATCH_BYTES // 8))
    for _ in range(32):
        router.send(LinkKind.PLACE, Place(1, large), "group-1")
    batches = []
    while sum(batches) < 32:
        batches.append(len(group.receive(5000)))
    assert max(batches) <= 9


def test_leases_pass_descriptors_so_they_go_elsewhere(port_of):
    rank = port_of("rank-0.mixed")
    with pytest.raises(LinkRefused):
        rank.send(LinkKind.LEASE, Lease("rank-0.mixed", 0, 0, Plane.MIXED), "vault-0")


def test_a_wait_ends_for_another_descriptor(port_of):
    port = port_of("group-0")
    reading, writing = socket.socketpair()
    with reading, writing:
        writing.send(b"x")
        began = time.monotonic()
        assert port.receive(120_000, also=reading.fileno()) == []
        assert time.monotonic() - began < 60


# --- between hosts -----------------------------------------------------------------------------------


def free_ports(count: int = 32) -> int:
    """The first of so many ports in a row that are free now, below those that the kernel gives to whoever asks for any."""
    for first in range(20_000 + os.getpid() % 100 * count, 32_000, count):
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for host, port in itertools.product(("127.0.0.1", "127.0.0.2"), range(first, first + count)):
                probes.enter_context(socket.socket()).bind((host, port))
            return first
    raise AssertionError("no ports are free")


@pytest.fixture
def two_hosts(run_dir: Path):
    """A mesh of two hosts (two loopback addresses), as seen with some directory of keys."""
    (run_dir / "sock").mkdir(parents=True)
    text = "[mesh]\ntp = 2\ndp = 2\nattn_tp = 1\nsplit = false\nhosts = ['127.0.0.1', '127.0.0.2']\n"
    port = free_ports()
    ports: list[ZmqPort] = []

    def open_port(name: str, keys: Path | None) -> ZmqPort:
        override = [f"mesh.base_port={port}", f"mesh.keys_dir={keys or 'unused'}"]
        mesh = derive(parse(text, override), str(run_dir))
        if keys is None:
            # The topology's own check would not let it come to this.
            shape = msgspec.structs.replace(mesh.topology.mesh, keys_dir="")
            mesh = msgspec.structs.replace(mesh, topology=msgspec.structs.replace(mesh.topology, mesh=shape))
        ports.append(ZmqPort(mesh, name, 0, ListTrace()))
        return ports[-1]

    yield open_port
    for each in ports:
        each.close()


REPORT = LoadReport(1, 0, 0, 0, 0, 0, 0, 0, 0)


def make_keys(directory, hosts):
    directory.mkdir(mode=0o700)
    for host in range(hosts):
        zmq.auth.create_certificates(directory, f"host-{host}")
    for path in directory.glob("host-*.key*"):
        path.chmod(0o600)


def test_links_between_hosts_work_with_the_right_keys(two_hosts, run_dir):
    keys = run_dir / "keys"
    make_keys(keys, 2)
    router, group = two_hosts("router-0", keys), two_hosts("group-1", keys)
    group.send(LinkKind.LOAD, REPORT, "router-0")
    assert receive_all(router, 1) == [REPORT]
    router.send(LinkKind.PLACE, Place(1, submit()), "group-1")
    assert receive_all(group, 1) == [Place(1, submit())]


def test_a_host_with_a_key_of_its_own_making_gets_nothing_across(two_hosts, run_dir):
    keys, others = run_dir / "keys", run_dir / "others"
    make_keys(keys, 2)
    make_keys(others, 2)
    # It knows the right server, and has a valid pair that nobody was told of.
    shutil.copy(keys / "host-0.key", others / "host-0.key")
    router, group = two_hosts("router-0", keys), two_hosts("group-1", others)
    group.send(LinkKind.LOAD, REPORT, "router-0")
    assert router.receive(700) == []


def test_a_host_that_takes_another_for_the_server_gets_nothing_across(two_hosts, run_dir):
    keys, others = run_dir / "keys", run_dir / "others"
    make_keys(keys, 2)
    shutil.copytree(keys, others)
    shutil.copy(others / "host-1.key", others / "host-0.key")
    router, group = two_hosts("router-0", keys), two_hosts("group-1", others)
    group.send(LinkKind.LOAD, REPORT, "router-0")
    assert router.receive(700) == []


def test_links_in_the_clear_between_hosts_are_refused(two_hosts):
    with pytest.raises(LinkError, match="links in the clear are refused"):
        two_hosts("router-0", None)


def test_a_key_that_is_missing_is_named(two_hosts, run_dir):
    with pytest.raises(LinkError, match=r"host-0\.key_secret cannot be read"):
        two_hosts("router-0", run_dir)
