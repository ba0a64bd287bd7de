"""Every error of the tree has a status and says whether to try again."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from srm import errors
from srm.server.errors import BodyTooSlow, RateLimited, srm_error


def every_error(kind: type[errors.SRMError] = errors.SRMError) -> Iterator[type[errors.SRMError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from every_error(child)


RETRIED = {BodyTooSlow, errors.IdInUse, RateLimited, errors.SwapInProgress}
"""Of the caller's: another time they may not occur."""


@pytest.mark.parametrize("kind", list(every_error()))
def test_every_error_has_an_openai_shape(kind: type[errors.SRMError]) -> None:
    error = errors.Overloaded("full", 3) if kind is errors.Overloaded else kind("what happened")
    reply = srm_error(error)
    detail = json.loads(bytes(reply.body))["error"]
    assert set(detail) == {"message", "type", "param", "code"}
    assert detail["message"] == error.message
    assert detail["code"] == kind.code
    is_callers = issubclass(kind, errors.RequestError) and kind is not errors.Overloaded
    assert (400 <= reply.status_code < 500) == is_callers
    is_final = kind in {errors.TimedOut, errors.StoreFull} or (is_callers and kind not in RETRIED)
    assert (reply.headers.get("x-should-retry") == "false") == is_final
    assert (reply.status_code in {429, 503}) == ("retry-after" in reply.headers)
