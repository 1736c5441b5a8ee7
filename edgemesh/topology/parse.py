"""Text to a checked topology. Every mistake is named with its key, its value, what is legal, and the nearest key."""

import difflib
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from edgemesh.topology.config import Section, Topology
from edgemesh.topology.errors import TopologyError
from edgemesh.topology.files import shipped
from edgemesh.topology.rules import resolve

MAX_FILE_BYTES: Final = 1 << 20

_VERY_NEAR: Final = 0.75
"""How alike two names must be for one to be the other with a slip."""

Table = dict[str, Any]


def load(path: Path | str, overrides: Sequence[str] = ()) -> Topology:
    """Read, check and resolve a topology file, or a shipped one by its bare name (``tp8-dp2``).

    ``overrides`` are ``section.key=value``. Raises ``TopologyError``.
    """
    file = Path(path).expanduser()
    if isinstance(path, str) and re.fullmatch(r"[a-z0-9-]+", path) and not file.is_file():
        file = shipped(path)
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
        text = content.decode()
    except OSError as error:
        message = f"cannot read the topology file {file}: {error.strerror or error}."
        raise TopologyError(message) from error
    except UnicodeDecodeError as error:
        message = f"the topology file {file} is not UTF-8 text (byte {error.start}); save it as UTF-8."
        raise TopologyError(message) from error
    if len(content) > MAX_FILE_BYTES:
        message = f"the topology file {file} is larger than {MAX_FILE_BYTES} bytes; it should be a page of text."
        raise TopologyError(message)
    try:
        return parse(text, overrides)
    except TopologyError as error:
        message = f"{file}: {error}"
        raise TopologyError(message) from error


def parse(text: str, overrides: Sequence[str] = ()) -> Topology:
    """The topology that a TOML text and its overrides describe. Raises ``TopologyError``."""
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        message = f"this is not TOML: {error}."
        raise TopologyError(message) from error
    for override in overrides:
        _override(table, override)
    _check_keys(table)
    try:
        topology = msgspec.convert(table, Topology)
    except msgspec.ValidationError as error:
        raise TopologyError(_explain(table, str(error))) from error
    return resolve(topology)


def _override(table: Table, override: str) -> None:
    """Put one ``section.key=value`` into the table; a value that is no TOML is a bare string."""
    path, equals, text = override.partition("=")
    section, dot, key = path.strip().partition(".")
    if not equals or not dot or not section or not key:
        message = f"--set {override!r} is not of the form section.key=value, as in --set mesh.tp=4."
        raise TopologyError(message)
    kind = _sections().get(section)
    if kind is None:
        raise TopologyError(_unknown(section, f"--set {override}", list(_sections()), "section"))
    value: Any = text.strip()
    field = {each.name: each.type for each in msgspec.structs.fields(kind)}.get(key)
    if field is None:
        raise TopologyError(_unknown(f"{section}.{key}", f"--set {override}", _keys(), "key"))
    try:
        read = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        read = {}
    wants_text = isinstance(_bare(field)[0], msgspec.inspect.StrType | msgspec.inspect.LiteralType)
    if list(read) == ["value"] and (isinstance(read["value"], str) or not wants_text):
        value = read["value"]
    inner = table.setdefault(section, {})
    if not isinstance(inner, dict):
        raise TopologyError(_not_a_table(section, inner))
    inner[key] = value


def _sections() -> dict[str, type[Section]]:
    return {field.name: field.type for field in msgspec.structs.fields(Topology)}


def _keys() -> list[str]:
    return [f"{section}.{key.name}" for section, kind in _sections().items() for key in msgspec.structs.fields(kind)]


def _check_keys(table: Table) -> None:
    """Refuse what no section has, before types are looked at."""
    sections, keys = _sections(), _keys()
    for section, inner in table.items():
        if section not in sections:
            where = [*sections, *keys]
            raise TopologyError(_unknown(section, "", where, "key" if not isinstance(inner, dict) else "section"))
        if not isinstance(inner, dict):
            raise TopologyError(_not_a_table(section, inner))
        for key in inner:
            if f"{section}.{key}" not in keys:
                raise TopologyError(_unknown(f"{section}.{key}", "", keys, "key"))


def _not_a_table(section: str, value: object) -> str:
    return f"{section} = {_show(value)}: {section} is a section; write [{section}] and its keys below it."


def _by_key(names: list[str]) -> dict[str, str]:
    """``mesh.tp`` by ``tp``: of equal keys the first one's section."""
    return {name.rpartition(".")[2]: name for name in reversed(names)}


def _unknown(name: str, where: str, known: list[str], what: str) -> str:
    """Name the nearest known key: of the same section if one is very near, else that of another with this very name, else what is like it."""
    section, _, key = name.rpartition(".")
    every = _by_key(known)
    own = _by_key([each for each in known if each.startswith(f"{section}.")]) if section else every
    near = (
        [own[each] for each in difflib.get_close_matches(key, list(own), n=1, cutoff=_VERY_NEAR)]
        or ([every[key]] if key in every else [])
        or [own[each] for each in difflib.get_close_matches(key, list(own), n=1)]
        or [every[each] for each in difflib.get_close_matches(key, list(every), n=1)]
        or difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    )
    prefix = f"{where}: " if where else ""
    return f"{prefix}unknown {what} {name!r}; did you mean {near[0]!r}? All keys: edgemesh topology schema."


def _explain(table: Table, error: str) -> str:
    """Msgspec's one-line error, as a sentence about the key, its value and what is legal."""
    found = re.search(r"`\$\.(\w+)\.(\w+)(\[\d+\])?", error)
    assert found is not None, error  # the table's own shape was checked, so the fault is in a key's value
    section, key, item = found.groups()
    field = next(each for each in msgspec.structs.fields(_sections()[section]) if each.name == key)
    info, about = _bare(field.type)
    at = f" (entry {item[1:-1]})" if item else ""
    value = _show(table[section][key])
    return f"{section}.{key} = {value}{at} is not legal; legal is {_legal(info)}. {about}".rstrip()


def _bare(kind: object) -> tuple[msgspec.inspect.Type, str]:
    """A key's type and its description."""
    info = msgspec.inspect.type_info(kind)
    if isinstance(info, msgspec.inspect.Metadata):
        return info.type, (info.extra_json_schema or {}).get("description", "")
    return info, ""


def _legal(info: msgspec.inspect.Type) -> str:
    """What a key may be, in words."""
    match info:
        case msgspec.inspect.BoolType():
            words = "true or false"
        case msgspec.inspect.LiteralType(values=values):
            words = " or ".join(f'"{value}"' for value in values)
        case msgspec.inspect.IntType(ge=low, le=high):
            words = f"a whole number from {low} to {high}"
        case msgspec.inspect.FloatType(ge=None, gt=above, le=high):
            words = f"a number above {above:g} and up to {high:g}"
        case msgspec.inspect.FloatType(ge=low, le=high):
            words = f"a number from {low:g} to {high:g}"
        case msgspec.inspect.StrType(pattern=None, min_length=least, max_length=most):
            words = f"text of {least or 0} to {most} characters"
        case msgspec.inspect.StrType():
            words = "1 to 48 lower-case letters, digits, dots, dashes and underscores, a letter or digit first"
        case msgspec.inspect.VarTupleType(item_type=item, min_length=least, max_length=most):
            words = f"a list of {least} to {most} entries, each {_legal(item)}"
        case _:
            raise AssertionError(info)
    return words


def _show(value: object) -> str:
    """A value as TOML would show it, shortened."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
