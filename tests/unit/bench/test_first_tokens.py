"""What `srm bench first-tokens` counts, against what can be counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from bench.host.first_tokens import FirstTokensConfig, markdown, measure
from engine.config import EngineConfig, ModelConfig

SMALL: dict[str, Any] = {
    "widths": (256,),
    "step_ms": (1.0,),
    "row_us": (100.0,),
    "at_once": (1, 40),
    "requests": 50,
    "prompt_tokens": 5,
    "output_tokens": 3,
    "step_tokens": (8,),
    "shares": (0.5, 1.0),
}


def test_one_request_waits_for_its_prompt_and_its_first_row() -> None:
    record = measure(FirstTokensConfig(**SMALL))
    model = ModelConfig(d_model=256, num_layers=8, num_heads=4, n_ctx=512, vocab_size=8192)
    prompt_token_s = 100e-6 * model.prefill_flops_per_token / model.flops_per_token
    first_s = 1e-3 + 4 * prompt_token_s + 1.1e-3
    ones = [case for case in record["cases"] if case.get("at_once") == 1]
    assert len(ones) == 1 + 2 + 1
    for case in ones:
        assert case["steps"] == 4
        assert case["ttft_p50"] == case["ttft_p99"] == pytest.approx(first_s)
        assert case["itl_p99"] == case["itl_most"] == pytest.approx(1.1e-3)
        assert case["tokens_per_s"] == pytest.approx(3 / (first_s + 2.2e-3))


def test_a_default_is_the_schedulers_and_none_is_counted_twice() -> None:
    default = EngineConfig().max_prefill_share
    record = measure(FirstTokensConfig(**{**SMALL, "shares": (0.5, default), "loads": (0.2,)}))
    names = ("prefill_step_tokens", "max_prefill_share")
    bursts = [tuple(case[name] for name in names) for case in record["cases"] if "load" not in case]
    assert bursts == 2 * [(4_096, 0.5), (1_024, 0.5), (1_024, default), (8, default)]
    loads = [case for case in record["cases"] if "load" in case]
    assert [tuple(case[name] for name in names) for case in loads] == [bursts[0], bursts[2]]
    assert all(2 < case["ttft_p99_steps"] < 4 for case in loads)


def test_a_short_limit_makes_more_steps() -> None:
    record = measure(FirstTokensConfig(**SMALL))
    by = {
        (case["prefill_step_tokens"], case["max_prefill_share"]): case
        for case in record["cases"]
        if case.get("at_once") == 40
    }
    assert by[4_096, 0.5]["steps"] == 4
    assert by[8, 0.9]["steps"] > 4
    lines = markdown({"settings": SMALL | {"loads": (0.3, 0.8)}} | record)
    assert any(line.startswith("| d 256 | 40 | 8 | 0.9 |") for line in lines)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"widths": (256, 512)}, "widths, step_ms and row_us must be of one length"),
        ({"at_once": (5_000,)}, "at_once must be 1 … 2048"),
        ({"step_tokens": (1,)}, "step_tokens must be 2 … 4096"),
        ({"shares": (1.5,)}, r"shares must be in \(0, 1\]"),
        ({"output_tokens": 508}, "must be at most 512 together, got 5 and 508"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FirstTokensConfig(**{**SMALL, **settings})
