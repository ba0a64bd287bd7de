"""Whatever one key sends, another key's request starts and ends within a bounded number of steps.

What a key may set is drawn: priority, n, max_tokens and the length of prompts, and of batches
weight and priority. It sends so much that there is always more to do, while slots, rows, states of
prompts and the queue are scarce.
"""

from __future__ import annotations

from itertools import cycle
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from srm.engine.messages import Request, SamplingParams
from srm.engine.scheduler.scheduler import Scheduler
from srm.errors import Overloaded
from srm.server.batch.concurrency_limiter import ConcurrencyLimiter
from srm.server.batch.job import BatchJob, Workplace
from srm.server.batch.jobs import weigh
from srm.server.generation.engine_request import RequestOwner, engine_requests
from srm.server.generation.prompts import Prompt
from srm.server.storage.records import BatchRecord
from tests.kit.bodies.refusals import completion
from tests.kit.engines.making import complete, park_preempted, scheduled, scheduler_of

MOST_STEPS = 500
"""Far more than the other key's request needs, and far fewer than what the first key sends."""
FIELDS: dict[str, st.SearchStrategy[int]] = {
    "priority": st.integers(-1000, 1000),
    "n": st.integers(1, 60),
    "max_tokens": st.sampled_from([1, 2, 1_000]),
    "length": st.sampled_from([1, 2, 9, 40]),
}
Body = dict[str, int]
bodies = st.lists(st.fixed_dictionaries(FIELDS), min_size=1, max_size=4)
limits = st.fixed_dictionaries(
    {
        "num_slots": st.integers(2, 9),
        "max_step_rows": st.integers(1, 9),
        "prefix_slots": st.integers(1, 4),
        "max_waiting_bytes": st.sampled_from([10_000, 10**9]),
    }
)


class Flood:
    """A scheduler to which some owners send requests without end."""

    def __init__(self, limits: dict[str, int], *senders: tuple[RequestOwner, Any]) -> None:
        self.scheduler: Scheduler = scheduler_of(**limits, max_step_tokens=20)
        self._count = 0
        self._sent = [(owner, cycle(bodies)) for owner, bodies in senders]
        for _ in range(20):
            self.step()

    def request(self, owner: RequestOwner, body: Body) -> Request:
        """The engine's request for a body with these fields."""
        self._count += 1
        # Prompts differ: equal ones share a state, and one key could not hold many.
        ids = np.full(body["length"], 5 + self._count % 20, np.int32).tobytes()
        asked = completion(priority=0 if owner.durable else body["priority"])
        params = SamplingParams(n=body["n"], max_tokens=body["max_tokens"], ignore_eos=True)
        prompt = Prompt(ids)
        (request,) = engine_requests(str(self._count), asked, params, owner, [prompt], [0], [None])
        return request

    def step(self) -> None:
        for owner, requests in self._sent:
            for _ in range(5):
                try:
                    self.scheduler.add(self.request(owner, next(requests)))
                except Overloaded:
                    break
        park_preempted(self.scheduler)
        complete(self.scheduler, scheduled(self.scheduler))

    def run(self, owner: RequestOwner, body: Body) -> None:
        """Run a request to its end, which must come."""
        request = self.request(owner, body)
        self.scheduler.add(request)
        for _ in range(MOST_STEPS):
            self.step()
            if not self.scheduler.has_request(request.id):
                return
        raise AssertionError(f"it waits or runs after {MOST_STEPS} steps")


def of_key(name: str) -> RequestOwner:
    return RequestOwner(share=name)


FEW = {"priority": 0, "n": 1, "max_tokens": 3, "length": 2}
SCARCE = {"num_slots": 4, "max_step_rows": 4, "prefix_slots": 2, "max_waiting_bytes": 10**9}


@given(flood=bodies, limits=limits, body=st.fixed_dictionaries(FIELDS))
@example(flood=[FEW | {"priority": -1000}], limits=SCARCE, body=FEW)
@example(flood=[FEW | {"n": 60}], limits=SCARCE, body=FEW)
@example(flood=[FEW | {"n": 60, "max_tokens": 1_000}], limits=SCARCE, body=FEW | {"n": 2})
@example(flood=[FEW | {"n": 60, "max_tokens": 1}], limits=SCARCE | {"num_slots": 9}, body=FEW)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_no_field_of_one_keys_requests_keeps_another_keys_request_waiting(
    flood: list[Body], limits: dict[str, int], body: Body
) -> None:
    few = body | {"n": min(body["n"], 4), "max_tokens": min(body["max_tokens"], 5)}
    Flood(limits, (of_key("a"), flood)).run(of_key("b"), few)


def batches_of(*made: tuple[str, int, float]) -> list[RequestOwner]:
    """Who sends the lines of running batches of these owners, priorities and weights."""
    records = [
        BatchRecord(
            id=f"batch_{number}", owner=owner, endpoint="/v1/completions", input_file_id="file",
            completion_window="24h", created_at=0, expires_at=1, priority=priority, weight=weight,
        )
        for number, (owner, priority, weight) in enumerate(made)
    ]  # fmt: skip
    config = SimpleNamespace(share_prompts=False)
    others = dict.fromkeys(("store", "clock", "answerers", "sending"))
    place = cast("Workplace", SimpleNamespace(config=config, **others))
    weights, room = weigh(records), ConcurrencyLimiter(1, 1)
    shares = [room.share(weight=weights[record.id]) for record in records]
    jobs = [BatchJob(record, place, share) for record, share in zip(records, shares, strict=True)]
    return [job._owner for job in jobs]


made = st.tuples(st.just("a"), st.integers(-1000, 1000), st.floats(1e-3, 1e3))


@given(theirs=st.lists(made, min_size=1, max_size=6), flood=bodies, limits=limits)
@example(theirs=[("a", 1000, 1.0)], flood=[FEW | {"max_tokens": 1_000}], limits=SCARCE)
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
def test_no_priority_or_weight_of_a_keys_batches_keeps_another_keys_waiting(
    theirs: list[tuple[str, int, float]], flood: list[Body], limits: dict[str, int]
) -> None:
    *senders, other = batches_of(*theirs, ("b", 0, 1.0))
    Flood(limits, *((item, flood) for item in senders)).run(other, FEW)


@given(theirs=st.lists(made, min_size=1, max_size=6), flood=bodies, limits=limits)
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
def test_batches_make_way_for_people_of_all_keys_whatever_these_ask(
    theirs: list[tuple[str, int, float]], flood: list[Body], limits: dict[str, int]
) -> None:
    senders = batches_of(*theirs)
    busy = Flood(limits, *((batch, flood) for batch in senders))
    for priority in (1000, -1000):
        busy.run(of_key("b"), FEW | {"priority": priority, "n": 2})
        busy.run(of_key("a"), FEW | {"priority": priority, "n": 2})
