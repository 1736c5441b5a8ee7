"""The proof finds what is wrong: each broken mesh is named."""

import msgspec
import pytest

from edgemesh.topology import CoupledSet, Gateway, MeshShape, Topology, derive
from edgemesh.topology.proof import violations
from edgemesh.wire.catalogue import Scope
from edgemesh.wire.ids import Plane

MESH = derive(Topology(mesh=MeshShape(tp=4, dp=2), gateway=Gateway(processes=2)), "/tmp/run")
PLACE = next(link for link in MESH.links if link.name == "place-0")


def broken(name, **changes):
    links = tuple(msgspec.structs.replace(each, **changes) if each.name == name else each for each in MESH.links)
    return msgspec.structs.replace(MESH, links=links)


def without(*names):
    return msgspec.structs.replace(MESH, links=tuple(each for each in MESH.links if each.name not in names))


def test_the_mesh_itself_is_sound():
    assert violations(MESH) == []


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (broken("place-0", receivers=("group-0", "group-1")), "carries data to 2 groups"),
        (broken("plan-0.decode", receivers=("rank-0.decode", "rank-2.decode")), "has ends in groups"),
        (broken("plan-1.decode", group=0), "has ends in groups"),
        (broken("emit-0", group=0), "no group's own"),
        (broken("plan-0.decode", receivers=("rank-0.prefill", "rank-1.prefill")), "joins planes"),
        (broken("submit", receivers=("group-0",)), "not for a group"),
        (broken("submit", senders=()), "without actors"),
        (broken("emit-0", senders=("group-0", "group-0", "group-1")), "or one twice"),
        (broken("steer-0", binder="router-0"), "no end of it"),
        (broken("steer-0", scope=Scope.CONTROL), "has the scope control"),
        (broken("steer-0", endpoint=PLACE.endpoint), "is shared by"),
        (broken("reject", endpoint="ipc:///tmp/run/sock/other"), "is shared by"),
        (broken("load", endpoint="ipc:///tmp/" + "x" * 100), "too long"),
        (broken("load", endpoint="tcp://127.0.0.1:7700"), "does not suit"),
        (without("place-1"), "no place link leads from router-0 to group-1"),
        (without("emit-1"), "no emit link leads from group-0 to gateway-1"),
        (without("report-0", "command-0"), "not commanded"),
        (without("arrive-0", "release-0"), "barrier of coupled set 0 hears"),
        (broken("steer-0", senders=("gateway-0",)), "no steer link leads from gateway-1 to group-0"),
        (msgspec.structs.replace(MESH, actors=(*MESH.actors, MESH.actors[0])), "two actors have one name"),
        (msgspec.structs.replace(MESH, sets=(CoupledSet(0, (0,), None),)), "coupled sets hold"),
    ],
)
def test_a_broken_mesh_is_found_out(mesh, words):
    assert any(words in problem for problem in violations(mesh)), violations(mesh)


def test_an_actor_that_no_link_reaches_and_a_rank_of_the_wrong_group_are_found():
    cut = without("report-0", "command-0", "lease-0", "grant-0")
    assert "vault-0 is cut off" in violations(cut)
    actors = tuple(
        msgspec.structs.replace(each, group=0) if each.name == "rank-3.decode" else each for each in MESH.actors
    )
    problems = violations(msgspec.structs.replace(MESH, actors=actors))
    assert "rank-3.decode is in group 0" in problems
    assert MESH.actor("rank-3.decode").plane is Plane.DECODE
