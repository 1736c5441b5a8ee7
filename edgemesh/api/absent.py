"""Endpoints of OpenAI's and other servers' APIs that are not served here: their clients learn what is."""

from __future__ import annotations

from typing import Final

from edgemesh.api.errors import ApiError
from edgemesh.api.routes import ROUTES

GENERATES: Final = "this server generates text"

ABSENT: Final[dict[str, str]] = {
    "/v1/embeddings": "no embedding model is served",
    "/v1/audio": "only text is served",
    "/v1/images": "only text is served",
    "/v1/videos": "only text is served",
    "/v1/realtime": "only text is served, over HTTP",
    "/v1/moderations": "nothing is moderated",
    "/v1/fine_tuning": "no model is trained",
    "/v1/evals": "no model is trained",
    "/v1/batches": "requests are answered at once; send many at the same time",
    "/v1/files": "no file is kept",
    "/v1/uploads": "no file is kept",
    "/v1/containers": "no file is kept",
    "/v1/vector_stores": "no file is kept",
    "/v1/assistants": "no conversation is kept",
    "/v1/threads": "no conversation is kept",
    "/v1/conversations": "no conversation is kept",
    "/v1/responses": "no answer is kept",
    "/v1/messages/batches": "requests are answered at once; send many at the same time",
    "/v1/complete": "it was replaced by `/v1/messages`",
    "/v1/rerank": "no reranking model is served",
    "/v2/rerank": "no reranking model is served",
    "/rerank": "no reranking model is served",
    "/v1/score": "no scoring model is served; `prompt_logprobs` and `echo` with `logprobs` score a text",
    "/score": "no scoring model is served; `prompt_logprobs` and `echo` with `logprobs` score a text",
    "/pooling": "no embedding model is served",
    "/classify": "no classifier is served",
}
"""Path -> why; everything below the path as well."""


def absent(method: str, path: str) -> ApiError:
    """404 for a path that is not served: why, where it is a known one, and what is served instead."""
    where = f"{method} {path}"
    served = ", ".join(f"{each.method} {each.path.partition('{')[0].rstrip('/')}" for each in ROUTES if each.keyed)
    for known, why in ABSENT.items():
        if path == known or path.startswith(known + "/"):
            message = f"{where} is not served: {why}. {GENERATES.capitalize()}: {served}"
            return ApiError(404, message, kind="not_found_error", code="endpoint_not_served")
    return ApiError(404, f"there is nothing at {where}; served are {served}", kind="not_found_error", code="not_found")
