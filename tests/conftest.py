"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from srm.engine.device.telemetry import turn_off_telemetry
from srm.engine.messages import Request
from srm.engine.process.engine import Engine
from srm.engine.weights.weights import Weights
from tests.kit.engines.making import engine_of, request_of
from tests.kit.engines.numpy_runner import tiny_weights
from tests.kit.serving import SERVER_FLAGS, Server, write_text_model

# Neither load nor luck fails a test; `make fuzz` draws other examples each time.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.register_profile("fuzz", deadline=None, derandomize=False, print_blob=True)
settings.register_profile("mutants", settings.get_profile("suite"), phases=[Phase.generate])
settings.load_profile("suite")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: heard by children
    signal.signal(signal.SIGINT, signal.default_int_handler)
turn_off_telemetry()  # of the sessions that tests make without a ModelRunner

MakeEngine = Callable[..., Engine]
MakeRequest = Callable[..., Request]


@pytest.fixture(scope="session")
def weights() -> Weights:
    return tiny_weights()


@pytest.fixture
def make_engine() -> MakeEngine:
    """make_engine(num_slots=8, …): an engine on the numpy runner, settings as in EngineConfig."""
    return engine_of


@pytest.fixture
def make_request() -> MakeRequest:
    """make_request("a", [5, 6], n=2, priority=1, emit="delta"): the rest are sampling params."""
    return request_of


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
