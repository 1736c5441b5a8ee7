"""Any message, built by Hypothesis from the bounds that its type declares."""

import re
from functools import cache

import msgspec
from hypothesis import strategies as st

from edgemesh.wire.arrays import TokenArray
from edgemesh.wire.schema import all_messages

TOKENS = st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=6).map(TokenArray.of)
LONG_TOKENS = st.integers(129, 400).map(lambda size: TokenArray.of(range(size)))


@cache
def strategy(kind):
    return _of(msgspec.inspect.type_info(kind))


MESSAGES = st.one_of([st.deferred(lambda kind=kind: strategy(kind)) for kind in all_messages()])


def _of(info):
    name = type(info).__name__
    return _MAKERS[name](info)


def _struct(info):
    fields = {field.name: _of(field.type) for field in info.fields}
    return st.builds(info.cls, **fields)


def _int(info):
    low = info.ge if info.ge is not None else info.gt + 1 if info.gt is not None else -(1 << 63)
    high = info.le if info.le is not None else info.lt - 1 if info.lt is not None else (1 << 63) - 1
    return st.integers(low, high)


def _float(info):
    return st.floats(
        min_value=info.ge if info.ge is not None else info.gt,
        max_value=info.le,
        exclude_min=info.gt is not None,
        allow_nan=False,
        allow_infinity=info.le is None,
    )


def _str(info):
    if info.pattern is not None:
        return st.from_regex(re.compile(info.pattern), fullmatch=True).filter(lambda text: len(text) <= info.max_length)
    text = st.text(st.characters(codec="utf-8"), min_size=info.min_length or 0, max_size=min(info.max_length, 12))
    return st.one_of(text, st.just("x" * info.max_length))


_MAKERS = {
    "StructType": _struct,
    "Metadata": lambda info: _of(info.type),
    "IntType": _int,
    "FloatType": _float,
    "StrType": _str,
    "BoolType": lambda _: st.booleans(),
    "NoneType": lambda _: st.none(),
    "BytesType": lambda info: st.binary(min_size=info.min_length or 0, max_size=min(info.max_length, 80)),
    "EnumType": lambda info: st.sampled_from(info.cls),
    "UnionType": lambda info: st.one_of([_of(each) for each in info.types]),
    "TupleType": lambda info: st.tuples(*[_of(each) for each in info.item_types]),
    "VarTupleType": lambda info: st.lists(_of(info.item_type), min_size=info.min_length or 0, max_size=3).map(tuple),
    "CustomType": lambda _: st.one_of(TOKENS, LONG_TOKENS),
}


@cache
def least(kind):
    """A small message of a type, the same on every call, with something in every list."""
    return msgspec.convert(_least(msgspec.inspect.type_info(kind)), kind)


def _least(info):
    return _LEAST[type(info).__name__](info)


def _least_of_union(info):
    return _least(next(each for each in info.types if not isinstance(each, msgspec.inspect.NoneType)))


_LEAST = {
    "StructType": lambda info: [*([info.tag] if info.tag else []), *[_least(field.type) for field in info.fields]],
    "Metadata": lambda info: _least(info.type),
    "IntType": lambda info: max(info.ge or 0, (info.gt or -1) + 1),
    "FloatType": lambda _: 1.0,
    "StrType": lambda info: "rank-0.decode" if info.pattern else "x",
    "BoolType": lambda _: False,
    "BytesType": lambda info: b"x" * max(1, info.min_length or 0),
    "EnumType": lambda info: next(iter(info.cls)).value,
    "UnionType": _least_of_union,
    "TupleType": lambda info: [_least(each) for each in info.item_types],
    "VarTupleType": lambda info: [_least(info.item_type)],
    "CustomType": lambda info: info.cls.of([1, 2, 3]),
}
