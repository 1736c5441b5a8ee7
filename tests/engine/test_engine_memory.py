"""Shared memory across real processes: what one writes the other reads, what is sealed stays, what is wrong is refused."""

import array
import fcntl
import gc
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch

from edgemesh.engine import lease as lease_module
from edgemesh.engine.lease import (
    LeaseRefused,
    lease,
    listen,
    receive_lease,
    receive_message,
    same_user,
    send_message,
)
from edgemesh.engine.memory import ALIGN_BYTES, MAX_REGION_BYTES, MemoryFault, Packing, Region, tensors
from edgemesh.engine.shape import ModelShape, parse_shape
from edgemesh.wire.codec import WireError
from edgemesh.wire.ids import Plane
from edgemesh.wire.messages import Capacity, Grant, Lease, TensorPlace

CAPACITY = Capacity(
    pages=2,
    page_tokens=16,
    max_model_len=16,
    vocab_size=8,
    eos_token_ids=(),
    bos_token_id=None,
    weights_bytes=0,
    kv_bytes=0,
)
REQUEST = Lease(actor="rank-0.decode", epoch=0, rank=0, plane=Plane.DECODE)


def tiny_shape() -> ModelShape:
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 8,
    }
    return parse_shape({"model_type": "llama", **sizes})


def grant_of(regions, places):
    shape = msgspec.json.encode(tiny_shape())
    sizes = tuple(region.nbytes for region in regions)
    return Grant(rank=0, epoch=0, capacity=CAPACITY, shape=shape, region_bytes=sizes, tensors=tuple(places))


PATIENCE_S = 60.0
"""How long to wait for what must come, however busy the machine is."""


def open_descriptors() -> int:
    """How many this process has, but those of objects that nobody has any more."""
    gc.collect()
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


# --- regions ---------------------------------------------------------------------------------------


def test_a_region_is_zeros_and_keeps_what_is_written():
    region = Region.create("t", 4096)
    tensor = region.tensor(64, torch.float32, (3, 5))
    assert not tensor.any()
    tensor.copy_(torch.arange(15).view(3, 5))
    again = Region.adopt(os.dup(region.fd), 4096).tensor(64, torch.float32, (3, 5))
    assert torch.equal(again, tensor)
    region.close()
    tensor += 1
    assert torch.equal(again, tensor)


def test_untouched_memory_is_not_taken():
    region = Region.create("t", 1 << 36)
    region.tensor(1 << 35, torch.uint8, (4096,)).fill_(1)
    assert os.fstat(region.fd).st_blocks * 512 <= 1 << 21
    region.close()


def test_a_sealed_region_can_never_be_written_again():
    region = Region.create("t", 4096)
    tensor = region.tensor(0, torch.float32, (4,))
    tensor.fill_(7)
    with pytest.raises(MemoryFault, match="still mapped"):
        region.seal()
    assert tensor.tolist() == [7.0] * 4
    del tensor
    region.seal()
    assert not region.writable
    with pytest.raises(PermissionError):
        os.pwrite(region.fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, 0)
    assert region.tensor(0, torch.float32, (4,)).tolist() == [7.0] * 4
    region.close()


def test_writing_to_sealed_memory_ends_the_writer_alone():
    code = """
import torch
from edgemesh.engine.memory import Region
region = Region.create("t", 4096)
region.seal()
region.tensor(0, torch.uint8, (16,)).fill_(1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == -11


@pytest.mark.parametrize("nbytes", [0, -1, MAX_REGION_BYTES + 1])
def test_a_size_out_of_bounds_is_refused(nbytes):
    with pytest.raises(MemoryFault, match=str(nbytes)):
        Region.create("t", nbytes)


@pytest.mark.parametrize(
    ("offset", "dtype", "shape"),
    [
        (0, torch.float32, (1025,)),
        (4096, torch.uint8, (1,)),
        (-4, torch.float32, (1,)),
        (2, torch.float32, (1,)),
        (0, torch.float32, (1 << 40, 1 << 40)),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(offset, dtype, shape):
    region = Region.create("t", 4096)
    with pytest.raises(MemoryFault, match="does not fit"):
        region.tensor(offset, dtype, shape)
    region.close()


def test_only_sealed_memfds_of_the_stated_size_are_adopted(tmp_path):
    region = Region.create("t", 4096)
    with pytest.raises(MemoryFault, match="4096 bytes"):
        Region.adopt(region.fd, 8192)
    region.close()
    loose = os.memfd_create("t", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 4096)
    with pytest.raises(MemoryFault, match="seals"):
        Region.adopt(loose, 4096)
    os.close(loose)
    (tmp_path / "file").write_bytes(bytes(4096))
    with (tmp_path / "file").open("rb") as file, pytest.raises(MemoryFault, match="no memfd"):
        Region.adopt(file.fileno(), 4096)


def test_packed_tensors_are_aligned_and_apart():
    packing = Packing()
    packing.add("a", "float32", (3, 5))
    packing.add("b", "bfloat16", (7,))
    packing.add("c", "uint8", (1,))
    packing.alias("d", "a")
    region = Region.create("t", packing.nbytes)
    places = packing.on_wire(0)
    found = tensors(places, [region])
    assert all(place.offset % ALIGN_BYTES == 0 for place in places)
    assert all(tensor.data_ptr() % ALIGN_BYTES == 0 for tensor in found.values())
    for value, name in enumerate("abc", 1):
        found[name].fill_(value)
    assert [found[name].float().mean().item() for name in "abcd"] == [1, 2, 3, 1]
    region.close()


@pytest.mark.parametrize(
    ("place", "word"),
    [
        (TensorPlace("t", "float64", (1,), 0, 0), "float64"),
        (TensorPlace("t", "float32", (1,), 3, 0), "region 3"),
        (TensorPlace("t", "float32", (1 << 20,), 0, 0), "does not fit"),
    ],
)
def test_a_place_outside_what_was_granted_is_refused(place, word):
    region = Region.create("t", 4096)
    with pytest.raises(MemoryFault, match=word):
        tensors([place], [region])
    region.close()


# --- leases ----------------------------------------------------------------------------------------------


class Vault(threading.Thread):
    """Answers one connection with what a test says."""

    def __init__(self, path, answer):
        super().__init__(daemon=True)
        self.server, self.answer, self.seen = listen(path), answer, None

    def run(self):
        connection, _ = self.server.accept()
        with connection:
            assert same_user(connection)
            self.seen = receive_lease(connection)
            self.answer(connection)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.join(PATIENCE_S)
        self.server.close()


def test_a_lease_brings_the_very_memory_to_another_process(tmp_path):
    weights, kv = Region.create("w", 4096), Region.create("kv", 4096)
    weights.tensor(0, torch.float32, (4,)).copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    weights.seal()
    places = [TensorPlace("w", "float32", (2, 2), 0, 0), TensorPlace("kv", "bfloat16", (8,), 1, 64)]

    def answer(connection):
        send_message(connection, grant_of([weights, kv], places), [weights.fd, kv.fd])

    code = f"""
from edgemesh.engine.lease import lease
from edgemesh.wire.messages import Lease
leased = lease({str(tmp_path / "vault")!r}, Lease("rank-0.decode", 0, 0, "decode"), {PATIENCE_S})
assert leased.shape.hidden == 8 and leased.grant.capacity.pages == 2
assert leased.tensors["w"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
leased.tensors["kv"].fill_(5)
"""
    with Vault(tmp_path / "vault", answer) as vault:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert vault.seen == REQUEST
    assert kv.tensor(64, torch.bfloat16, (8,)).tolist() == [5.0] * 8
    weights.close()
    kv.close()


def test_a_lease_leaves_no_descriptor_open_but_the_mappings(tmp_path):
    region = Region.create("w", 4096)
    places = [TensorPlace("w", "float32", (4,), 0, 0)]
    before = open_descriptors()
    with Vault(tmp_path / "vault", lambda c: send_message(c, grant_of([region], places), [region.fd])):
        leased = lease(tmp_path / "vault", REQUEST, PATIENCE_S)
    assert open_descriptors() == before + 1  # a mapping holds a descriptor of its own
    del leased
    assert open_descriptors() == before
    region.close()


def test_no_vault_is_a_refusal(tmp_path):
    with pytest.raises(LeaseRefused, match=r"rank-0\.decode got no memory from the vault"):
        lease(tmp_path / "none", REQUEST, 1)


@pytest.mark.parametrize(
    "answer",
    [
        lambda connection: None,
        lambda connection: connection.sendall(b"\x10\x00"),
        lambda connection: connection.sendall(struct.pack("<I", 100) + b"short"),
        lambda connection: connection.sendall(struct.pack("<I", 1 << 31)),
    ],
    ids=["hangs up", "half a length", "half a message", "too long"],
)
def test_a_broken_answer_is_a_refusal(tmp_path, answer):
    before = open_descriptors()
    with Vault(tmp_path / "vault", answer), pytest.raises(LeaseRefused, match="got no memory"):
        lease(tmp_path / "vault", REQUEST, PATIENCE_S)
    assert open_descriptors() == before


def test_a_silent_vault_is_given_up(tmp_path):
    answered = threading.Event()
    with Vault(tmp_path / "vault", lambda _: answered.wait(PATIENCE_S)):
        began = time.monotonic()
        with pytest.raises(LeaseRefused, match="timed out"):
            lease(tmp_path / "vault", REQUEST, 0.2)
        assert time.monotonic() - began < PATIENCE_S / 2
        answered.set()


def test_descriptors_other_than_granted_are_a_fault_and_are_closed(tmp_path):
    region = Region.create("w", 4096)
    before = open_descriptors()
    with (
        Vault(tmp_path / "vault", lambda c: send_message(c, grant_of([region, region], []), [region.fd])),
        pytest.raises(MemoryFault, match="2 regions were granted, 1 descriptors came"),
    ):
        lease(tmp_path / "vault", REQUEST, PATIENCE_S)
    assert open_descriptors() == before
    region.close()


def test_garbage_in_a_grant_is_a_fault(tmp_path):
    frame = b"\x93\x01\x02\x03"
    with (
        Vault(tmp_path / "vault", lambda c: c.sendall(struct.pack("<I", len(frame)) + frame)),
        pytest.raises(MemoryFault, match="cannot be read"),
    ):
        lease(tmp_path / "vault", REQUEST, PATIENCE_S)


def pair():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    left.settimeout(PATIENCE_S)
    right.settimeout(PATIENCE_S)
    return left, right


def test_descriptors_beside_a_lease_are_refused():
    left, right = pair()
    before = open_descriptors()
    send_message(left, REQUEST, [0, 1])
    with pytest.raises(WireError, match="descriptors"):
        receive_lease(right)
    assert open_descriptors() == before
    left.close()
    right.close()


def test_more_descriptors_than_a_message_may_have_are_closed():
    left, right = pair()
    before = open_descriptors()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 20))]
    left.sendmsg([struct.pack("<I", 1), b"x"], rights)
    with pytest.raises(WireError, match="descriptors"):
        receive_message(right, 4)
    assert open_descriptors() == before
    with pytest.raises(WireError, match="too large"):
        send_message(left, REQUEST, [0] * (lease_module.MAX_DESCRIPTORS + 1))
    left.close()
    right.close()


def test_received_descriptors_are_not_inherited():
    left, right = pair()
    region = Region.create("w", 4096)
    send_message(left, REQUEST, [region.fd])
    _, descriptors = receive_message(right, 4)
    assert fcntl.fcntl(descriptors[0], fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(descriptors[0])
    for each in (left, right, region):
        each.close()


def test_only_this_user_may_connect(tmp_path):
    server = listen(tmp_path / "vault")
    assert (tmp_path / "vault").stat().st_mode & 0o777 == 0o600
    server.close()
    again = listen(tmp_path / "vault")  # what a dead vault left is no obstacle
    again.close()
