"""What a mesh on GPUs needs, read from ``nvidia-smi``: drivers, memory, peer access, sockets and MPS.

The parsers take the tool's text, so that they are tried on what real machines print.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from edgemesh.cli.doctor_machine import GIB, Finding, Verdict
from edgemesh.runtime.cards import COST, MpsError, refuse, wanted
from edgemesh.runtime.mps import CONTROL, absence, running
from edgemesh.topology import Topology
from edgemesh.topology.machine import unshareable

FIELDS: Final = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "memory.free",
    "compute_cap",
    "compute_mode",
    "mig.mode.current",
    "pcie.link.gen.max",
    "pcie.link.width.max",
    "pcie.link.width.current",
)
TOOL_S: Final = 20.0
MIN_DRIVER: Final = 525
"""The first branch that runs CUDA 12."""

_ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*m")
_GPU: Final = re.compile(r"GPU\d+\Z")


class Gpu(msgspec.Struct, frozen=True):
    """One card as ``nvidia-smi --query-gpu`` describes it; memory in MiB."""

    index: int
    name: str
    driver: str
    memory_total: int
    memory_free: int
    compute: float
    compute_mode: str
    mig: str
    pcie_gen: int
    pcie_width_max: int
    pcie_width: int


class Wiring(msgspec.Struct, frozen=True):
    """``nvidia-smi topo -m``: how cards reach each other (``PHB``, ``SYS``, ``NV4``), and each card's NUMA node ("" unknown)."""

    links: dict[tuple[int, int], str]
    numa: dict[int, str]


def parse_gpus(text: str) -> list[Gpu]:
    """The cards in ``--format=csv,noheader,nounits`` output with ``FIELDS``; lines that are not such are left out."""
    gpus = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(FIELDS) or not cells[0].isdigit():
            continue
        numbers = {at: _number(cells[at]) for at in (3, 4, 5, 8, 9, 10)}
        gpus.append(
            Gpu(
                index=int(cells[0]),
                name=cells[1],
                driver=cells[2],
                memory_total=int(numbers[3]),
                memory_free=int(numbers[4]),
                compute=numbers[5],
                compute_mode=cells[6],
                mig=cells[7],
                pcie_gen=int(numbers[8]),
                pcie_width_max=int(numbers[9]),
                pcie_width=int(numbers[10]),
            )
        )
    return gpus


def parse_matrix(text: str) -> Wiring:
    """The table of ``topo -m`` or ``topo -p2p r``; network cards in it are left out."""
    header: list[str] = []
    links: dict[tuple[int, int], str] = {}
    numa: dict[int, str] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in _ESCAPES.sub("", line).split("\t")]
        if not header and len(cells) > 1 and not cells[0] and _GPU.match(cells[1]):
            header = cells
        elif header and _GPU.match(cells[0]):
            row = int(cells[0][3:])
            for name, cell in zip(header[1:], cells[1:], strict=False):
                if _GPU.match(name) and (column := int(name[3:])) != row:
                    links[row, column] = cell
            if "NUMA Affinity" in header and (at := header.index("NUMA Affinity")) < len(cells):
                numa[row] = "" if cells[at] == "N/A" else cells[at]
    return Wiring(links, numa)


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return 0.0


def gpu_findings(topology: Topology) -> Iterator[Finding]:
    """Everything about the cards of this host."""
    cuda = topology.engine.device == "cuda"
    tool = shutil.which("nvidia-smi")
    if tool is None:
        remedy = "install the NVIDIA driver, or choose a topology with engine.device = 'cpu'" if cuda else ""
        yield Finding("GPUs", Verdict.FAIL if cuda else Verdict.NOTE, "no nvidia-smi here", remedy)
        return
    queried = _run([tool, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"])
    gpus = parse_gpus(queried)
    if not gpus:
        remedy = "see that nvidia-smi itself works (in a container: --gpus all)" if cuda else ""
        verdict = Verdict.FAIL if cuda else Verdict.NOTE
        yield Finding("GPUs", verdict, queried.strip()[:200] or "nvidia-smi names none", remedy)
        return
    # Rank processes of several hosts are spread over all of them.
    ranks = -(-topology.world // len(topology.mesh.hosts)) if cuda else 0
    yield from card_findings(gpus, ranks)
    if len(gpus) > 1:
        yield from wiring_findings(parse_matrix(_run([tool, "topo", "-m"])), max(1, topology.attn_tp))
        yield peer_finding(parse_matrix(_run([tool, "topo", "-p2p", "r"])))
    yield mps_finding(topology)
    yield allocator_finding(os.environ)


def card_findings(gpus: Sequence[Gpu], ranks: int) -> Iterator[Finding]:
    """Number, driver, memory in use, modes and links of the cards; ``ranks`` is how many this host needs."""
    names = ", ".join(sorted({f"{gpu.name} {gpu.memory_total / 1024:.0f} GiB" for gpu in gpus}))
    found = f"{len(gpus)} x {names}"
    if len(gpus) < ranks:
        yield Finding(
            "GPUs", Verdict.FAIL, found, f"the topology has {ranks} ranks here; choose one with {len(gpus)} at most"
        )
    else:
        yield Finding("GPUs", Verdict.OK, found)
    driver = gpus[0].driver
    if _number(driver.split(".")[0]) < MIN_DRIVER:
        yield Finding("driver", Verdict.FAIL, driver, f"install {MIN_DRIVER} or later: CUDA 12 needs it")
    else:
        yield Finding("driver", Verdict.OK, driver)
    for gpu in gpus:
        yield from _card(gpu)


def _card(gpu: Gpu) -> Iterator[Finding]:
    name = f"GPU {gpu.index}"
    used = gpu.memory_total - gpu.memory_free
    if gpu.memory_total and used > gpu.memory_total // 10:
        found = f"{used * (1 << 20) / GIB:.1f} GiB in use"
        yield Finding(name, Verdict.WARN, found, "end what holds it (nvidia-smi names it), or less is left for KV")
    if gpu.compute and gpu.compute < 8.0:
        found = f"compute capability {gpu.compute}"
        yield Finding(name, Verdict.FAIL, found, "flash-attn and bfloat16 need 8.0 (Ampere) or later")
    if gpu.compute_mode in {"Exclusive_Process", "Prohibited"}:
        yield Finding(name, Verdict.FAIL, f"compute mode {gpu.compute_mode}", f"nvidia-smi -i {gpu.index} -c DEFAULT")
    if gpu.mig == "Enabled":
        yield Finding(name, Verdict.WARN, "MIG is on", "a rank needs a whole card")
    if 0 < gpu.pcie_width < gpu.pcie_width_max:
        found = f"PCIe gen {gpu.pcie_gen} x{gpu.pcie_width} of x{gpu.pcie_width_max}"
        remedy = "a riser, slot or BIOS setting halves the link; collectives are bound by it"
        yield Finding(name, Verdict.WARN, found, remedy)


def wiring_findings(wiring: Wiring, attn_tp: int) -> Iterator[Finding]:
    """How cards are wired, and whether each attention group stays on one NUMA node."""
    kinds = sorted(set(wiring.links.values()))
    nvlink = [kind for kind in kinds if kind.startswith("NV")]
    found = f"between cards: {', '.join(kinds) or 'unknown'}"
    yield Finding("wiring", Verdict.OK, found + (" (NVLink)" if nvlink else " (PCIe)" if kinds else ""))
    if len(set(wiring.numa.values())) <= 1:
        return
    cards = sorted(wiring.numa)
    groups = [cards[at : at + attn_tp] for at in range(0, len(cards), attn_tp)]
    split = [group for group in groups if len({wiring.numa[card] for card in group}) > 1]
    nodes = ", ".join(f"GPU {card}: node {wiring.numa[card] or '?'}" for card in cards)
    if split:
        remedy = f"an attention group of {attn_tp} spans sockets; order CUDA_VISIBLE_DEVICES by node, or lower attn_tp"
        yield Finding("NUMA", Verdict.WARN, nodes, remedy)
    else:
        yield Finding("NUMA", Verdict.OK, nodes)


def peer_finding(wiring: Wiring) -> Finding:
    """Whether cards read each other's memory directly."""
    refused = sorted({kind for kind in wiring.links.values() if kind != "OK"})
    if not wiring.links:
        return Finding("peer access", Verdict.NOTE, "nvidia-smi does not say")
    if refused:
        found = f"not between all cards ({', '.join(refused)})"
        remedy = "expected on consumer cards: NCCL goes through host memory; set NCCL_P2P_DISABLE=1 if it hangs"
        return Finding("peer access", Verdict.NOTE, found, remedy)
    return Finding("peer access", Verdict.OK, "between all cards")


def mps_finding(topology: Topology) -> Finding:
    """Whether the daemon is installed, whether this user runs one already, and what its absence would mean."""
    if absent := absence(os.environ.get("PATH")):
        if not wanted(topology):
            return Finding("MPS", Verdict.NOTE, f"{absent.reason}; nothing needs it here")
        try:
            refuse(topology, absent)
        except MpsError as error:
            return Finding("MPS", Verdict.FAIL, absent.reason, str(error))
        remedy = "install the driver's MPS tools, or set mesh.split = false"
        return Finding("MPS", Verdict.WARN, f"{absent.reason}: {COST}", remedy)
    if (pipe := running(os.environ)) is not None:
        remedy = f"start joins it; for one of its own, end this one: echo quit | {CONTROL}"
        return Finding("MPS", Verdict.NOTE, f"a daemon of yours runs at {pipe}", remedy)
    return Finding("MPS", Verdict.OK, "installed; start runs a daemon of its own")


def allocator_finding(environment: Mapping[str, str]) -> Finding:
    """``expandable_segments`` makes memory that cannot be shared between processes."""
    if fault := unshareable(environment):
        found, _, remedy = fault.rpartition("; ")
        return Finding("allocator", Verdict.FAIL, found, remedy)
    return Finding("allocator", Verdict.OK, "memory can be shared between processes")


def _run(command: Sequence[str]) -> str:
    """A tool's output, whatever its exit code; its complaint if it could not run."""
    try:
        done = subprocess.run(  # noqa: S603 - a fixed list of arguments, the program found on the path
            command, check=False, capture_output=True, text=True, timeout=TOOL_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not answer within {TOOL_S:.0f} s"
    except OSError as error:
        return f"{command[0]} cannot be run: {error.strerror}"
    return done.stdout + done.stderr
