"""Requests that `schemathesis` makes up from the document, good and bad, against a real mesh: no 5xx, no broken answer."""

import json

import pytest
import schemathesis
from e2e_clients import CHAT, COMPLETIONS, MODEL, events_of
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from edgemesh.api.openapi import document

pytestmark = pytest.mark.parametrize("served", ["null-dp4 split"], indirect=True)

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]
EXAMPLES = 40
CONFIG = {
    "seed": 4,
    # A list that is longer than allowed may make a body that is larger than allowed.
    "checks": {"negative_data_rejection": {"expected-statuses": [400, 404, 405, 413, 415, 422, 429, "5xx"]}},
    "generation": {"deterministic": True, "max-examples": EXAMPLES, "database": "none", "no-shrink": True},
}
LONGEST = 3
BOUNDS = {"/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens"}
ENDS = {
    "/v1/responses": {"response.completed", "response.incomplete", "response.failed"},
    "/v1/messages": {"message_stop", "error"},
}


def one_model():
    """The document of a server that serves this one model."""
    found = document(keyed=False)
    for part in found["components"]["schemas"].values():
        properties = part.get("properties", {})
        if part.get("additionalProperties") is False and "model" in properties:
            properties["model"] = {"enum": [MODEL] if "model" in part["required"] else [MODEL, None]}
    return found


schema = schemathesis.openapi.from_dict(one_model(), config=schemathesis.Config.from_dict(CONFIG))


def shorten(case):
    """An answer without a bound of its own, or with one that fits the model, is soon there."""
    if case.operation.path in BOUNDS and case.meta.generation.mode.is_positive:
        name = BOUNDS[case.operation.path]
        if LONGEST < (case.body.get(name) or 1 << 15) < 1 << 16:
            case.body[name] = LONGEST
    elif case.operation.path in {COMPLETIONS, CHAT} and case.meta.generation.mode.is_positive:
        asked = case.body.get("max_tokens")
        if case.body.get("max_completion_tokens") is None and (asked is None or LONGEST < asked < 1 << 16):
            case.body["max_tokens"] = LONGEST


@schema.parametrize()
@settings(suppress_health_check=list(HealthCheck), deadline=None)
def test_whatever_is_asked_is_answered_as_the_document_says(case, served):
    shorten(case)
    # Each on a connection of its own: one that is dropped would else be asked again.
    response = case.call_and_validate(base_url=served.url, checks=CHECKS, timeout=30)
    if "text/event-stream" in response.headers.get("content-type", [""])[0]:
        if case.operation.path in ENDS:
            *_, last = (json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: "))
            assert last["type"] in ENDS[case.operation.path]
        else:
            assert events_of(response.text)
