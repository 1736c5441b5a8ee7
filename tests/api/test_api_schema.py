"""JSON schemas before they are compiled: what is refused, where it stands, and what is written anew."""

import datetime as dt
import itertools
import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemesh.api.errors import ApiError
from edgemesh.api.schema import FORMATS, KEYWORDS, MAX_DEPTH, MAX_NODES, enforceable
from edgemesh.api.schema_dates import PATTERNS
from edgemesh.api.schema_ends import endless


def nested(depth, leaf=True):
    return {"properties": {"a": nested(depth - 1, leaf)}} if depth else leaf


@pytest.mark.parametrize(
    ("schema", "place", "words"),
    [
        ({"not": {}}, "/not", "`not` is not supported"),
        ({"properties": {"x": {"items": {"if": True}}}}, "/properties/x/items/if", "`if` is not supported"),
        ({"anyOf": [{}, {"minItem": 1}]}, "/anyOf/1/minItem", "`minItem` is not supported"),
        ({"x-guidance": {"lenient": True}}, "/x-guidance", "`x-guidance` is not supported"),
        ({"nullable": True}, "/nullable", "not supported"),
        ({"type": "banana"}, "/type", "one or a list of array, boolean"),
        ({"type": []}, "/type", "one or a list of"),
        ({"properties": 5}, "/properties", "an object of schemas, not 5"),
        ({"properties": {"a/b~": 5}}, "/properties/a~1b~0", "an object, true or false, not 5"),
        ({"items": []}, "/items", "at least one schema"),
        ({"allOf": {}}, "/allOf", "at least one schema"),
        ({"enum": []}, "/enum", "at least one value"),
        ({"enum": ["a\x00b"]}, "/enum", "control character"),
        ({"const": {"\x1f": 1}}, "/const", "control character"),
        ({"const": "\x7f"}, "/const", "control character"),
        ({"properties": {"\x01": {}}}, "/properties/\x01", "control character"),
        ({"pattern": 5}, "/pattern", "a regular expression, not 5"),
        ({"format": "regex"}, "/format", "one of date, date-time"),
        ({"minLength": -1}, "/minLength", "a whole number"),
        ({"minLength": True}, "/minLength", "a whole number"),
        ({"maxItems": 1.5}, "/maxItems", "a whole number"),
        ({"maxItems": 1 << 40}, "/maxItems", "2^32"),
        ({"minimum": "0"}, "/minimum", "a number"),
        ({"exclusiveMinimum": True}, "/exclusiveMinimum", "Draft 4"),
        ({"multipleOf": 0}, "/multipleOf", "above 0"),
        ({"required": "a"}, "/required", "a list of names"),
        ({"$ref": "http://example.com/schema"}, "/$ref", "a place in this schema"),
        ({"$schema": "http://example.com/schema"}, "/$schema", "Draft 4 to 2020-12"),
        ({"items": {"$id": "x"}}, "/items/$id", "only the whole schema"),
        ({"minProperties": 2}, "/minProperties", "as many `required`"),
        ({"$ref": "#"}, "", "requires itself"),
        (
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}},
            "/$defs/",
            "requires itself",
        ),
        (
            {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
            "/properties/next",
            "requires itself",
        ),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "/items", "requires itself"),
        ({"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 2}, "/prefixItems/1", "requires itself"),
        (nested(MAX_DEPTH + 2), "/properties/a", f"more than {MAX_DEPTH} deep"),
        ({"properties": {str(number): {} for number in range(MAX_NODES)}}, "/properties/", f"more than {MAX_NODES}"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(schema, place, words):
    with pytest.raises(ApiError) as caught:
        enforceable(schema, "guided_json")
    error = caught.value.detail
    assert (caught.value.status, error.param, error.code) == (400, "guided_json", "invalid_schema")
    assert error.message.startswith("Invalid schema in `guided_json`" + (f" at `{place}" if place else ": "))
    assert words in error.message
    assert len(error.message) < 1000


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"type": ["array", "null"], "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "items": {"$ref": "#"}},
        {
            "$defs": {"t": {"type": "object", "properties": {"c": {"items": {"$ref": "#/$defs/t"}}}}},
            "$ref": "#/$defs/t",
        },
        {"type": "object", "required": ["a", "b"], "minProperties": 2},
        {"additionalProperties": False, "patternProperties": {"^x": True}},
        nested(MAX_DEPTH - 1),
    ],
)
def test_what_can_be_enforced_stays_as_it_is(schema):
    assert enforceable(schema, "x") == schema


def test_annotations_are_left_out_and_counts_are_whole():
    schema = {"title": "T", "x-note": 1, "default": 5, "minItems": 2.0, "items": {"description": "d", "type": "null"}}
    assert enforceable(schema, "x") == {"minItems": 2, "items": {"type": "null"}}


def test_names_of_properties_are_no_keywords():
    schema = {"properties": {"not": {}, "title": {}, "x-guidance": {}, "$ref": {}}, "const": {"not": 1, "title": 2}}
    assert enforceable(schema, "x") == schema


def test_a_date_is_a_pattern_beside_what_else_there_is():
    assert enforceable({"format": "date"}, "x") == {"pattern": PATTERNS["date"]}
    both = enforceable({"format": "time", "pattern": "Z$", "allOf": [{}]}, "x")
    assert both == {"pattern": "Z$", "allOf": [{}, {"pattern": PATTERNS["time"]}]}
    assert enforceable({"format": "uuid"}, "x") == {"format": "uuid"}
    assert set(PATTERNS) < FORMATS


def test_the_pattern_of_dates_matches_every_date_and_no_other():
    pattern = re.compile(PATTERNS["date"])
    years = [1, 4, 96, 99, 100, 400, 1000, 1582, 1900, 1999, 2000, 2023, 2024, 2096, 2100, 9996, 9999]
    for year, month, day in itertools.product(years, range(14), range(33)):
        try:
            dt.date(year, month, day)
            real = True
        except ValueError:
            real = False
        assert bool(pattern.fullmatch(f"{year:04}-{month:02}-{day:02}")) is real, (year, month, day)
    assert not pattern.fullmatch("0000-01-01")


@settings(deadline=None)
@given(st.datetimes(timezones=st.timezones()))
def test_real_moments_match_their_pattern(moment):
    text = moment.isoformat()
    match = re.fullmatch(PATTERNS["date-time"], text)
    seconds = moment.utcoffset().total_seconds()
    assert bool(match) is (seconds % 60 == 0)


@pytest.mark.parametrize("text", ["10:00:00", "24:00:00Z", "10:60:00Z", "10:00:60Z", "10:00:00.Z", "10:00:00+24:00"])
def test_what_is_no_time_does_not_match(text):
    assert not re.fullmatch(PATTERNS["time"], text)
    assert not re.fullmatch(PATTERNS["date-time"], "2020-01-01T" + text)


def test_looking_at_the_largest_schema_is_quick():
    """Chains of references, in both orders, and wide alternatives: the work is linear."""
    half = MAX_NODES // 2 - 2
    there = {"$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(half)} | {f"d{half}": {}}}
    back = {"$defs": {"d0": {}} | {f"d{n + 1}": {"$ref": f"#/$defs/d{n}"} for n in range(half)}}
    wide = {"anyOf": [{"$ref": "#/oneOf/0"}] * half, "oneOf": [{"$ref": f"#/oneOf/{n + 1}"} for n in range(half - 1)]}
    names = [f"p{n}" for n in range(half)]
    needy = {
        "$defs": {name: {"type": "null"} for name in names},
        "type": "object",
        "properties": {name: {"$ref": f"#/$defs/{name}"} for name in names},
        "required": names,
    }
    for schema in (there, back, wide, needy):
        start = time.process_time()
        assert endless(schema) is None or schema is wide
        assert time.process_time() - start < 2
    assert json.dumps(enforceable(needy, "x"))


def test_every_supported_keyword_is_told():
    with pytest.raises(ApiError) as caught:
        enforceable({"unknown": 1}, "x")
    assert all(name in caught.value.detail.message for name in KEYWORDS)
