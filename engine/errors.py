"""Every error of the project, as one tree.

SRMError                 .code: stable string   .message: for the caller
├─ ConfigError           stops the program, exit 2
├─ CheckpointError       stops the program, exit 3: missing or extra tensor, wrong shape, bad config
├─ RequestError          the caller's fault; ends one request
│  ├─ InvalidRequest     .param names the field
│  ├─ IdInUse            by a request that still runs
│  ├─ ContextTooLong
│  ├─ BodyTooLarge
│  ├─ NotFound
│  │  └─ ModelNotFound
│  └─ Overloaded         .retry_after_s
└─ EngineError           ours
   ├─ EngineUnavailable  starting, draining or gone
   └─ StepFailed         the engine exits; the supervisor restarts it

HTTP status codes for these exist only in `server/errors.py`.
"""

from __future__ import annotations


class SRMError(Exception):
    """Base of all errors; `code` is stable and machine-readable, `message` is for a person."""

    code = "error"
    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigError(SRMError):
    code = "config_error"
    exit_code = 2


class CheckpointError(SRMError):
    code = "checkpoint_error"
    exit_code = 3


class RequestError(SRMError):
    """The caller's fault. `param` names the offending field, where there is one."""

    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    code = "invalid_request"


class IdInUse(RequestError):
    code = "id_in_use"


class ContextTooLong(RequestError):
    code = "context_length_exceeded"


class BodyTooLarge(RequestError):
    code = "body_too_large"


class NotFound(RequestError):
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class Overloaded(RequestError):
    """The queue is full. `retry_after_s` is when trying again is reasonable, in seconds."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(SRMError):
    code = "engine_error"


class EngineUnavailable(EngineError):
    code = "engine_unavailable"


class StepFailed(EngineError):
    code = "step_failed"
