"""The topology file as JSON Schema, with every key's meaning, bounds and default."""

import msgspec

from edgemesh.topology.config import Topology
from edgemesh.wire.schema import DRAFT, Schema, render


def topology_schema() -> Schema:
    """The schema of a topology file, all sections in one document."""
    return {"$schema": DRAFT, "title": "EdgeMesh topology", **msgspec.json.schema(Topology)}


def topology_schemas() -> dict[str, bytes]:
    """File name -> content."""
    return {"topology.json": render(topology_schema())}
