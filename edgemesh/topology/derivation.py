"""From a topology to its mesh: a pure function, and the only place where links are made.

Nothing here can write down a link that carries request or step data to more than one group: each kind of link has
one constructor, and those of ``PLACE``, ``STEER``, ``PLAN`` and ``RESULT`` take the one group they serve.
"""

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from edgemesh.topology.config import Topology
from edgemesh.topology.errors import TopologyError
from edgemesh.topology.mesh import Actor, CoupledSet, Link, Mesh, rank_name
from edgemesh.topology.rules import resolve
from edgemesh.wire.catalogue import REPLY, SCOPE, LinkKind
from edgemesh.wire.ids import Plane, Role

MAX_SOCKET_PATH: Final = 99
"""Bytes of a socket's path: the kernel's limit is 107 on Linux and 103 elsewhere, and a suffix may be added."""


def derive(topology: Topology, run_dir: str) -> Mesh:
    """Every actor, link and coupled set of a topology; sockets lie in ``run_dir``.

    Raises ``TopologyError`` if the topology is not legal, or ``run_dir`` is too long for a socket's path.
    """
    topology = resolve(topology)
    actors = tuple(_actors(topology))
    sets = _sets(topology)
    wires = tuple(_wires(topology, actors, sets))
    links = tuple(_links(topology, run_dir, {actor.name: actor for actor in actors}, wires))
    return Mesh(topology, run_dir, actors, links, sets)


def rank_hosts(topology: Topology) -> tuple[int, ...]:
    """The host of each rank, in order.

    With as many groups as hosts or more, whole groups are dealt out in order and as evenly as possible, so that no
    group spans hosts; with fewer groups than hosts, ranks are dealt out so. The first hosts get what is left over.
    """
    hosts, dp = len(topology.mesh.hosts), topology.mesh.dp
    if dp >= hosts:
        return tuple(host for host in _deal(dp, hosts) for _ in range(topology.attn_tp))
    return tuple(_deal(topology.world, hosts))


def _deal(things: int, hosts: int) -> Iterator[int]:
    each, left = divmod(things, hosts)
    for host in range(hosts):
        for _ in range(each + (host < left)):
            yield host


def _actors(topology: Topology) -> Iterator[Actor]:
    hosts = rank_hosts(topology)
    for host in range(len(topology.mesh.hosts)):
        yield Actor(f"{Role.SUPERVISOR}-{host}", Role.SUPERVISOR, host, host)
    for gateway in range(topology.gateway.processes):
        yield Actor(f"{Role.GATEWAY}-{gateway}", Role.GATEWAY, gateway, 0)
    yield Actor(f"{Role.ROUTER}-0", Role.ROUTER, 0, 0)
    for group in range(topology.mesh.dp):
        yield Actor(f"{Role.GROUP}-{group}", Role.GROUP, group, hosts[group * topology.attn_tp], group)
    if topology.coupled:
        yield Actor(f"{Role.BARRIER}-0", Role.BARRIER, 0, 0)
    for plane in topology.planes:
        for rank in range(topology.world):
            yield Actor(rank_name(rank, plane), Role.RANK, rank, hosts[rank], rank // topology.attn_tp, plane)
    for host in range(len(topology.mesh.hosts)):
        yield Actor(f"{Role.VAULT}-{host}", Role.VAULT, host, host)


def _sets(topology: Topology) -> tuple[CoupledSet, ...]:
    if topology.coupled:
        return (CoupledSet(0, tuple(range(topology.mesh.dp)), f"{Role.BARRIER}-0"),)
    return tuple(CoupledSet(group, (group,), None) for group in range(topology.mesh.dp))


class _Wire(Struct, frozen=True):
    """One endpoint to be: a link of ``kind`` and, where the kind has a reply, the opposite link too.

    ``socket`` is its file's name where that is not the link's.
    """

    kind: LinkKind
    binder: str
    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    suffix: str = ""
    socket: str = ""
    group: int | None = None
    plane: Plane | None = None


def _wires(topology: Topology, actors: tuple[Actor, ...], sets: tuple[CoupledSet, ...]) -> Iterator[_Wire]:
    def named(role: Role) -> tuple[str, ...]:
        return tuple(actor.name for actor in actors if actor.role is role)

    gateways, groups, router = named(Role.GATEWAY), named(Role.GROUP), f"{Role.ROUTER}-0"
    yield _Wire(LinkKind.SUBMIT, router, gateways, (router,))
    for index, group in enumerate(groups):
        yield _Wire(LinkKind.PLACE, group, (router,), (group,), f"-{index}", group=index)
        yield _Wire(LinkKind.STEER, group, gateways, (group,), f"-{index}", group=index)
        for plane in topology.planes:
            ranks = tuple(actor.name for actor in actors if actor.plane is plane and actor.group == index)
            yield _Wire(LinkKind.PLAN, group, (group,), ranks, f"-{index}.{plane}", group=index, plane=plane)
    for index, gateway in enumerate(gateways):
        yield _Wire(LinkKind.EMIT, gateway, groups, (gateway,), f"-{index}")
    for each in sets:
        if each.barrier is not None:
            members = tuple(groups[group] for group in each.groups)
            yield _Wire(LinkKind.ARRIVE, each.barrier, members, (each.barrier,), f"-{each.index}")
    yield _Wire(LinkKind.LOAD, router, groups, (router,))
    for host in range(len(topology.mesh.hosts)):
        local = tuple(actor for actor in actors if actor.host == host and actor.role is not Role.SUPERVISOR)
        ranks = tuple(actor.name for actor in local if actor.role is Role.RANK)
        vault, supervisor = f"{Role.VAULT}-{host}", f"{Role.SUPERVISOR}-{host}"
        yield _Wire(LinkKind.LEASE, vault, ranks, (vault,), f"-{host}", f"vault-{host}" if host else "vault")
        yield _Wire(LinkKind.REPORT, supervisor, tuple(actor.name for actor in local), (supervisor,), f"-{host}")


def _links(topology: Topology, run_dir: str, actors: dict[str, Actor], wires: tuple[_Wire, ...]) -> Iterator[Link]:
    port = topology.mesh.base_port
    for wire in wires:
        if len({actors[name].host for name in wire.senders + wire.receivers}) == 1:
            endpoint = _socket(run_dir, wire.socket or wire.kind + wire.suffix)
        else:
            endpoint = _tcp(topology.mesh.hosts[actors[wire.binder].host], port)
            port += 1
        ways = [(wire.kind, wire.senders, wire.receivers)]
        if wire.kind in REPLY:
            ways.append((REPLY[wire.kind], wire.receivers, wire.senders))
        for kind, senders, receivers in ways:
            yield Link(
                name=kind + wire.suffix,
                kind=kind,
                scope=SCOPE[kind],
                group=wire.group,
                plane=wire.plane,
                senders=senders,
                receivers=receivers,
                endpoint=endpoint,
                binder=wire.binder,
            )


def _socket(run_dir: str, name: str) -> str:
    path = f"{run_dir.rstrip('/')}/sock/{name}"
    size = len(path.encode())
    if size > MAX_SOCKET_PATH:
        message = (
            f"the run directory {run_dir} is too long: the socket {path} would have {size} bytes, and the kernel's limit"
            f" leaves {MAX_SOCKET_PATH}. Use a run directory at least {size - MAX_SOCKET_PATH} bytes shorter."
        )
        raise TopologyError(message)
    return f"ipc://{path}"


def _tcp(host: str, port: int) -> str:
    if port > 65535:
        message = "mesh.base_port is too high: the ports of the links between hosts would pass 65535. Use 7700."
        raise TopologyError(message)
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
