"""What must hold between keys: the legal numbers, and which choices go together. Pure."""

import ipaddress
import re
from typing import Final

import msgspec

from edgemesh.topology.config import Topology
from edgemesh.topology.errors import TopologyError
from edgemesh.wire.ids import MAX_RANKS

CUDA_PAGE_TOKENS: Final = 256
"""flash-attn's paged kernels need pages of a multiple of this."""

CPU_PAGE_TOKENS: Final = 16

_NAME: Final = re.compile(r"(?=.{1,253}\Z)(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*\.?\Z")


def resolve(topology: Topology) -> Topology:
    """The same topology with every number that was left to a rule filled in; resolving twice changes nothing.

    Raises ``TopologyError`` for keys that do not go together.
    """
    attn_tp = _attn_tp(topology)
    page_tokens = topology.engine.page_tokens or (
        CUDA_PAGE_TOKENS if topology.engine.device == "cuda" else CPU_PAGE_TOKENS
    )
    resolved = msgspec.structs.replace(
        topology,
        mesh=msgspec.structs.replace(topology.mesh, attn_tp=attn_tp),
        engine=msgspec.structs.replace(topology.engine, page_tokens=page_tokens),
    )
    _check_world(resolved)
    _check_hosts(resolved)
    _check_engine(resolved)
    _check_capacity(resolved)
    return resolved


def _attn_tp(topology: Topology) -> int:
    tp, dp, stated = topology.mesh.tp, topology.mesh.dp, topology.mesh.attn_tp
    if dp == 1:
        if stated in {0, tp}:
            return tp
        message = (
            f"mesh.attn_tp = {stated} does not go with tp = {tp} and dp = 1: one group holds all {tp} ranks."
            f" Legal is attn_tp = {tp}, or leave it out."
        )
        raise TopologyError(message)
    legal = [f"attn_tp = {tp} (plain DP: {dp} independent groups, world {tp * dp})"]
    if tp % dp == 0:
        legal.insert(0, f"attn_tp = {tp // dp} (attention DP: world {tp}; also the default)")
    if (stated == 0 and tp % dp == 0) or stated == tp or stated * dp == tp:
        return stated or tp // dp
    if stated == 0:
        divisors = ", ".join(str(number) for number in range(1, tp + 1) if tp % number == 0)
        message = (
            f"mesh.tp = {tp} ranks cannot be divided among mesh.dp = {dp} groups evenly. Legal with tp = {tp} is a dp of"
            f" {divisors}; or state {legal[0]}."
        )
        raise TopologyError(message)
    message = f"mesh.attn_tp = {stated} does not go with tp = {tp} and dp = {dp}. Legal is {' or '.join(legal)}."
    raise TopologyError(message)


def _check_world(topology: Topology) -> None:
    if topology.world > MAX_RANKS:
        message = (
            f"mesh.dp = {topology.mesh.dp} groups of {topology.attn_tp} ranks are a world of {topology.world}; the most is"
            f" {MAX_RANKS}. Lower mesh.dp or mesh.tp."
        )
        raise TopologyError(message)


def _check_hosts(topology: Topology) -> None:
    hosts = topology.mesh.hosts
    for key, value in [*(("mesh.hosts", host) for host in hosts), ("gateway.host", topology.gateway.host)]:
        if not is_address(value):
            message = f"{key}: {value!r} is neither an IP address nor a host name. Write it without a port or a scheme."
            raise TopologyError(message)
    if len(set(hosts)) < len(hosts):
        twice = next(host for host in hosts if hosts.count(host) > 1)
        message = f"mesh.hosts names {twice} twice; each machine stands there once, and gets its share of the ranks."
        raise TopologyError(message)
    if len(hosts) > topology.world:
        message = f"mesh.hosts lists {len(hosts)} hosts for {topology.world} ranks; list at most {topology.world}."
        raise TopologyError(message)
    if len(hosts) > 1 and not topology.mesh.keys_dir:
        message = (
            "mesh.keys_dir is empty, and mesh.hosts lists several hosts: links between hosts are encrypted and"
            " authenticated, so name the directory that holds the hosts' CURVE keys."
        )
        raise TopologyError(message)


def is_address(host: str) -> bool:
    """Whether a host is written as an IP address or a host name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        last = host.rstrip(".").rpartition(".")[2]
        return _NAME.match(host) is not None and not last.isdigit()
    return True


def _check_engine(topology: Topology) -> None:
    engine = topology.engine
    cuda = engine.device == "cuda"
    if cuda and engine.collectives in {"shm", "gloo"}:
        message = f'engine.collectives = "{engine.collectives}" needs engine.device = "cpu"; on CUDA legal is "auto" or "nccl".'
        raise TopologyError(message)
    if not cuda and engine.collectives == "nccl":
        message = 'engine.collectives = "nccl" needs engine.device = "cuda"; on CPU legal is "auto", "shm" or "gloo".'
        raise TopologyError(message)
    if engine.collectives == "shm" and len(topology.mesh.hosts) > 1:
        message = (
            f'engine.collectives = "shm" cannot join the {len(topology.mesh.hosts)} hosts of mesh.hosts; legal over several'
            ' hosts is "auto" or "gloo".'
        )
        raise TopologyError(message)
    if engine.attention == "flash-attn" and (not cuda or topology.model.dtype == "float32"):
        message = (
            'engine.attention = "flash-attn" needs engine.device = "cuda" and model.dtype = "bfloat16"; otherwise legal is'
            ' "auto" or "torch".'
        )
        raise TopologyError(message)
    if cuda and engine.page_tokens % CUDA_PAGE_TOKENS:
        message = (
            f"engine.page_tokens = {engine.page_tokens} does not suit CUDA's paged attention; legal is a multiple of"
            f" {CUDA_PAGE_TOKENS}, or leave it out."
        )
        raise TopologyError(message)


def _check_capacity(topology: Topology) -> None:
    pages, page_tokens, longest = topology.engine.kv_pages, topology.engine.page_tokens, topology.model.max_model_len
    if pages == 1:
        message = "engine.kv_pages = 1 leaves no page beside the scratch page; legal is 0 (from memory) or 2 and more."
        raise TopologyError(message)
    if pages and (pages - 1) * page_tokens < longest:
        need = -(-longest // page_tokens) + 1
        message = (
            f"engine.kv_pages = {pages} pages of {page_tokens} tokens, less the scratch page, cannot hold one request of"
            f" model.max_model_len = {longest} tokens. Legal is engine.kv_pages of {need} and more, or a max_model_len of at"
            f" most {(pages - 1) * page_tokens}."
        )
        raise TopologyError(message)
    if topology.group.max_waiting_tokens < longest:
        message = (
            f"group.max_waiting_tokens = {topology.group.max_waiting_tokens} would refuse every request of"
            f" model.max_model_len = {longest} tokens; legal is {longest} and more."
        )
        raise TopologyError(message)
