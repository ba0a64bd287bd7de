"""Random histories of an engine, by the thousand: each sample says what its request says alone.

    python -m tests.tools.fuzz_scheduler --runs 10000 --first 0

A history is drawn from its number alone: requests of several priorities and shares, stopped, cut,
aborted, parked, sent again with another weight, moved to another engine, among changes of weights.
What `test_engine_machine.py` looks at closely, and shrinks, is tried here in bulk: the requests are
of a small pool, so that next to nothing is computed twice.
"""

from __future__ import annotations

import argparse
import os
import random
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context

import msgspec
import numpy as np

from srm.engine.config import EngineConfig
from srm.engine.messages import Output, Request, Running, join
from srm.engine.process.engine import Engine
from srm.engine.scheduler.parking import parkable
from srm.engine.state.parked import Parked, merged
from srm.errors import Overloaded
from tests.kit.engines.making import request_of
from tests.kit.engines.numpy_runner import TINY, NumpyRunner, tiny_weights
from tests.kit.engines.run_engine import alone

WEIGHTS = [tiny_weights(seed) for seed in range(2)]
OPERATIONS = 16
MAX_N = 6


def _pool(size: int) -> list[Request]:
    """What is asked for, over and over."""
    draw = random.Random(0)
    header = [draw.randrange(31) for _ in range(24)]
    prompts = [[*header[: draw.choice([1, 3, 18, 24])], i % 5] for i in range(size // 4)]
    return [
        request_of(
            "",
            draw.choice(prompts),
            max_tokens=draw.randint(1, 12),
            n=draw.randint(1, MAX_N),
            temperature=draw.choice([0.0, 1.0]),
            seed=draw.randrange(4),
            ignore_eos=draw.random() < 0.5,
            stop_token_ids=tuple(draw.sample(range(31), 3)),
            presence_penalty=draw.choice([0.0, 0.0, 1.5]),
        )
        for _ in range(size)
    ]


POOL = _pool(48)


@cache
def expected_of(place: int, weights: int) -> dict[int, Output]:
    """What each sample of a request of the pool says where there is nothing else."""
    return alone(POOL[place], WEIGHTS[weights])


class History:
    """One engine after the other, what was asked of them and what they said."""

    def __init__(self, number: int) -> None:
        self.draw = draw = random.Random(number)
        rows = draw.randint(1, 5)
        tokens = rows + draw.randint(1, 12)
        self.config = EngineConfig(
            num_slots=draw.randint(1, 8),
            prefix_slots=draw.randint(1, 4),
            max_step_rows=rows,
            max_step_tokens=tokens,
            prefill_step_tokens=draw.randint(2, tokens),
            max_prefill_share=draw.choice([0.1, 0.5, 0.9, 1.0]),
            max_waiting=40,
            max_parked_bytes=draw.choice([0, 2_000, 2**32, 2**32]),
        )
        self.weights = 0
        self.requests: dict[str, Request] = {}
        self.places: dict[str, int] = {}  # in the pool
        self.gone: set[str] = set()  # requests of which nothing more is said
        self.stopped: set[tuple[str, int]] = set()  # samples that may have ended early
        self.outputs: defaultdict[tuple[str, int], list[tuple[int, Output]]] = defaultdict(list)
        self.counts: Counter[str] = Counter()
        self.parked: dict[str, list[Parked]] = {}
        self.open()

    def open(self) -> None:
        config, retained = self.config, self.parked
        self.runner = NumpyRunner(WEIGHTS[self.weights], config.num_slots, config.prefix_slots)
        self.engine = Engine(TINY, self.runner, config)
        self.engine.progress = lambda one: merged(retained[one.id]) if one.id in retained else None

    def run(self) -> Counter[str]:
        often = (self.add, self.step, self.stop, self.abort, self.park)
        seldom = (self.send_again, self.move, self.reload)
        self.add()
        for _ in range(OPERATIONS):
            (operation,) = self.draw.choices((*often, *seldom), (4, 4, 4, 1, 4, 1, 1, 1))
            operation()
        while self.engine.has_work:
            self.record(self.engine.step_overlapped())
        self.check()
        return self.counts

    def add(self) -> None:
        place, name = self.draw.randrange(len(POOL)), str(len(self.places))
        self.places[name] = place
        request = msgspec.structs.replace(
            POOL[place],
            id=name,
            share=self.draw.choice(["", "light", "heavy"]),
            priority=self.draw.randint(-1, 1),
            weight=self.draw.choice([1e-3, 0.1, 1.0, 1e3]),
            emit=self.draw.choice(["final", "delta"]),
            durable=self.draw.random() < 0.5,
        )
        self.send(request)

    def send(self, request: Request) -> None:
        """Whoever sends it knows nothing of it yet, or any more."""
        try:
            self.engine.add(request)
        except Overloaded:
            self.counts["refused"] += 1
            self.gone.add(request.id)
            return
        self.requests[request.id] = request
        self.gone.discard(request.id)
        for index in range(request.params.n):
            self.stopped.discard((request.id, index))
            self.outputs.pop((request.id, index), None)

    def step(self) -> None:
        for _ in range(self.draw.randint(1, 3)):
            self.record(self.draw.choice([self.engine.step, self.engine.step_overlapped])())

    def record(self, outputs: list[Output]) -> None:
        for output in outputs:
            assert output.id not in self.gone, "what was aborted spoke"
            earlier = self.outputs[output.id, output.index]
            assert all(item.finish_reason is None for _, item in earlier), "it spoke after its end"
            earlier.append((self.weights, output))

    def stop(self) -> None:
        scheduler = self.engine.scheduler
        parked = [group.request.id for group, _ in scheduler.parking.records()]
        names = parked or scheduler.request_ids()
        if names:
            name = self.draw.choice(names)
            n = self.requests[name].params.n
            indices = sorted(self.draw.sample(range(n), self.draw.randrange(n)))
            cut = self.draw.choice([None, self.draw.randint(0, n)])
            self.stopped |= {(name, index) for index in indices}
            self.stopped |= {(name, index) for index in range(n if cut is None else cut, n)}
            before = scheduler.parking.num_parked
            self.engine.stop(name, np.array(indices, np.int32), cut)
            self.counts["stops and cuts"] += 1
            ended = before - scheduler.parking.num_parked
            self.counts["samples stopped or cut where they were parked"] += ended

    def abort(self) -> None:
        if names := self.engine.scheduler.request_ids():
            self.end(self.draw.choice(names))
            self.counts["aborted"] += 1

    def end(self, name: str) -> None:
        self.gone.add(name)
        self.engine.abort(name)

    def park(self) -> None:
        """Some of those that have sampled, in one go or in two, as in a preemption."""
        self.step()
        self.record(self.engine.settle())
        slots = parkable(self.engine.scheduler.table)
        chosen = np.array([slot for slot in slots if self.draw.random() < 0.8], np.int64)
        for some in np.split(chosen, [self.draw.randint(0, len(chosen))]):
            if len(some):
                self.engine.scheduler.park(some, self.runner.read_slots(some))
                self.counts["parked at random"] += len(some)

    def send_again(self) -> None:
        durable = [name for name, request in self.requests.items() if request.durable]
        open_ones = [name for name in durable if name in self.gone or self.engine.has_request(name)]
        if open_ones:
            request = self.requests[self.draw.choice(open_ones)]
            self.counts["taken over"] += self.engine.has_request(request.id)
            self.send(msgspec.structs.replace(request, weight=self.draw.choice([0.25, 4.0])))

    def move(self) -> None:
        """What is durable goes on in another engine, all else ends."""
        self.record(self.engine.settle())
        self.parked = defaultdict(list)
        for request, parked in self.engine.parked_of_all():
            assert request == self.requests[request.id], "the request last sent is what is kept"
            self.parked[request.id].append(parked)
            self.counts["moved"] += len(parked)
        names = self.engine.scheduler.request_ids()
        self.gone.update(names)
        self.open()
        for name in self.draw.sample(names, len(names)):
            if self.requests[name].durable:
                self.send(self.requests[name])

    def reload(self) -> None:
        """Other weights; the same ones where samples go on with them."""
        running: Running = self.draw.choice(["finish", "drop", "continue"])
        scheduler = self.engine.scheduler
        scheduler.is_held = running == "finish"
        while scheduler.is_held and not scheduler.is_quiet:
            self.record(self.engine.step_overlapped())
        self.record(self.engine.settle())
        for name in scheduler.request_ids() if running == "drop" else ():
            self.end(name)
        self.parked.clear()
        self.weights ^= running != "continue"
        self.engine.load_weights(WEIGHTS[self.weights])
        scheduler.is_held = False
        self.counts["changes of weights"] += 1

    def check(self) -> None:
        scheduler = self.engine.scheduler
        assert scheduler.table.num_owned == scheduler.prefixes.num_pinned == 0
        assert scheduler.parking.num_parked == scheduler.parking.num_bytes == 0
        assert not scheduler.admission.shares.tiers
        for name, request in self.requests.items():
            for index in range(request.params.n) if name not in self.gone else ():
                message = self.outputs[name, index]
                whole = join([output for _, output in message]) if message else Output(name, index)
                assert len({weights for weights, _ in message}) <= 1, "it is of two weights"
                expected = expected_of(self.places[name], message[0][0] if message else 0)[index]
                if (name, index) in self.stopped and whole.finish_reason is None:
                    assert expected.token_ids.startswith(whole.token_ids)
                    self.counts["samples ended early"] += 1
                else:
                    assert whole.token_ids == expected.token_ids
                    assert whole.finish_reason == expected.finish_reason
                    self.counts["samples exact to their end"] += 1
        self.counts["requests"] += len(self.requests)
        self.counts["resumed"] += scheduler.parking.num_resumed


def tried(number: int) -> Counter[str]:
    """What happened in a history."""
    try:
        return History(number).run()
    except Exception as error:
        error.add_note(f"python -m tests.tools.fuzz_scheduler --first {number} --runs 1")
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--runs", type=int, default=1_000, help="histories (1000)")
    parser.add_argument("--first", type=int, default=0, help="the first one's number (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (all cores)")
    asked = parser.parse_args()
    counts: Counter[str] = Counter()
    numbers = range(asked.first, asked.first + asked.runs)
    with ProcessPoolExecutor(asked.jobs, get_context("spawn")) as pool:
        for done, result in enumerate(pool.map(tried, numbers, chunksize=20), 1):
            counts += result
            if done % 1_000 == 0:
                print(f"{done:>9,} histories", flush=True)
    print(f"histories {numbers[0]} … {numbers[-1]}: no exception, all tokens exact")
    for name, count in sorted(counts.items()):
        print(f"{count:>9,} {name}")


if __name__ == "__main__":
    main()
