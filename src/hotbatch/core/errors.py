"""The exception tree: everything hotbatch raises at a caller stands here.

`assert` means our bug, an exception from this file means the caller's. Each carries the
name of the parameter at fault where there is one, so that the server can answer in
OpenAI's error shape without parsing messages.
"""

from __future__ import annotations


class HotbatchError(Exception):
    """Base of all errors that hotbatch raises on purpose.

    `param` is the name of the request field or option at fault, or None.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(HotbatchError):
    """The request can never succeed as it stands (HTTP 400)."""


class ContextLengthError(InvalidRequestError):
    """Prompt plus output cannot fit the model's context or the KV pool (HTTP 400)."""


class OverloadedError(HotbatchError):
    """Refused now, may succeed later (HTTP 429).

    `reason` is a short name of the limit that refused, for metrics and clients; `retry_after`
    is when to ask again, in seconds.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        reason: str = "overloaded",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, param=param)
        self.reason = reason
        self.retry_after = retry_after


class EngineStoppedError(HotbatchError):
    """The engine is shutting down or has died (HTTP 503)."""


class ModelLoadError(HotbatchError):
    """The model's files are missing, damaged, or of a kind that is not supported."""


class OptionError(HotbatchError):
    """An option has a value that cannot work; `param` is its command-line name (exit code 2)."""
