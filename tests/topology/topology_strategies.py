"""Every legal topology up to 64 ranks and 4 hosts, as a Hypothesis strategy."""

import msgspec
from hypothesis import strategies as st

from edgemesh.topology import Gateway, MeshShape, Topology
from edgemesh.wire.ids import MAX_RANKS

SHAPES = [
    (tp, dp, attn_tp)
    for dp in range(1, MAX_RANKS + 1)
    for attn_tp in range(1, MAX_RANKS // dp + 1)
    for tp in sorted({attn_tp, dp * attn_tp})
]
"""(tp, dp, attn_tp) of plain TP, plain DP and attention DP."""

HOSTS = ("10.0.0.1", "fd00::2", "node-3.example", "10.0.0.4")


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    tp, dp, attn_tp = draw(st.sampled_from(SHAPES))
    hosts = draw(st.integers(1, min(len(HOSTS), dp * attn_tp)))
    default = tp == dp * attn_tp
    shape = MeshShape(
        tp=tp,
        dp=dp,
        attn_tp=0 if default and draw(st.booleans()) else attn_tp,
        split=draw(st.booleans()),
        hosts=HOSTS[:hosts],
        keys_dir="/etc/edgemesh/keys" if hosts > 1 else "",
        base_port=draw(st.sampled_from([1024, 7700, 60000])),
    )
    return msgspec.structs.replace(Topology(), mesh=shape, gateway=Gateway(processes=draw(st.integers(1, 5))))
