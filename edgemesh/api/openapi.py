"""The HTTP API as an OpenAPI 3.1 document, written from the routes and from the types of their bodies."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from edgemesh import __version__
from edgemesh.api.refine import PRINTABLE, refine
from edgemesh.api.routes import ROUTES, Operation
from edgemesh.wire.schema import Schema, render

REFERENCE: Final = "#/components/schemas/{name}"
FAILURES: Final = {
    400: "The request is malformed, or asks for what is not allowed; `error.param` names the parameter.",
    401: "An API key is needed, or this one is not known.",
    404: "There is no such model.",
    408: "The body was not complete in time.",
    415: "The body is no JSON, by its `Content-Type`.",
    413: "The body is larger than this server takes.",
    422: "The model's chat template refuses this conversation.",
    429: "Too much is waiting already; come again after `Retry-After`.",
    500: "An unexpected error.",
    503: "The mesh does not serve now; come again after `Retry-After`.",
    504: "The request was not complete in time.",
}
RETRIED: Final = frozenset({429, 503})
STREAM: Final = "One of the server-sent events that answer a request with `stream`: true; a failure after the first is an event, too."
REQUEST_ID: Final = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "The client's own name for its request; it comes back in the answer's headers and in traces.",
    "schema": {"type": "string", "maxLength": 128, "pattern": PRINTABLE},
}
KEYS: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, where keys are set."},
    "key": {
        "type": "apiKey",
        "in": "header",
        "name": "X-Api-Key",
        "description": "The same, as Anthropic's clients send it.",
    },
}
ANY_KEY: Final[list[Schema]] = [{name: []} for name in KEYS]
NO_KEY: Final[Schema] = {}


def document(*, keyed: bool | None = None) -> Schema:
    """The whole document; ``keyed`` says whether this server asks for API keys (None: it may or may not)."""
    paths: dict[str, Schema] = {}
    for route in ROUTES:
        path = re.sub(r"{(\w+):\w+}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, keyed=keyed)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "EdgeMesh",
            "version": __version__,
            "description": "An LLM serving mesh with the OpenAI API.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": _components(), "securitySchemes": KEYS},
    }


def openapi_schemas() -> dict[str, bytes]:
    """File name -> content."""
    return {"openapi.json": render(document())}


def _operation(route: Operation, *, keyed: bool | None) -> Schema:
    found: Schema = {"operationId": route.name, "summary": route.summary, "responses": _responses(route)}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)(?::\w+)?}", route.path)
    ]
    if route.events:
        parameters.append(REQUEST_ID)
    if parameters:
        found["parameters"] = parameters
    if route.body is not None:
        found["requestBody"] = {"required": True, "content": _json(route.body)}
    if not route.keyed or keyed is False:
        found["security"] = []
    else:
        found["security"] = ANY_KEY if keyed else [*ANY_KEY, NO_KEY]
    return found


def _responses(route: Operation) -> Schema:
    content = {route.answer: {}} if isinstance(route.answer, str) else _json(route.answer)
    if route.events:
        content["text/event-stream"] = {"schema": _event(route)}
    success: Schema = {"description": route.summary, "content": content}
    if route.events:
        success["headers"] = {"X-Request-Id": {"required": True, "schema": {"type": "string"}}}
    answers = {"200": success}
    for status in sorted({*route.failures, 500, *([401] if route.keyed else [])}):
        answers[str(status)] = _failure(route, status)
    if route.unwell is not None:
        answers["503"] = {"description": "The mesh does not serve now, and why.", "content": _json(route.unwell)}
    return answers


def _failure(route: Operation, status: int) -> Schema:
    found: Schema = {"description": FAILURES[status], "content": _json(route.error)}
    if status in RETRIED:
        seconds = {"type": "integer", "minimum": 1}
        found["headers"] = {"Retry-After": {"description": "In seconds.", "required": True, "schema": seconds}}
    if status == 401:
        found["headers"] = {"WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}}}
    return found


def _json(kind: type[msgspec.Struct]) -> Schema:
    return {"application/json": {"schema": {"$ref": REFERENCE.format(name=kind.__name__)}}}


def _event(route: Operation) -> Schema:
    kinds = [{"$ref": REFERENCE.format(name=kind.__name__)} for kind in (*route.events, route.error)]
    chunk = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
    data = {"anyOf": [{"const": "[DONE]"}, chunk]} if route.done else chunk
    return {
        "description": STREAM,
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": data},
        "required": ["data"],
    }


def _components() -> Schema:
    """The schema of every body, and of every part of one."""
    bodies = {kind.__name__: kind for route in ROUTES for kind in _bodies(route)}
    _, schemas = msgspec.json.schema_components(bodies.values(), ref_template=REFERENCE)
    parts: dict[str, Schema] = msgspec.json.decode(msgspec.json.encode(schemas))  # defaults may be tuples
    refine(parts)
    return parts


def _bodies(route: Operation) -> list[type[msgspec.Struct]]:
    kinds = (route.body, route.answer, route.error, route.unwell, *route.events)
    return [kind for kind in kinds if kind is not None and not isinstance(kind, str)]
