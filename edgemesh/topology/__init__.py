"""One TOML file to every process and link of a mesh: ``load`` reads and checks it, ``derive`` draws the consequences.

Three numbers decide the shape (``world = dp * attn_tp`` always):

==============  ===========================  =====================================================
mode            numbers                      meaning
==============  ===========================  =====================================================
plain TP        ``dp == 1``                  one group, ``tp`` ranks
attention DP    ``attn_tp == tp / dp``       every MLP spans all groups, so they step together
plain DP        ``attn_tp == tp``            ``dp`` independent groups of ``tp`` ranks each
==============  ===========================  =====================================================
"""

from edgemesh.topology.config import (
    Barrier,
    Decode,
    Engine,
    Gateway,
    Group,
    MeshShape,
    Model,
    Prefill,
    Router,
    Supervisor,
    Topology,
    Trace,
)
from edgemesh.topology.derivation import derive
from edgemesh.topology.errors import TopologyError
from edgemesh.topology.files import shipped, shipped_names
from edgemesh.topology.machine import preflight
from edgemesh.topology.mesh import Actor, CoupledSet, Link, Mesh, RankSplit
from edgemesh.topology.parse import load, parse
from edgemesh.topology.rules import resolve

__all__ = [
    "Actor",
    "Barrier",
    "CoupledSet",
    "Decode",
    "Engine",
    "Gateway",
    "Group",
    "Link",
    "Mesh",
    "MeshShape",
    "Model",
    "Prefill",
    "RankSplit",
    "Router",
    "Supervisor",
    "Topology",
    "TopologyError",
    "Trace",
    "derive",
    "load",
    "parse",
    "preflight",
    "resolve",
    "shipped",
    "shipped_names",
]
