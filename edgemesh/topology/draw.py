"""A mesh as a picture: SVG for people and pages, Mermaid for text. Pure: mesh in, text out."""

from collections.abc import Iterator
from typing import Final
from xml.sax.saxutils import escape

from msgspec import Struct

from edgemesh.topology.mesh import Actor, Mesh
from edgemesh.wire.ids import Plane, Role

INK: Final = "#1f2933"
FAINT: Final = "#9aa5b1"
BLUE: Final = "#2f6fde"
GREEN: Final = "#1f9d63"
FILLS: Final = {Plane.PREFILL: "#dbe9ff", Plane.DECODE: "#d8f3e3", Plane.MIXED: "#e8e2fb"}
EDGES: Final = {Plane.PREFILL: "#7aa7f0", Plane.DECODE: "#67c598", Plane.MIXED: "#a08fe0"}

PER_ROW: Final = 8
"""Ranks beside each other; a wider group wraps."""

CELL: Final = 58
ROW: Final = 34
PAD: Final = 14
TOP: Final = 92
MARGIN: Final = 28
GATEWAY_X: Final = 48
ROUTER_X: Final = 218
GROUP_X: Final = 376
LABEL: Final = 74


class Box(Struct, frozen=True):
    """Where something stands, in pixels."""

    x: float
    y: float
    w: float
    h: float

    @property
    def middle(self) -> float:
        """The height of its centre."""
        return self.y + self.h / 2

    @property
    def right(self) -> float:
        """Its right edge."""
        return self.x + self.w


class Layout(Struct, frozen=True):
    """Where every part of the picture stands."""

    gateways: tuple[Box, ...]
    router: Box
    groups: tuple[Box, ...]
    barrier: Box
    hosts: tuple[Box, ...]
    width: float
    height: float


def svg(mesh: Mesh) -> str:
    """The mesh as an SVG document: requests in blue, tokens in green, control in grey."""
    at = _layout(mesh)
    parts = [
        _open(at, headline(mesh)),
        f'<rect width="{at.width:g}" height="{at.height:g}" rx="12" fill="#ffffff"/>',
        _text(MARGIN, 38, mesh.topology.mesh.name, size=20, weight=600),
        _text(MARGIN, 60, headline(mesh), fill="#52606d"),
        *_hosts(mesh, at),
        *_wires(mesh, at),
        *(_pill(box, f"gateway-{index}", "#eaf1fe", BLUE) for index, box in enumerate(at.gateways)),
        _pill(at.router, "router-0", "#eaf1fe", BLUE),
        *(part for group in mesh.groups for part in _group(mesh, group, at.groups[group])),
        *([_pill(at.barrier, "barrier-0", "#f1f3f5", FAINT)] if mesh.topology.coupled else []),
        *_legend(mesh, at.height - 26),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _open(at: Layout, label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {at.width:g} {at.height:g}" width="{at.width:g}"'
        f' height="{at.height:g}" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
        f' font-size="13" fill="{INK}" role="img" aria-label="{escape(label)}">'
    )


def headline(mesh: Mesh) -> str:
    """The mesh in one line."""
    shape = mesh.topology
    planes = "prefill and decode planes" if shape.mesh.split else "one plane"
    groups = f"{shape.mesh.dp} group{'s' * (shape.mesh.dp > 1)} of {shape.attn_tp} rank{'s' * (shape.attn_tp > 1)}"
    hosts = len(shape.mesh.hosts)
    return f"{shape.mode}: {groups}, {planes}, {hosts} host{'s' * (hosts > 1)}"


def _layout(mesh: Mesh) -> Layout:
    shape = mesh.topology
    columns = min(PER_ROW, shape.attn_tp)
    rows = -(-shape.attn_tp // PER_ROW) * len(mesh.planes)
    width, height = LABEL + columns * CELL + 2 * PAD, 40 + rows * ROW + PAD
    groups, hosts, y = list[Box](), list[Box](), float(TOP)
    for host in range(len(shape.mesh.hosts)):
        first = y
        y += 34
        for actor in mesh.actors_of(Role.GROUP):
            if actor.host == host:
                groups.append(Box(GROUP_X, y, width, height))
                y += height + 16
        y += 28
        hosts.append(Box(GROUP_X - 18, first, width + 36, y - first))
        y += 18
    middle = (TOP + y) / 2 - 9
    gateways = tuple(
        Box(GATEWAY_X, middle - 17 + 46 * (index - (shape.gateway.processes - 1) / 2), 104, 34)
        for index in range(shape.gateway.processes)
    )
    top = min(0.0, gateways[0].y - 30 - TOP)
    if top:
        gateways = tuple(Box(box.x, box.y - top, box.w, box.h) for box in gateways)
    barrier = Box(GROUP_X + width + 86, middle - 17, 104, 34)
    right = barrier.right + 32 if shape.coupled else GROUP_X + width + 50
    bottom = max(y, gateways[-1].y + 66)
    return Layout(
        gateways, Box(ROUTER_X, middle - 17, 96, 34), tuple(groups), barrier, tuple(hosts), max(right, 660), bottom + 44
    )


def _hosts(mesh: Mesh, at: Layout) -> Iterator[str]:
    for host, box in enumerate(at.hosts):
        yield (
            f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.w:g}" height="{box.h:g}" rx="12" fill="#fafbfc"'
            f' stroke="#d3d9df" stroke-dasharray="5 4"/>'
        )
        yield _text(box.x + 12, box.y + 21, f"host {host}", fill="#7b8794", size=12)
        yield _text(box.right - 12, box.y + 21, mesh.topology.mesh.hosts[host], fill="#7b8794", size=12, anchor="end")
        yield _text(
            box.x + box.w / 2,
            box.y + box.h - 12,
            f"vault-{host} · supervisor-{host}",
            fill="#7b8794",
            size=12,
            anchor="middle",
        )


def _group(mesh: Mesh, group: int, box: Box) -> Iterator[str]:
    yield (
        f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.w:g}" height="{box.h:g}" rx="10" fill="#ffffff" stroke="{INK}"'
        f' stroke-width="1.2"/>'
    )
    yield _text(box.x + PAD, box.y + 25, f"group-{group}", weight=600)
    y = box.y + 40
    for plane in mesh.planes:
        yield _text(box.x + PAD, y + 18, plane, fill="#52606d", size=12)
        for place, name in enumerate(mesh.rank_names(group, plane)):
            down, across = divmod(place, PER_ROW)
            yield _rank(
                mesh.actor(name), mesh.actor(f"group-{group}"), box.x + LABEL + PAD + across * CELL, y + down * ROW
            )
        y += ROW * -(-mesh.attn_tp // PER_ROW)


def _rank(rank: Actor, group: Actor, x: float, y: float) -> str:
    assert rank.plane is not None  # every rank has one
    label = str(rank.index) if rank.host == group.host else f"{rank.index} @{rank.host}"
    fill, edge = FILLS[rank.plane], EDGES[rank.plane]
    return (
        f'<g><title>{rank.name} on host {rank.host}</title><rect x="{x:g}" y="{y:g}" width="{CELL - 8}" height="{ROW - 8}"'
        f' rx="6" fill="{fill}" stroke="{edge}"/>{_text(x + (CELL - 8) / 2, y + 18, label, size=12, anchor="middle")}</g>'
    )


def _wires(mesh: Mesh, at: Layout) -> Iterator[str]:
    for gateway in at.gateways:
        yield _curve(gateway.right, gateway.middle, at.router.x, at.router.middle, BLUE)
    for box in at.groups:
        above = box.middle < at.router.middle
        yield _curve(at.router.right, at.router.middle, box.x, box.middle + (8 if above else -8), BLUE)
        if mesh.topology.coupled:
            yield _curve(box.right, box.middle, at.barrier.x, at.barrier.middle, FAINT, dashed=True)
        yield _egress(box, at, above=above)
    for gateway in at.gateways:
        yield f'<circle cx="{gateway.x:g}" cy="{gateway.middle:g}" r="3.5" fill="{GREEN}"/>'


def _egress(group: Box, at: Layout, *, above: bool) -> str:
    """From a group past the router, above or below it, and into each gateway from the left."""
    y = group.middle + (-8 if above else 8)
    last = at.gateways[-1]
    bend = at.gateways[0].y - 24 if above else last.y + last.h + 24
    left, turn, x = GATEWAY_X - 20, 12 if above else -12, at.router.x
    path = f"M{group.x:g} {y:g} C{group.x - 60:g} {y:g} {x + 60:g} {bend:g} {x - 20:g} {bend:g} H{left + 12:g}"
    path += f" Q{left:g} {bend:g} {left:g} {bend + turn:g}"
    for gateway in at.gateways:
        path += f" M{left:g} {bend + turn:g} V{gateway.middle - turn:g} Q{left:g} {gateway.middle:g} {gateway.x - 6:g} {gateway.middle:g} H{gateway.x:g}"
    return f'<path d="{path}" fill="none" stroke="{GREEN}" stroke-width="1.4"/>'


def _legend(mesh: Mesh, y: float) -> Iterator[str]:
    entries = [(BLUE, "requests", False), (GREEN, "tokens, straight to their gateway", False)]
    if mesh.topology.coupled:
        entries.append((FAINT, "control: arrive and release of each tick", True))
    x = float(MARGIN)
    for colour, words, dashed in entries:
        yield _curve(x, y - 4, x + 26, y - 4, colour, dashed=dashed)
        yield _text(x + 34, y, words, size=12, fill="#52606d")
        x += 62 + 6.4 * len(words)


def _curve(x1: float, y1: float, x2: float, y2: float, colour: str, *, dashed: bool = False) -> str:
    half = (x1 + x2) / 2
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<path d="M{x1:g} {y1:g} C{half:g} {y1:g} {half:g} {y2:g} {x2:g} {y2:g}" fill="none" stroke="{colour}"'
        f' stroke-width="1.6"{dash}/>'
    )


def _pill(box: Box, name: str, fill: str, edge: str) -> str:
    label = _text(box.x + box.w / 2, box.middle + 4.5, name, anchor="middle")
    return (
        f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.w:g}" height="{box.h:g}" rx="{box.h / 2:g}" fill="{fill}"'
        f' stroke="{edge}"/>{label}'
    )


def _text(
    x: float, y: float, words: str, *, size: int = 13, weight: int = 400, fill: str = INK, anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" fill="{fill}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )


def mermaid(mesh: Mesh) -> str:
    """The mesh as a Mermaid flowchart, one subgraph per group."""
    lines = ["flowchart LR"]
    gateways = [actor.name for actor in mesh.actors_of(Role.GATEWAY)]
    lines += [f"  {_id(gateway)}([{gateway}]) --> router0([router-0])" for gateway in gateways]
    for group in mesh.groups:
        name = f"group-{group}"
        lines += [f"  subgraph box{group}[group {group}]", f"    {_id(name)}[{name}]"]
        for plane in mesh.planes:
            first, *_, last = (*mesh.ranks_of(group), *mesh.ranks_of(group))
            ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
            lines.append(f"    {_id(name)} <--> {plane}{group}[{plane}: {ranks}]")
        lines += ["  end", f"  router0 --> {_id(name)}"]
        lines += [f"  {_id(name)} -- tokens --> {_id(gateway)}" for gateway in gateways]
        if mesh.topology.coupled:
            lines.append(f"  {_id(name)} <-. ticks .-> barrier0([barrier-0])")
    return "\n".join(lines) + "\n"


def _id(name: str) -> str:
    return name.replace("-", "")
