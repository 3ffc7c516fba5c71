"""The refusal of a request, as OpenAI's API writes it."""

from typing import Any

from maxstack.errors import shortened


class Refusal(Exception):
    """An answer with an HTTP status of 400 or more."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        self.body: dict[str, Any] = {
            "error": {
                "message": shortened(message, 1000),
                "type": kind,
                "param": param,
                "code": code,
            }
        }
