"""`Stream.close`: what still runs is aborted, unless somebody is to go on with it."""

from __future__ import annotations

import pytest

from engine.client.streams import Streams
from engine.errors import EngineUnavailable, InvalidRequest, Overloaded, SRMError, StepFailed
from engine.messages import Abort, Request, SamplingParams, ToEngine


@pytest.mark.parametrize(
    ("error", "durable", "aborts"),
    [
        (InvalidRequest("too long"), True, True),
        (Overloaded("full"), True, True),
        (InvalidRequest("too long"), False, True),
        (EngineUnavailable("drains"), True, False),
        (StepFailed("broke"), True, False),
        (EngineUnavailable("drains"), False, True),
    ],
)
def test_one_of_several_prompts_that_is_refused_has_the_others_aborted(
    error: SRMError, durable: bool, aborts: bool
) -> None:
    heard: list[ToEngine] = []
    streams = Streams(heard.append)
    requests = [
        Request(name, b"\5\0\0\0", SamplingParams(), durable=durable) for name in ("a", "b", "c")
    ]
    stream = streams.open(requests)
    streams.refuse("b", error)
    stream.close()
    aborted = {message.id for message in heard if isinstance(message, Abort)}
    assert aborted >= ({"a", "c"} if aborts else set())
    assert bool(aborted) == aborts
