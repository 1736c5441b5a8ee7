"""Refusals as OpenAI clients read them: a status and ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import msgspec

INVALID = "invalid_request_error"


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong, and with which parameter."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class Excess(msgspec.Struct, frozen=True):
    """Tokens of the prompt and those wanted for the output, which together are more than the context's ``limit``."""

    prompt: int
    wanted: int
    limit: int


class ApiError(Exception):
    """A request ends with this status; ``retry_after_s`` > 0 asks the client to come again."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = 0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(message=message, type=kind, param=param, code=code)
        self.retry_after_s = retry_after_s
        self.headers: tuple[bytes, ...] = ()
        """Further headers of the answer, names and values in turn."""

        self.excess: Excess | None = None
        """What does not fit the context, where that is the reason."""

    @property
    def body(self) -> bytes:
        """The answer's JSON."""
        return msgspec.json.encode(ErrorBody(self.detail))


def invalid(message: str, param: str | None, code: str | None = None) -> ApiError:
    """400: the value of ``param`` is not allowed."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, allowed: str, why: str = "") -> ApiError:
    """400: the parameter is known, but nothing here acts on it."""
    reason = f": {why}" if why else ""
    message = f"`{param}` is not supported by this server{reason}. Leave it out or give {allowed}"
    return ApiError(400, message, param=param, code="unsupported_parameter")


def context_length_exceeded(prompt: int, wanted: int, limit: int, param: str) -> ApiError:
    """400: prompt and output together do not fit."""
    message = (
        f"This model's maximum context length is {limit} tokens, but the request asks for {prompt + wanted} tokens "
        f"({prompt} in the prompt, {wanted} for the completion)"
    )
    error = ApiError(400, message, param=param, code="context_length_exceeded")
    error.excess = Excess(prompt, wanted, limit)
    return error


def unauthorised(message: str) -> ApiError:
    """401: no API key, or one that is not known."""
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key")


def model_not_found(model: str, served: str) -> ApiError:
    """404: another model is served here."""
    message = f"The model `{model}` does not exist; this server serves `{served}`"
    return ApiError(404, message, kind="not_found_error", param="model", code="model_not_found")


def unprocessable(message: str, param: str) -> ApiError:
    """422: every value is legal, but the model's chat template refuses the conversation."""
    return ApiError(422, message, param=param, code="template_refused")


def too_busy(message: str, retry_after_s: int) -> ApiError:
    """429: a queue is full; come again."""
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after_s=retry_after_s)


def unavailable(message: str, retry_after_s: int = 1) -> ApiError:
    """503: the mesh does not serve now, and why."""
    return ApiError(503, message, kind="service_unavailable_error", code="unavailable", retry_after_s=retry_after_s)


def timed_out(message: str) -> ApiError:
    """504: the request was not complete in time."""
    return ApiError(504, message, kind="timeout_error", code="request_timeout")


_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def from_mesh(status: int, code: str, reason: str, retry_after_s: int = 0) -> ApiError:
    """What the router or a group said when it refused or lost a request."""
    fallback = INVALID if status < 500 else "server_error" if status == 500 else "service_unavailable_error"
    if status in {429, 503}:
        retry_after_s = max(1, retry_after_s)
    kind = _KINDS.get(status, fallback)
    return ApiError(status, reason, kind=kind, code=code or None, retry_after_s=retry_after_s)
