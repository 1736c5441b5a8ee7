"""Every message type over every link, and between actors that have none: exactly the permitted pairs pass."""

from itertools import product

import msgspec
import pytest
from wire_strategies import least

from edgemesh.runtime.link import Inlet, LinkRefused, outlets
from edgemesh.runtime.memory import MemoryNet, Sent
from edgemesh.topology import Gateway, MeshShape, Topology, derive
from edgemesh.wire import messages as wire
from edgemesh.wire.catalogue import CARRIES, SCOPE, LinkKind, Scope
from edgemesh.wire.codec import Decoder, WireError, encode
from edgemesh.wire.ids import Role
from edgemesh.wire.schema import all_messages

PERMITTED = {
    "submit": "Submit",
    "reject": "Rejected",
    "place": "Place",
    "steer": "Cancel Credit",
    "plan": "Plan IdlePlan",
    "result": "Attached Done IdleDone StepFault",
    "emit": "Accepted Emit Failed",
    "arrive": "Arrive Resume",
    "release": "Release",
    "load": "LoadReport",
    "lease": "Lease",
    "grant": "Grant",
    "report": "Hello Loading Ready VaultReady Progress Fault Drained",
    "command": "Begin Health Drain Stop",
}
"""The whole table a second time, in plain words: to change it, change it twice."""

MESHES = {
    "attention-dp-split": MeshShape(tp=4, dp=2),
    "attention-dp-unified": MeshShape(tp=2, dp=2, split=False),
    "plain-dp-split": MeshShape(tp=2, dp=2, attn_tp=2),
    "plain-tp-two-hosts": MeshShape(tp=2, hosts=("10.0.0.1", "10.0.0.2"), keys_dir="keys"),
}


def mesh_of(name):
    return derive(Topology(mesh=MESHES[name], gateway=Gateway(processes=2)), "/run/edgemesh")


def may(kind):
    return {getattr(wire, name) for name in PERMITTED[kind].split()}


def fitting(kind, link, sender, receiver):
    """A message whose words about group, plane and ends are true on this way."""
    known = {"actor": sender.name}
    for end in (receiver, sender):
        if end.group is not None:
            known["group"] = end.group
        if end.plane is not None:
            known["plane"] = end.plane
        if end.role in {Role.GATEWAY, Role.RANK}:
            known[str(end.role)] = end.index
    if link.group is not None:
        known["group"] = link.group
    return msgspec.structs.replace(
        least(kind), **{field: value for field, value in known.items() if field in kind.__struct_fields__}
    )


def ways(mesh):
    return [
        (link, mesh.actor(sender), mesh.actor(receiver))
        for link in mesh.links
        for sender in link.senders
        for receiver in link.receivers
    ]


def test_the_table_of_permissions_says_what_it_says_here():
    assert {kind: set(CARRIES[kind]) for kind in LinkKind} == {kind: may(kind) for kind in LinkKind}


def test_control_links_carry_no_request_or_step_data():
    data = {wire.Submit, wire.Rejected, wire.Place, wire.Cancel, wire.Credit, wire.Accepted, wire.Emit, wire.Failed}
    data |= {wire.Plan, wire.IdlePlan, wire.Done, wire.IdleDone, wire.StepFault, wire.Attached}
    control = {kind for link, kinds in CARRIES.items() if SCOPE[link] is Scope.CONTROL for kind in kinds}
    assert not data & control
    assert data | control == set(all_messages())


@pytest.mark.parametrize("kind", LinkKind)
def test_each_links_decoder_takes_exactly_its_messages(kind):
    decoder = Decoder(*CARRIES[kind])
    for each in all_messages():
        frames = encode(least(each))
        if each in may(kind):
            assert decoder.decode(frames) == least(each)
        else:
            with pytest.raises(WireError):
                decoder.decode(frames)


@pytest.mark.parametrize("name", MESHES)
def test_between_any_two_actors_exactly_the_permitted_messages_pass_both_ends(name):
    mesh = mesh_of(name)
    sent: list[Sent] = []
    net = MemoryNet(mesh, lambda: 0, sent.append)
    ports = {actor.name: net.port(actor.name) for actor in mesh.actors}
    links = {(link.kind, sender.name, receiver.name): (link, sender, receiver) for link, sender, receiver in ways(mesh)}
    ordinary = {each: (least(each), tuple(encode(least(each)))) for each in all_messages()}
    passed = set()
    for (source, port), to, kind in product(ports.items(), ports, LinkKind):
        way = links.get((kind, source, to))
        for each, (message, frames) in ordinary.items():
            if way:
                message = fitting(each, *way)  # noqa: PLW2901 - what this way could carry
                frames = tuple(encode(message))  # noqa: PLW2901
            try:
                port.send(kind, message, to)
            except LinkRefused:
                assert port.trace.events.pop()[0] == "link.refused"
                assert net.admit(Sent(source, to, kind, message, frames)) is None
                assert ports[to].trace.events.pop()[0] in {"link.refused", "link.undecodable"}
            else:
                assert net.admit(sent.pop()) == message
                passed.add((kind, source, to, each))
    assert passed == {(*way, each) for way in links for each in may(way[0])}


@pytest.mark.parametrize("name", MESHES)
def test_another_groups_planes_gateways_ranks_or_actors_words_are_refused_at_both_ends(name):
    mesh = mesh_of(name)
    tried = set()
    for link, sender, receiver in ways(mesh):
        permit = outlets(mesh, sender.name)[link.kind, receiver.name]
        inlet = Inlet(mesh, link, receiver.name)
        for each in CARRIES[link.kind]:
            message = fitting(each, link, sender, receiver)
            permit.check(message)
            inlet.check(message, sender.name, 0)
            for field, other in (
                ("group", 63),
                ("gateway", 200),
                ("rank", 63),
                ("actor", "rank-63.decode"),
                ("plane", "mixed"),
            ):
                if field not in each.__struct_fields__ or (field, link.kind) in FREE:
                    continue
                if getattr(message, field) == other:
                    other = "decode"  # noqa: PLW2901 - the unified mesh's own plane is the other one
                wrong = msgspec.structs.replace(message, **{field: other})
                with pytest.raises(LinkRefused, match=field):
                    permit.check(wrong)
                with pytest.raises(LinkRefused, match=field):
                    inlet.check(wrong, sender.name, 0)
                tried.add((field, link.kind))
    assert ("group", LinkKind.PLACE) in tried
    assert ("rank", LinkKind.RESULT) in tried
    assert ("gateway", LinkKind.EMIT) in tried


FREE = {("plane", LinkKind.ARRIVE), ("plane", LinkKind.RELEASE)}
"""One barrier serves every plane of its set."""
