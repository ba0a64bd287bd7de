"""An engine process of the tests' own, and models, for all tests of this folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from srm.engine.process.engine import Engine
from srm.engine.weights.weights import Weights
from srm.engine.wiring import EngineWiring
from tests.kit.engines.numpy_runner import NumpyRunner
from tests.kit.engines.served_engine import NUM_SLOTS, RawClient, Serve, Served, endpoint_of


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/engine"


@pytest.fixture
def serve(weights: Weights, endpoint: str) -> Iterator[Serve]:
    """serve(BrokenRunner, max_waiting=3, drain_s=0): starts one; all are drained at the end. Of
    several each has a `number`, and listens at `endpoint_of` it."""
    started = []

    def start(
        runner: type[NumpyRunner] = NumpyRunner,
        client_timeout_s: float = 120,
        max_waiting: int = 100,
        drain_s: float = 120,
        request_timeout_s: float = 0,
        make_engine: type[Engine] = Engine,
        number: int = 0,
        **settings: Any,
    ) -> Served:
        config = EngineWiring(
            num_slots=NUM_SLOTS,
            max_step_rows=8,
            max_step_tokens=32,
            max_waiting=max_waiting,
            endpoint=endpoint_of(endpoint, number),
            drain_s=drain_s,
            request_timeout_s=request_timeout_s,
            **settings,
        )
        engine = make_engine(
            weights.config, runner(weights, NUM_SLOTS), config, weights.fingerprint
        )
        served = Served(engine, config, client_timeout_s)
        started.append(served)
        return served

    yield start
    for served in started:
        served.process.drain()
        served.process.drain()
        served.join()
        assert served.exit_code is not None


@pytest.fixture
def raw(endpoint: str) -> Iterator[RawClient]:
    client = RawClient(endpoint)
    yield client
    client.close()


@pytest.fixture(scope="module")
def folders(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has model folders `0` and `1`, which differ in their weights."""
    root = tmp_path_factory.mktemp("weights")
    for seed in ("0", "1"):
        shutil.copytree(text_model, root / seed)
        (root / seed / "seed").write_text(seed)
    return root


@pytest.fixture
def tiny_folder(weights: Weights, tmp_path: Path) -> Path:
    """A checkpoint's folder for the tests' own engine: no tokenizer, token ids alone."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_bytes(msgspec.json.encode(weights.config))
    return folder
