"""What a topology comes to: every actor, every link, and the questions that actors ask about them."""

from functools import cached_property

from msgspec import Struct

from edgemesh.topology.config import Topology
from edgemesh.wire.catalogue import LinkKind, Scope
from edgemesh.wire.ids import Plane, Role


class Actor(Struct, frozen=True):
    """One process. ``group`` is set for groups and ranks, ``plane`` for ranks; ``host`` indexes ``mesh.hosts``."""

    name: str
    role: Role
    index: int
    host: int
    group: int | None = None
    plane: Plane | None = None


class Link(Struct, frozen=True):
    """A one-directional way for the messages of one kind.

    ``binder`` is the end that binds ``endpoint``; a pair of opposite links shares one endpoint. ``group`` is set where
    the messages are one group's alone, ``plane`` where they are one plane's.
    """

    name: str
    kind: LinkKind
    scope: Scope
    group: int | None
    plane: Plane | None
    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    endpoint: str
    binder: str

    @property
    def ends(self) -> tuple[str, ...]:
        """Every actor at either end."""
        return self.senders + self.receivers


class CoupledSet(Struct, frozen=True):
    """Groups that step together. ``barrier`` is None for a single group, which runs the barrier's machine itself."""

    index: int
    groups: tuple[int, ...]
    barrier: str | None


class RankSplit(Struct, frozen=True):
    """A rank's part of each layer: attention over its group, the MLP over its coupled set or its group."""

    attn_rank: int
    attn_tp: int
    mlp_rank: int
    mlp_tp: int


class Mesh(Struct, frozen=True, dict=True):
    """All actors and links. Look-ups raise ``KeyError`` or ``IndexError`` for what the mesh does not have."""

    topology: Topology
    run_dir: str
    actors: tuple[Actor, ...]
    links: tuple[Link, ...]
    sets: tuple[CoupledSet, ...]

    @cached_property
    def _actors(self) -> dict[str, Actor]:
        return {actor.name: actor for actor in self.actors}

    @cached_property
    def _roles(self) -> dict[Role, tuple[Actor, ...]]:
        return {role: tuple(actor for actor in self.actors if actor.role is role) for role in Role}

    @cached_property
    def _links_of(self) -> dict[str, tuple[Link, ...]]:
        ends: dict[str, list[Link]] = {actor.name: [] for actor in self.actors}
        for link in self.links:
            for name in link.ends:
                ends[name].append(link)
        return {name: tuple(links) for name, links in ends.items()}

    @cached_property
    def _set_of(self) -> dict[int, CoupledSet]:
        return {group: each for each in self.sets for group in each.groups}

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The planes of this mesh, prefill before decode."""
        return self.topology.planes

    @property
    def groups(self) -> range:
        """The indices of all groups."""
        return range(self.topology.mesh.dp)

    @property
    def attn_tp(self) -> int:
        """Ranks per group."""
        return self.topology.attn_tp

    @property
    def threads(self) -> int:
        """CPU threads of each rank process."""
        return self.topology.engine.threads

    def actor(self, name: str) -> Actor:
        """The actor of this name."""
        return self._actors[name]

    def actors_of(self, role: Role) -> tuple[Actor, ...]:
        """Every actor of a role, by index (ranks: plane by plane)."""
        return self._roles[role]

    def links_of(self, name: str) -> tuple[Link, ...]:
        """Every link that an actor is an end of."""
        return self._links_of[name]

    def set_of(self, group: int) -> CoupledSet:
        """The coupled set that a group belongs to."""
        return self._set_of[group]

    def ranks_of(self, group: int) -> tuple[int, ...]:
        """The rank numbers of a group, its leader first."""
        if group not in self.groups:
            raise IndexError(group)
        first = group * self.attn_tp
        return tuple(range(first, first + self.attn_tp))

    def rank_names(self, group: int, plane: Plane) -> tuple[str, ...]:
        """The actor names of a group's ranks in one plane, its leader first."""
        return tuple(rank_name(rank, plane) for rank in self.ranks_of(group))

    def group_of(self, rank: int) -> int:
        """The group of a rank number."""
        return rank // self.attn_tp

    def leader(self, group: int) -> int:
        """The rank number that answers for its group."""
        return self.ranks_of(group)[0]

    def world_of(self, index: int) -> tuple[int, ...]:
        """The rank numbers of a coupled set, over which its ``world`` collectives run."""
        return tuple(rank for group in self.sets[index].groups for rank in self.ranks_of(group))

    def split_of(self, rank: int) -> RankSplit:
        """Which part of each layer a rank number holds."""
        group = self.group_of(rank)
        attn, world = self.ranks_of(group), self.world_of(self.set_of(group).index)
        return RankSplit(attn.index(rank), len(attn), world.index(rank), len(world))


def rank_name(rank: int, plane: Plane) -> str:
    """``rank-3.decode``."""
    return f"{Role.RANK}-{rank}.{plane}"
