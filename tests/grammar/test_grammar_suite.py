"""The public suite of JSON schemas and random ones: what is accepted is enforced, and the rest is refused by name."""

import importlib.metadata
import json
import os
import random
import subprocess
import sys
import tarfile
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import check_jsonschema
import jsonschema
import pytest
from grammar_walks import compact, grammars, takes, written
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from edgemesh.api.errors import ApiError
from edgemesh.api.grammar import schema_source
from edgemesh.engine.locate import models_dir

DRAFTS = {
    "draft2020-12": jsonschema.Draft202012Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft4": jsonschema.Draft4Validator,
}
PARAM = "response_format.json_schema.schema"
WALKS = 2


def suite():
    """The suite's directory, out of the source distribution of ``jsonschema``; fetched once."""
    version = importlib.metadata.version("jsonschema")
    cache = models_dir().parent / "suites"
    found = cache / f"jsonschema-{version}" / "json" / "tests"
    if not found.exists():
        cache.mkdir(parents=True, exist_ok=True)
        fresh = cache / f".{os.getpid()}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "jsonschema"]
        result = subprocess.run(
            [*command, "--dest", str(fresh), f"jsonschema=={version}"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        archives = list(fresh.glob("*.tar.gz"))
        assert archives, result.stdout + result.stderr
        with tarfile.open(archives[0]) as archive:
            archive.extractall(fresh, filter="data")
        (fresh / f"jsonschema-{version}").rename(cache / f"jsonschema-{version}")
    return found


def source_of(schema):
    """The source of a schema that is accepted; None for one that is refused, whose refusal must name it."""
    refused = None
    try:
        source = schema_source(schema, PARAM)
    except ApiError as error:
        refused = error
    if refused is not None:
        assert (refused.status, refused.detail.param, refused.detail.code) == (400, PARAM, "invalid_schema")
        assert f"`{PARAM}`" in refused.detail.message
        return None
    fault = grammars().check(source)
    assert "panic" not in fault
    return None if fault else source


def is_valid(validator, text):
    return validator.is_valid(exactly(text))


def exactly(text):
    """JSON without rounding its numbers."""
    return json.loads(text, parse_float=Decimal)


@pytest.mark.parametrize("draft", DRAFTS)
def test_no_value_that_the_suite_calls_invalid_can_be_an_output(draft, record_property):
    counts, wrong = Counter(), []
    files = sorted((suite() / draft).glob("*.json")) + sorted((suite() / draft / "optional" / "format").glob("*.json"))
    for path in files:
        formats = DRAFTS[draft].FORMAT_CHECKER if path.parent.name == "format" else None
        for case in json.loads(path.read_text()):
            schema = case["schema"]
            source = source_of(schema) if isinstance(schema, dict) else None
            counts["accepted" if source else "refused"] += 1
            if source is None:
                continue
            for each in case["tests"]:
                taken = takes(source, compact(each["data"]))
                counts["as it says" if taken == each["valid"] else "stricter" if each["valid"] else "wrong"] += 1
                if taken and not each["valid"]:
                    wrong.append((path.name, case["description"], each["data"]))
            validator = DRAFTS[draft](exactly(json.dumps(schema)), format_checker=formats)
            for seed in range(WALKS):
                text = written(source, random.Random(f"{path.name} {seed}"))
                counts["cut" if text is None else "written"] += 1
                if text is not None and not is_valid(validator, text):
                    wrong.append((path.name, case["description"], text))
    record_property("schemas", dict(counts))
    assert wrong == []
    assert counts["accepted"] > 100, counts
    assert counts["stricter"] < counts["as it says"] / 20, counts


def test_large_schemas_in_use_are_accepted_or_refused_by_name():
    directory = Path(check_jsonschema.__file__).parent / "builtin_schemas" / "vendor"
    paths = sorted(directory.glob("*.json"))
    counts = Counter(source_of(json.loads(path.read_text())) is not None for path in paths)
    assert sum(counts.values()) > 20
    assert counts[True] > 0, counts


def multiple_of(validator, step, value, _):
    """As jsonschema has it, for numbers of any size but those whose digits would fill the memory."""
    huge = isinstance(value, Decimal) and abs(value.adjusted()) > 5000
    if validator.is_type(value, "number") and not huge and Fraction(value) % Fraction(step):
        yield jsonschema.ValidationError(f"{value} is no multiple of {step}")


NEWEST = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"multipleOf": multiple_of})
NAMES = st.sampled_from(["a", "b", "ab", "é", '"', "\n", " ", "\\", "aa", ""])
PATTERNS = st.sampled_from(["^a", "b$", "[0-9]", "^[a-c]{1,3}$", "é", "^x?$", '"', "a|b", "^(ab)*$", "\\s", "^.{2}$"])
FORMATS = st.sampled_from(["date", "time", "date-time", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "duration"])
SMALL = st.integers(-3, 12)
COUNT = st.integers(0, 3)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-20, 20)
    | st.floats(-9, 9).map(lambda x: round(x, 2))
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)


def some(**optional):
    return st.fixed_dictionaries({}, optional=optional)


LEAVES = st.one_of(
    st.just({}),
    st.booleans(),
    some(type=st.just("string"), minLength=COUNT, maxLength=COUNT, pattern=PATTERNS, format=FORMATS),
    some(
        type=st.sampled_from(["integer", "number", ["integer", "null"]]),
        minimum=SMALL | st.just(0.5),
        maximum=SMALL | st.just(7.25),
        exclusiveMinimum=SMALL,
        exclusiveMaximum=SMALL,
        multipleOf=st.sampled_from([1, 2, 3, 0.5, 0.1]),
    ),
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": ["string", "null"]}, {"$ref": "#/$defs/d"}]),
    some(const=VALUES),
    st.fixed_dictionaries({"enum": st.lists(VALUES, min_size=1, max_size=4)}, optional={"type": st.just("string")}),
    st.sampled_from([{"not": {}}, {"uniqueItems": True}, {"format": "regex"}, {"minItem": 1}]),
)


def branches(inner):
    few = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        some(
            type=st.just("object"),
            properties=st.dictionaries(NAMES, inner, max_size=3),
            required=st.lists(NAMES, max_size=3, unique=True),
            additionalProperties=inner,
            patternProperties=st.dictionaries(PATTERNS, inner, max_size=2),
            minProperties=COUNT,
            maxProperties=COUNT,
        ),
        some(type=st.just("array"), items=inner, prefixItems=few, minItems=COUNT, maxItems=COUNT),
        st.fixed_dictionaries({"anyOf": few}),
        st.fixed_dictionaries({"allOf": few}),
        st.fixed_dictionaries({"oneOf": few}),
        st.tuples(inner.filter(lambda each: isinstance(each, dict)), some(anyOf=few, allOf=few)).map(
            lambda pair: pair[0] | pair[1]
        ),
    )


SCHEMAS = st.tuples(
    st.recursive(LEAVES, branches, max_leaves=8).filter(lambda each: isinstance(each, dict)),
    LEAVES.filter(lambda each: isinstance(each, dict)),
).map(lambda pair: pair[0] | {"$defs": {"d": pair[1]}})


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 30), others=st.lists(VALUES, max_size=4))
def test_every_output_after_a_random_schema_is_valid(schema, seed, others):
    source = source_of(schema)
    event("refused" if source is None else "accepted")
    if source is None:
        return
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = NEWEST(exactly(json.dumps(schema)), format_checker=checker)
    for each in range(WALKS):
        text = written(source, random.Random(seed + each), limit=128)
        event("cut" if text is None else "written")
        assert text is None or is_valid(validator, text), text
    for value in others:
        if takes(source, compact(value)):
            assert is_valid(validator, compact(value)), value
