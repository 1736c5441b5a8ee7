"""The topology files that come with EdgeMesh, found in a checkout and in an installed wheel alike."""

from pathlib import Path
from typing import Final

from edgemesh.topology.errors import TopologyError

_PACKAGE: Final = Path(__file__).resolve().parent.parent
_PLACES: Final = (_PACKAGE / "shipped", _PACKAGE.parent / "topology")


def shipped_names() -> tuple[str, ...]:
    """The names of the shipped files, without ``.toml``."""
    return tuple(sorted(path.stem for path in _directory().glob("*.toml")))


def shipped(name: str) -> Path:
    """The file of a shipped topology, by its name with or without ``.toml``.

    Raises ``TopologyError`` for a name that is not shipped.
    """
    stem = name.removesuffix(".toml")
    names = shipped_names()
    if stem not in names:
        message = f"no shipped topology is called {name!r}; there are {', '.join(names)}."
        raise TopologyError(message)
    return _directory() / f"{stem}.toml"


def _directory() -> Path:
    for place in _PLACES:
        if place.is_dir():
            return place
    message = f"the shipped topology files are not where they were installed ({_PLACES[0]}); install EdgeMesh again."
    raise TopologyError(message)
