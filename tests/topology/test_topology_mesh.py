from collections import Counter

import pytest
from hypothesis import given, settings
from topology_strategies import HOSTS, SHAPES, topologies

from edgemesh.topology import MeshShape, Topology, TopologyError, derive
from edgemesh.topology.proof import violations
from edgemesh.wire.catalogue import ENDS, REPLY, LinkKind, Scope
from edgemesh.wire.ids import Plane, Role

RUN_DIR = "/run/user/1000/edgemesh/tp8-dp2-0123456789abcdef"

DATA = {LinkKind.SUBMIT, LinkKind.REJECT, LinkKind.PLACE, LinkKind.STEER, LinkKind.PLAN, LinkKind.RESULT, LinkKind.EMIT}
EVERY = settings(max_examples=300, deadline=None)


@given(topologies())
@EVERY
def test_every_legal_mesh_holds_every_invariant(topology):
    mesh = derive(topology, RUN_DIR)
    shape = mesh.topology

    assert violations(mesh) == []
    assert shape.world == shape.mesh.dp * shape.attn_tp
    assert shape.mesh.tp in {shape.world, shape.attn_tp}
    assert len({actor.name for actor in mesh.actors}) == len(mesh.actors)
    assert len(mesh.actors_of(Role.RANK)) == shape.world * (2 if shape.mesh.split else 1)
    assert len(mesh.actors_of(Role.GROUP)) == shape.mesh.dp
    assert len(mesh.actors_of(Role.BARRIER)) == (1 if shape.coupled else 0)
    assert len(mesh.actors_of(Role.VAULT)) == len(mesh.actors_of(Role.SUPERVISOR)) == len(shape.mesh.hosts)


@given(topologies())
@EVERY
def test_no_link_with_request_or_step_data_reaches_two_groups(topology):
    mesh = derive(topology, RUN_DIR)
    for link in mesh.links:
        groups = {mesh.actor(name).group for name in link.receivers} - {None}
        if link.kind in DATA:
            assert link.scope is not Scope.CONTROL
            assert len(groups) <= 1
        else:
            assert link.scope is Scope.CONTROL
        if link.kind in {LinkKind.PLACE, LinkKind.STEER, LinkKind.PLAN, LinkKind.RESULT}:
            inside = {mesh.actor(name).group for name in link.ends if mesh.actor(name).group is not None}
            assert inside == {link.group}
            outside = {mesh.actor(name).role for name in link.ends if mesh.actor(name).group is None}
            assert outside <= {Role.ROUTER, Role.GATEWAY}


@given(topologies())
@EVERY
def test_endpoints_repeat_only_for_the_two_ways_of_one_connection(topology):
    mesh = derive(topology, RUN_DIR)
    by_endpoint = Counter(link.endpoint for link in mesh.links)
    ways = {(link.endpoint, link.kind): link for link in mesh.links}
    assert len(ways) == len(mesh.links)
    for link in mesh.links:
        assert link.binder in link.ends
        if link.kind in REPLY:
            back = ways[link.endpoint, REPLY[link.kind]]
            assert (back.senders, back.receivers, back.binder) == (link.receivers, link.senders, link.binder)
            assert by_endpoint[link.endpoint] == 2
        elif link.kind not in REPLY.values():
            assert by_endpoint[link.endpoint] == 1
        if link.endpoint.startswith("ipc://"):
            assert len(link.endpoint.removeprefix("ipc://").encode()) < 104
            assert len({mesh.actor(name).host for name in link.ends}) == 1
        else:
            host, _, port = link.endpoint.removeprefix("tcp://").rpartition(":")
            assert host.strip("[]") == mesh.topology.mesh.hosts[mesh.actor(link.binder).host]
            assert int(port) <= 65535


@given(topologies())
@EVERY
def test_ranks_groups_sets_and_splits_are_what_the_three_numbers_say(topology):
    mesh = derive(topology, RUN_DIR)
    shape = mesh.topology
    for actor in mesh.actors_of(Role.RANK):
        assert actor.group == actor.index // shape.attn_tp == mesh.group_of(actor.index)
    assert [rank for group in mesh.groups for rank in mesh.ranks_of(group)] == list(range(shape.world))
    for group in mesh.groups:
        assert mesh.leader(group) == group * shape.attn_tp
        assert group in mesh.set_of(group).groups
        assert mesh.actor(f"group-{group}").host == mesh.actor(mesh.rank_names(group, mesh.planes[0])[0]).host
    for each in mesh.sets:
        assert len(each.groups) == (shape.mesh.dp if shape.coupled else 1)
        assert (each.barrier is None) == (len(each.groups) == 1)
        parts = [mesh.split_of(rank) for rank in mesh.world_of(each.index)]
        assert [part.mlp_rank for part in parts] == list(range(shape.mesh.tp))
        assert {part.mlp_tp for part in parts} == {shape.mesh.tp}
        assert {part.attn_tp for part in parts} == {shape.attn_tp}
        assert [part.attn_rank for part in parts] == list(range(shape.attn_tp)) * len(each.groups)
    assert mesh.planes == ((Plane.PREFILL, Plane.DECODE) if shape.mesh.split else (Plane.MIXED,))


@given(topologies())
@EVERY
def test_ranks_are_dealt_to_hosts_in_order_and_evenly_and_groups_stay_whole(topology):
    mesh = derive(topology, RUN_DIR)
    shape = mesh.topology
    for plane in mesh.planes:
        ranks = [actor for actor in mesh.actors_of(Role.RANK) if actor.plane is plane]
        hosts = [actor.host for actor in ranks]
        assert hosts == sorted(hosts)
        assert set(hosts) == set(range(len(shape.mesh.hosts)))
        if shape.mesh.dp >= len(shape.mesh.hosts):
            held = [len({a.group for a in ranks if a.host == host}) for host in range(len(shape.mesh.hosts))]
            assert all(len({actor.host for actor in ranks if actor.group == group}) == 1 for group in mesh.groups)
        else:
            held = [hosts.count(host) for host in range(len(shape.mesh.hosts))]
        assert max(held) - min(held) <= 1


@given(topologies())
@EVERY
def test_every_actor_hears_from_some_link_of_its_role_and_derivation_is_pure(topology):
    mesh = derive(topology, RUN_DIR)
    assert derive(mesh.topology, RUN_DIR) == mesh
    for actor in mesh.actors:
        heard = {link.kind for link in mesh.links_of(actor.name) if actor.name in link.receivers}
        could = {kind for kind in LinkKind if actor.role in ENDS[kind][1]}
        if not mesh.topology.coupled:
            could.discard(LinkKind.RELEASE)
        assert heard == could
        assert mesh.links_of(actor.name) == tuple(link for link in mesh.links if actor.name in link.ends)


@pytest.mark.full
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("hosts", [1, 2, 3, 4])
def test_every_legal_shape_one_by_one(split, hosts):
    for tp, dp, attn_tp in SHAPES:
        if hosts <= dp * attn_tp:
            shape = MeshShape(tp=tp, dp=dp, attn_tp=attn_tp, split=split, hosts=HOSTS[:hosts], keys_dir="keys")
            assert violations(derive(Topology(mesh=shape), RUN_DIR)) == []


def test_legal_numbers_are_exactly_the_three_modes():
    legal, refusals = set(), set()
    for tp in range(1, 17):
        for dp in range(1, 17):
            for attn_tp in range(17):
                try:
                    topology = derive(Topology(mesh=MeshShape(tp=tp, dp=dp, attn_tp=attn_tp)), RUN_DIR).topology
                except TopologyError as error:
                    refusals.add(str(error))
                    continue
                assert attn_tp in {0, topology.attn_tp}
                legal.add((tp, dp, topology.attn_tp))
    assert all("Legal " in each or "the most is 64" in each for each in refusals)
    assert legal == {shape for shape in SHAPES if max(shape) <= 16}


def test_a_run_directory_that_is_too_long_for_sockets_is_refused():
    with pytest.raises(TopologyError, match=r"at least \d+ bytes shorter"):
        derive(Topology(), "/tmp/" + "x" * 90)


def test_unknown_names_and_numbers_have_no_answer():
    mesh = derive(Topology(), RUN_DIR)
    for ask in (lambda: mesh.actor("rank-1.decode"), lambda: mesh.links_of("x-0")):
        with pytest.raises(KeyError):
            ask()
    for ask in (lambda: mesh.ranks_of(1), lambda: mesh.leader(-1), lambda: mesh.world_of(1)):
        with pytest.raises(IndexError):
            ask()
