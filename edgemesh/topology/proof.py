"""The invariants of a mesh, checked on the mesh itself and not on the code that derived it.

``violations`` returns what does not hold, in words; ``edgemesh topology check`` proves a file by it.
"""

from collections import defaultdict
from collections.abc import Iterator

from edgemesh.topology.derivation import MAX_SOCKET_PATH
from edgemesh.topology.mesh import Link, Mesh, rank_name
from edgemesh.wire.catalogue import ENDS, REPLY, SCOPE, LinkKind, Scope
from edgemesh.wire.ids import Role


def violations(mesh: Mesh) -> list[str]:
    """Every invariant that this mesh breaks; an empty list is the proof."""
    checks = (_names, _ends, _isolation, _endpoints, _reachability, _request_walk, _ranks, _sets)
    return [problem for check in checks for problem in check(mesh)]


def _names(mesh: Mesh) -> Iterator[str]:
    for what, names in (("actor", [a.name for a in mesh.actors]), ("link", [link.name for link in mesh.links])):
        if len(set(names)) < len(names):
            yield f"two {what}s have one name"


def _ends(mesh: Mesh) -> Iterator[str]:
    """Each end has a role that the kind of link is for, and the binder is one of them."""
    for link in mesh.links:
        for names, roles in zip((link.senders, link.receivers), ENDS[link.kind], strict=True):
            if not names or len(set(names)) < len(names):
                yield f"link {link.name} has an end without actors, or one twice"
            for name in names:
                if mesh.actor(name).role not in roles:
                    yield f"link {link.name} has {name} at an end that is not for a {mesh.actor(name).role}"
        if link.binder not in link.ends:
            yield f"link {link.name} is bound by {link.binder}, which is no end of it"
        if link.scope is not SCOPE[link.kind]:
            yield f"link {link.name} has the scope {link.scope}"


def _isolation(mesh: Mesh) -> Iterator[str]:
    """Request and step data reach one group at most, one plane at most."""
    for link in mesh.links:
        receivers = [mesh.actor(name) for name in link.receivers]
        groups = {actor.group for actor in receivers if actor.group is not None}
        if link.scope is not Scope.CONTROL and len(groups) > 1:
            yield f"link {link.name} carries data to {len(groups)} groups"
        if link.scope in {Scope.GROUP, Scope.PLACED}:
            inside = {mesh.actor(name).group for name in link.ends} - {None}
            if link.group is None or inside != {link.group}:
                yield f"link {link.name} of group {link.group} has ends in groups {sorted(map(str, inside))}"
        elif link.group is not None:
            yield f"link {link.name} is no group's own, but names group {link.group}"
        if {mesh.actor(name).plane for name in link.ends} - {None, link.plane} and link.scope is not Scope.CONTROL:
            yield f"link {link.name} joins planes"


def _endpoints(mesh: Mesh) -> Iterator[str]:
    """An endpoint belongs to one link, or to a pair of opposite ones; it fits, and its scheme suits its ends."""
    users: dict[str, list[Link]] = defaultdict(list)
    for link in mesh.links:
        users[link.endpoint].append(link)
    for endpoint, links in users.items():
        first, *others = links
        opposite = [
            (other.kind, other.senders, other.receivers, other.binder)
            == (REPLY.get(first.kind), first.receivers, first.senders, first.binder)
            for other in others
        ]
        if len(others) != (first.kind in REPLY) or not all(opposite):
            yield f"endpoint {endpoint} is shared by {', '.join(link.name for link in links)}"
        hosts = {mesh.actor(name).host for name in first.ends}
        if endpoint.startswith("ipc://"):
            if len(hosts) > 1:
                yield f"endpoint {endpoint} is a file, but its ends are on hosts {sorted(hosts)}"
            if len(endpoint.removeprefix("ipc://").encode()) > MAX_SOCKET_PATH:
                yield f"endpoint {endpoint} is too long for a socket"
        elif not endpoint.startswith("tcp://") or len(hosts) == 1:
            yield f"endpoint {endpoint} does not suit ends on hosts {sorted(hosts)}"


def _reachability(mesh: Mesh) -> Iterator[str]:
    """The mesh is one piece, and each host's supervisor hears and commands all actors of its host."""
    reached, frontier = set[str](), {mesh.actors[0].name}
    while frontier:
        reached |= frontier
        frontier = {name for each in frontier for link in mesh.links_of(each) for name in link.ends} - reached
    for actor in mesh.actors:
        if actor.name not in reached:
            yield f"{actor.name} is cut off"
        if actor.role is Role.SUPERVISOR:
            continue
        supervisors = [
            mesh.actor(link.senders[0])
            for link in mesh.links
            if link.kind is LinkKind.COMMAND and actor.name in link.receivers
        ]
        if [each.host for each in supervisors] != [actor.host]:
            yield f"{actor.name} is not commanded by the one supervisor of its host"


def _request_walk(mesh: Mesh) -> Iterator[str]:
    """From each gateway over the router to every group and its ranks in each plane, and back."""
    ways = {
        (link.kind, sender, receiver) for link in mesh.links for sender in link.senders for receiver in link.receivers
    }
    need = set[tuple[LinkKind, str, str]]()
    router = mesh.actors_of(Role.ROUTER)[0].name
    for group in mesh.actors_of(Role.GROUP):
        need.add((LinkKind.PLACE, router, group.name))
        need.add((LinkKind.LOAD, group.name, router))
        for gateway in mesh.actors_of(Role.GATEWAY):
            need |= {(LinkKind.SUBMIT, gateway.name, router), (LinkKind.REJECT, router, gateway.name)}
            need |= {(LinkKind.STEER, gateway.name, group.name), (LinkKind.EMIT, group.name, gateway.name)}
        for plane in mesh.planes:
            for name in mesh.rank_names(group.index, plane):
                need |= {(LinkKind.PLAN, group.name, name), (LinkKind.RESULT, name, group.name)}
    data = {way for way in ways if SCOPE[way[0]] is not Scope.CONTROL or way[0] is LinkKind.LOAD}
    for kind, sender, receiver in sorted(need ^ data):
        missing = (kind, sender, receiver) in need
        yield f"{'no' if missing else 'an unneeded'} {kind} link leads from {sender} to {receiver}"


def _ranks(mesh: Mesh) -> Iterator[str]:
    attn_tp = mesh.topology.attn_tp
    for plane in mesh.planes:
        for rank in range(mesh.topology.world):
            actor = mesh.actor(rank_name(rank, plane))
            if actor.group != rank // attn_tp or mesh.group_of(rank) != actor.group:
                yield f"{actor.name} is in group {actor.group}"
    for group in mesh.groups:
        if mesh.leader(group) != group * attn_tp:
            yield f"group {group} is led by rank {mesh.leader(group)}"


def _sets(mesh: Mesh) -> Iterator[str]:
    """Every group is in one coupled set; the groups of a set share a barrier, and no other group reaches it."""
    members = sorted(group for each in mesh.sets for group in each.groups)
    if members != list(mesh.groups):
        yield f"the coupled sets hold the groups {members}"
    for each in mesh.sets:
        arrivals = [link for link in mesh.links if link.kind is LinkKind.ARRIVE and link.receivers == (each.barrier,)]
        senders = {mesh.actor(name).group for link in arrivals for name in link.senders}
        if senders != (set(each.groups) if each.barrier else set()):
            yield f"the barrier of coupled set {each.index} hears the groups {sorted(map(str, senders))}"
