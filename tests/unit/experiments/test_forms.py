"""Forms are measured in processes of their own, and none beyond the limits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from research.experiments.forms import FORMS, Settings, is_followed, limitation, measure, page
from research.experiments.harness.result_cache import Numbers
from research.experiments.harness.runner import in_fresh_process
from srm.engine.config import ModelConfig
from srm.training.model import SRM
from tests.unit.experiments.conftest import Experiment


def test_each_length_is_measured_and_shown(run_experiment: Experiment) -> None:
    record, text, picture = run_experiment("forms", forms=("chunked",), shortest=8)
    assert list(record["results"]) == ["chunked 8", "chunked 16"]
    for results in record["results"].values():
        assert [item["seed"] for item in results] == [0, 1]
        assert all(item["tokens"] == 32 and len(item["seconds"]) == 2 for item in results)
        assert all(item["bytes"] >= 0 < item["tokens_per_s"] for item in results)
    assert text.count("\n| chunked | ") == 2 and "| form | 8 tokens | 16 tokens |" in text
    assert "Whether ours does takes three lengths of it." in text
    assert "<!-- chunked -->" in picture


def test_memory_is_that_of_the_passes() -> None:
    """Matrices of four heads over 2,048 tokens are 64 MiB in float32; logits of as many tokens and
    1,024 ids 8, and so are their gradients."""
    config = Settings(steps=1, n_ctx=2_048, d_model=8, num_layers=1)
    published, chunked = (
        in_fresh_process(partial(measure, config, form, 2_048))(0)["bytes"]
        for form in ("published", "chunked")
    )
    assert chunked > 16 * 2**20
    assert published > chunked + 64 * 2**20


def test_lengths_are_halved_as_long_as_they_can_be() -> None:
    assert Settings(n_ctx=512, shortest=128).lengths == [128, 256, 512]
    assert Settings(n_ctx=500, shortest=100).lengths == [125, 250, 500]
    assert Settings(n_ctx=300, shortest=10).lengths == [75, 150, 300]


def test_the_three_forms_are_one_function() -> None:
    model = SRM(ModelConfig(8, 2, 4, 16, 64)).double()
    ids = torch.arange(32).view(2, 16)
    first, *others = (forward(model, ids) for name, forward in FORMS.values() if name == "SRM")
    assert len(others) == 2
    for other in others:
        assert_close(other, first, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_can_be_measured(form: str) -> None:
    config = Settings(steps=1, rows=2, n_ctx=16, shortest=8, d_model=8, num_layers=1)
    results = measure(config, form, 8, seed=0)
    assert results["tokens"] == 32 and len(results["seconds"]) == 1


def result(seconds: float, mib: float) -> Numbers:
    return {"seconds": [seconds, 1.0], "bytes": mib * 2**20, "tokens_per_s": 4_096 / seconds}


def test_what_may_grow_beyond_a_limit_is_not_run_and_said() -> None:
    config = Settings(most_seconds=40, most_gib=2)
    assert is_followed(config, [result(10, 512)])
    assert not is_followed(config, [result(1, 1), result(10.1, 512)])
    assert not is_followed(config, [result(1, 1), result(10, 513)])
    results = {f"chunked {length}": [result(2.0, 50)] for length in config.lengths}
    results |= {"published 512": [result(4.0, 100)], "published 1024": [result(8.0, 600)]}
    text = "\n".join(page(config, results))
    assert "| published | – | – | 1,024 | 512 | – | – |" in text.replace(" 1024 ", " 1,024 ")
    assert "Not run: published at 2,048 tokens and more. At 1,024 it took 8.0 s an update" in text
    assert "Not run: chunked" not in text


@pytest.mark.parametrize(
    ("most", "message"),
    [
        ([10, 20, 60], "that agrees, a square adds four"),
        ([10, 20, 40], "that does not agree, a square would add four"),
        ([20, 10, 60], "that does not agree"),
        ([10, 20], "takes three lengths"),
    ],
)
def test_the_memory_of_the_published_form_is_compared(most: list[float], message: str) -> None:
    assert message in limitation({2**place: [result(1.0, mib)] for place, mib in enumerate(most)})
