import tomllib
from pathlib import Path

import jsonschema
import msgspec
import pytest
from referencing import Registry, Resource

from edgemesh.api.openapi import openapi_schemas
from edgemesh.topology import Topology, shipped, shipped_names
from edgemesh.topology.schema import topology_schema, topology_schemas
from edgemesh.wire.catalogue import inbox
from edgemesh.wire.ids import Role
from edgemesh.wire.schema import all_messages, wire_schemas

COMMITTED = Path(__file__).resolve().parents[2] / "schemas"
BASE = "https://edgemesh.invalid/"
FILES = topology_schemas() | wire_schemas()
API = openapi_schemas()


def test_the_committed_schemas_are_those_of_the_code():
    committed = {path.relative_to(COMMITTED).as_posix(): path.read_bytes() for path in COMMITTED.rglob("*.json")}
    assert sorted(committed) == sorted(FILES | API)
    drifted = [name for name, content in (FILES | API).items() if committed[name] != content]
    assert not drifted, "run: edgemesh topology schema --write schemas"


@pytest.mark.parametrize("name", sorted(FILES))
def test_every_schema_is_a_schema(name):
    jsonschema.Draft202012Validator.check_schema(msgspec.json.decode(FILES[name]))


def test_every_key_of_the_topology_has_a_description_and_a_default():
    schema = topology_schema()
    for section in msgspec.structs.fields(Topology):
        properties = schema["$defs"][section.type.__name__]["properties"]
        for key in msgspec.structs.fields(section.type):
            assert properties[key.name]["description"].endswith(".")
            assert "default" in properties[key.name]


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_files_validate_and_a_misspelt_key_does_not(name):
    validator = jsonschema.Draft202012Validator(topology_schema())
    table = tomllib.loads(shipped(name).read_text())
    validator.validate(table)
    table["mesh"]["tpp"] = 1
    assert not validator.is_valid(table)


def test_the_message_schema_names_every_message_and_every_field_by_position():
    schema = msgspec.json.decode(FILES["messages.json"])
    for kind in all_messages():
        items = schema["$defs"][kind.__name__]["prefixItems"]
        assert items[0]["enum"] == [kind.__name__.lower()]
        assert [item["title"] for item in items[1:]] == list(kind.__struct_fields__)
    assert len(schema["oneOf"]) == len(all_messages()) > 30


def test_every_inbox_refers_to_exactly_its_messages():
    messages = Resource.from_contents(msgspec.json.decode(FILES["messages.json"]))
    registry = Registry().with_resource(BASE + "messages.json", messages)
    for role in Role:
        schema = msgspec.json.decode(FILES[f"inbox/{role}.json"]) | {"$id": f"{BASE}inbox/{role}.json"}
        assert {ref["$ref"].rpartition("/")[2] for ref in schema["oneOf"]} == {kind.__name__ for kind in inbox(role)}
        validator = jsonschema.Draft202012Validator(schema, registry=registry)
        stops = validator.is_valid(["stop", "because"])
        assert stops == (role is not Role.SUPERVISOR)
