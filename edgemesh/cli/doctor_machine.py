"""What a mesh needs of a machine beside GPUs, each looked at once."""

import enum
import fcntl
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec

from edgemesh.topology import Topology, preflight

GIB: Final = 1 << 30
MIN_DESCRIPTORS: Final = 4096
PACKAGES: Final = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "pyzmq", "msgspec", "uvicorn")


class Verdict(enum.StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing is wrong."""

    WARN = "warn"
    """It works, less well than it could."""

    FAIL = "fail"
    """The mesh would not start, or not work."""


class Finding(msgspec.Struct, frozen=True):
    """One line of the report: what was looked at, what was found, and what to do about it."""

    what: str
    verdict: Verdict
    found: str
    remedy: str = ""


def machine_findings(topology: Topology) -> Iterator[Finding]:
    """Interpreter, packages, cores, memory, limits, and what the topology asks of ports and directories."""
    yield _python()
    yield _packages()
    yield _processor()
    yield _cores(len(os.sched_getaffinity(0)), topology)
    yield _memory(topology)
    yield _shared_memory()
    yield _dev_shm(topology)
    yield descriptors(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield _locked(topology)
    problems = preflight(topology)
    for problem in problems:
        yield Finding("topology", Verdict.FAIL, problem, "change the key, or free what it names")
    if not problems:
        where = f"{topology.gateway.host}:{topology.gateway.port}"
        yield Finding("topology", Verdict.OK, f"{topology.mode}, {topology.world} ranks; {where} is free")


def _python() -> Finding:
    found = f"Python {platform.python_version()} on {platform.system()} {platform.release()}"
    if sys.platform != "linux":
        return Finding("system", Verdict.FAIL, found, "run on Linux: memfd, SCM_RIGHTS and PDEATHSIG are needed")
    return Finding("system", Verdict.OK, found)


def _packages() -> Finding:
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        remedy = f"pip install {' '.join(missing)}"
        return Finding("packages", Verdict.FAIL, f"missing: {', '.join(missing)}", remedy)
    return Finding("packages", Verdict.OK, ", ".join(found))


def _processor() -> Finding:
    machine = platform.machine()
    flags = _cpu_flags()
    if machine not in {"x86_64", "AMD64"}:
        remedy = "CPU ranks use gloo here: shared-memory collectives need x86-64"
        return Finding("processor", Verdict.WARN, machine, remedy)
    known = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    if "avx512_bf16" not in flags and "amx_bf16" not in flags:
        found = f"{machine}, {', '.join(known) or 'no vector extensions known here'}"
        return Finding("processor", Verdict.NOTE, found, "no bfloat16 instructions: CPU ranks may be faster in float32")
    return Finding("processor", Verdict.OK, f"{machine}, {', '.join(known)}")


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return set()
    return next((set(line.split()) for line in text.splitlines() if line.startswith("flags")), set())


def _cores(cores: int, topology: Topology) -> Finding:
    if topology.engine.device == "cuda":
        want = topology.world * len(topology.planes) + topology.gateway.processes
        why = f"{want} processes want one each"
    else:
        want = topology.world * topology.engine.threads
        why = f"{topology.world} CPU ranks a plane want {topology.engine.threads} each"
    if cores < want:
        remedy = "fewer ranks step faster here; choose a smaller topology" if topology.engine.device == "cpu" else ""
        return Finding("cores", Verdict.WARN, f"{cores}; {why}", remedy or "expect waiting between actors")
    return Finding("cores", Verdict.OK, f"{cores}; {why}")


def _memory(topology: Topology) -> Finding:
    total, free = _meminfo("MemTotal"), _meminfo("MemAvailable")
    processes = topology.world * len(topology.planes)
    want = processes * 400 << 20
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free; {processes} rank processes take about {want / GIB:.1f}"
    if free < want:
        return Finding("memory", Verdict.FAIL, found, "choose a topology with fewer ranks, or end other programs")
    if free < 2 * want:
        return Finding("memory", Verdict.WARN, found, "little is left for weights and KV cache")
    return Finding("memory", Verdict.OK, found)


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) << 10
    return 0


def _shared_memory() -> Finding:
    """Make a sealed memfd, which is how weights and KV are shared."""
    try:
        fd = os.memfd_create("edgemesh-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, 4096)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
        finally:
            os.close(fd)
    except OSError as error:
        remedy = "a sandbox forbids memfd_create or sealing; allow both system calls"
        return Finding("shared memory", Verdict.FAIL, f"no sealed memfd: {error.strerror}", remedy)
    return Finding("shared memory", Verdict.OK, "memfd and seals work; /dev/shm is not used for weights or KV")


def _dev_shm(topology: Topology) -> Finding:
    where = "/dev/shm"  # noqa: S108 - asked about, not written
    try:
        free = shutil.disk_usage(where).free
    except OSError:
        free = 0
    found = f"{free / GIB:.1f} GiB free"
    if topology.engine.device == "cuda" and topology.world > 1 and free < GIB:
        remedy = "NCCL needs it between GPUs: in a container, --ipc=host or --shm-size=2g"
        return Finding(where, Verdict.FAIL, found, remedy)
    return Finding(where, Verdict.OK, found)


def descriptors(soft: int, hard: int) -> Finding:
    """Open files: the hard limit counts, since ``start`` raises the soft one to it."""
    found = f"{soft} (hard limit {'none' if hard == resource.RLIM_INFINITY else hard})"
    if hard != resource.RLIM_INFINITY and hard < MIN_DESCRIPTORS:
        return Finding("open files", Verdict.WARN, found, f"raise it to {MIN_DESCRIPTORS} or more: ulimit -Hn")
    return Finding("open files", Verdict.OK, found)


def _locked(topology: Topology) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 20} MiB"
    if topology.engine.device == "cuda" and soft != resource.RLIM_INFINITY:
        remedy = "pinned host memory may be refused: ulimit -l unlimited (in a container: --ulimit memlock=-1)"
        return Finding("locked memory", Verdict.WARN, found, remedy)
    return Finding("locked memory", Verdict.OK, found)
