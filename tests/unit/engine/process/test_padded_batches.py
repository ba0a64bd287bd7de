"""Steps of one token are padded where one row is summed in another order: nobody may notice."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.messages import SamplingParams
from engine.process.engine import Engine
from engine.steps.batch import Batch, StepResult, padded
from engine.weights.weights import Weights
from tests.engines.numpy_runner import NumpyRunner

CONFIG = EngineConfig(num_slots=4, max_step_rows=4, max_step_tokens=5, prefix_slots=2)


class PaddingRunner(NumpyRunner):
    """Pads every step, as a GPU's runner does, with the last slot of its pool."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights, CONFIG.num_slots, CONFIG.prefix_slots + 1)
        self.num_padded = 0

    def _run(self, batch: Batch) -> StepResult:
        run = padded(batch, len(self._states) - 1)
        assert run.num_tokens > 1 and len(run.targets) != 1
        assert (run.num_decode, len(run.score_rows)) == (batch.num_decode, len(batch.score_rows))
        assert set(run.write_slots) - set(batch.write_slots) <= {len(self._states) - 1}
        self.num_padded += run is not batch
        return super()._run(run)


def test_a_padded_step_gives_what_a_bare_one_does(weights: Weights) -> None:
    found = []
    runners = [NumpyRunner(weights, CONFIG.num_slots, CONFIG.prefix_slots), PaddingRunner(weights)]
    for runner in runners:
        engine = Engine(weights.config, runner, CONFIG)
        for prompt in ([3], [4, 5], [6, 7, 8, 9, 10]):
            for n in (1, 3):
                asked = SamplingParams(
                    n=n, max_tokens=5, logprobs=2, prompt_logprobs=1, seed=n, ignore_eos=True
                )
                plain = SamplingParams(n=n, max_tokens=5, temperature=0, logit_bias={3: -1.0})
                found.append([engine.generate([prompt], params) for params in (asked, plain)])
    assert repr(found[: len(found) // 2]) == repr(found[len(found) // 2 :])
    assert isinstance(runners[1], PaddingRunner) and runners[1].num_padded > 10
