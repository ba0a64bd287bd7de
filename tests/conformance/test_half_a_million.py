"""500,000 sequences that run at once in MAX: all end well, as if alone, in the memory computed."""

from __future__ import annotations

import gc
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from operator import attrgetter
from pathlib import Path

import numpy as np
import psutil
import pytest

from srm.engine.config import EngineConfig, ModelConfig
from srm.engine.messages import Output, Request
from srm.engine.state.slot_counts import slot_bytes
from tests.kit.engines.making import ints, request_of
from tests.kit.engines.numpy_runner import tiny_weights
from tests.kit.models.demo import afresh, engine_on_max
from tests.kit.processes.run_engine import run

MODEL = ModelConfig(d_model=64, num_layers=2, num_heads=4, n_ctx=16, vocab_size=256)
NUM_REQUESTS, SAMPLES, MAX_TOKENS = 500, 1_000, 10
TOTAL = NUM_REQUESTS * SAMPLES
COMPARED = (0, 123, 499)
"""Requests that run again, alone."""
ROWS = 65_536
"""Of a step: the sequences take turns."""
CONFIG = EngineConfig(
    num_slots=TOTAL,
    prefix_cache=False,  # for one of like prompts would start a step later, when some have ended
    max_step_rows=ROWS,
    max_step_tokens=ROWS + 4_096,
    max_waiting=TOTAL,
)


def make_request(number: int) -> Request:
    prompt = np.random.default_rng(number).integers(2, MODEL.vocab_size, 2 + number % 5)
    sampling = {"n": SAMPLES, "max_tokens": MAX_TOKENS, "top_p": 0.9, "seed": number}
    return request_of(str(number), prompt.tolist(), ignore_eos=False, **sampling)


def check_ending(output: Output) -> None:
    """It stopped at its first end of text, or reached its length without one."""
    tokens = ints(output.token_ids)
    ends = [place for place, token in enumerate(tokens) if token == MODEL.eos_token_id]
    if output.finish_reason == "stop":
        assert ends == [len(tokens) - 1]
    else:
        assert (output.finish_reason, len(tokens), ends) == ("length", MAX_TOKENS, [])


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.slow
def test_half_a_million_sequences_run_at_once(tmp_path: Path) -> None:
    # In a process of its own: what earlier tests have freed would be taken for memory not needed.
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        process.submit(run_half_a_million, tmp_path).result()


def run_half_a_million(cache_dir: Path) -> None:
    weights = tiny_weights(config=MODEL)
    with engine_on_max(weights, num_slots=TOTAL, cache_dir=cache_dir) as on_max:
        # A step of all rows first, so that its memory is not taken for that of slots.
        engine = afresh(on_max, CONFIG)
        engine.add(request_of("warm", [2], n=ROWS, max_tokens=1))
        run(engine)
        gc.collect()
        before, most, taken = resident_bytes(), 0, 0
        engine = afresh(on_max, CONFIG)
        table = engine.scheduler.table
        for number in range(NUM_REQUESTS):
            engine.add(make_request(number))

        ended = Counter[str]()
        entries: dict[str, list[Output]] = {str(number): [] for number in COMPARED}
        while engine.has_work:
            outputs = engine.step_overlapped()
            most = max(most, table.num_owned)
            for output in outputs:
                check_ending(output)
                ended[output.id] += 1
                if output.id in entries:
                    entries[output.id].append(output)
            if not any(output.finish_reason == "length" for output in outputs):
                taken = resident_bytes() - before  # of all sequences, before they give slots back

        assert most == TOTAL
        assert ended == Counter({str(number): SAMPLES for number in range(NUM_REQUESTS)})
        assert table.num_free == CONFIG.num_slots
        computed = (TOTAL - ROWS) * slot_bytes(MODEL) + table.nbytes
        assert 0.85 < taken / computed < 1.2, (taken, computed)

    few = {"num_slots": 999, "max_step_rows": 300}
    with engine_on_max(weights, **few, cache_dir=cache_dir) as on_max:
        for number in COMPARED:
            engine = afresh(on_max, CONFIG, **few)
            engine.add(make_request(number))
            again = sorted(run(engine), key=attrgetter("index"))
            assert again == sorted(entries[str(number)], key=attrgetter("index"))
