"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import Phase, settings

from engine.config import EngineConfig
from engine.device.telemetry import turn_off_telemetry
from engine.messages import Request, SamplingParams
from engine.process.engine import Engine
from engine.weights.weights import Weights
from tests.engines.numpy_runner import NumpyRunner, tiny_weights
from tests.serving import SERVER_FLAGS, Server, write_text_model

# Neither load nor luck fails a test; `make fuzz` draws other examples each time.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.register_profile("fuzz", deadline=None, derandomize=False, print_blob=True)
settings.register_profile("mutants", settings.get_profile("suite"), phases=[Phase.generate])
settings.load_profile("suite")
turn_off_telemetry()  # of the sessions that tests make without a ModelRunner

MakeEngine = Callable[..., Engine]
MakeRequest = Callable[..., Request]


@pytest.fixture(scope="session")
def weights() -> Weights:
    return tiny_weights()


@pytest.fixture
def make_engine(weights: Weights) -> MakeEngine:
    """make_engine(num_slots=8, …): an engine on the numpy runner, settings as in EngineConfig."""

    def make(
        num_slots: int = 8,
        max_step_rows: int = 8,
        max_step_tokens: int = 64,
        max_waiting: int = 100,
        prefix_slots: int = 4,
        prefix_cache: bool = True,
        max_waiting_bytes: int = 1024**3,
        max_parked_bytes: int = 1024**3,
        model: Weights = weights,
    ) -> Engine:
        config = EngineConfig(
            num_slots=num_slots,
            max_step_rows=max_step_rows,
            max_step_tokens=max_step_tokens,
            max_waiting=max_waiting,
            prefix_slots=prefix_slots,
            prefix_cache=prefix_cache,
            max_waiting_bytes=max_waiting_bytes,
            max_parked_bytes=max_parked_bytes,
        )
        runner = NumpyRunner(model, config.num_slots)
        return Engine(model.config, runner, config, model.fingerprint)

    return make


@pytest.fixture
def make_request() -> MakeRequest:
    """make_request("a", [5, 6], n=2, priority=1, emit="delta"): the rest are sampling params."""

    def make(
        request_id: str = "a",
        prompt: list[int] | None = None,
        priority: int = 0,
        emit: Literal["final", "delta", "columns"] = "final",
        stream: int = 0,
        share: str = "",
        weight: float = 1.0,
        durable: bool = False,
        **params: object,
    ) -> Request:
        tokens = [5, 6, 7] if prompt is None else prompt
        return Request(
            id=request_id,
            prompt_token_ids=np.array(tokens, "<i4").tobytes(),
            params=SamplingParams(**{"ignore_eos": True, **params}),  # type: ignore[arg-type]
            priority=priority,
            emit=emit,
            stream=stream,
            share=share,
            weight=weight,
            durable=durable,
        )

    return make


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model's config and tokenizer, named `tiny`."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_text_model(folder)
    return folder


@pytest.fixture(scope="session")
def server(text_model: Path) -> Iterator[Server]:
    """`srm serve` on the numpy engine, for all tests that leave it as it was."""
    with Server(text_model, *SERVER_FLAGS) as running:
        yield running
