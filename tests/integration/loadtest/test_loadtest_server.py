"""What `srm loadtest` says of our server is what the server says of itself on /metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from srm.loadtest.analysis.summarize import summarize
from srm.server.routes.health import VERSION
from tests.kit.loads.run_loadtest import loaded
from tests.kit.serving import TEXT_MODEL, Server

Values = dict[str, float]


def scraped(server: Server) -> Values:
    """Sums over labels."""
    values: Values = {}
    page = server.get("/metrics").text
    for name, value in re.findall(r"^(\w+)(?:\{.*\})? (\S+)$", page, re.MULTILINE):
        values[name] = values.get(name, 0.0) + float(value)
    return values


def mean(grown: Values, name: str) -> float:
    return grown[f"{name}_sum"] / grown[f"{name}_count"]


@pytest.mark.parametrize(
    ("api", "has_tokenizer", "streamed"),
    [
        ("completions", False, True),
        ("completions", True, False),
        ("chat", True, True),
        ("chat", True, False),
    ],
)
def test_counts_are_the_same_and_nothing_takes_the_client_less_time(
    server: Server, text_model: Path, api: str, has_tokenizer: bool, streamed: bool
) -> None:
    server.wait_until_idle()
    before = scraped(server)
    run = loaded(
        server.url,
        api=api,
        stream=streamed,
        tokenizer=text_model if has_tokenizer else None,
        vocab_size=TEXT_MODEL.vocab_size,
        arrivals="poisson",
        rate=50,
        requests=50,
        duration_s=0,
        output_tokens="uniform:2,40",
        prompt_tokens="uniform:4,40",
        n="choice:1=0.7,3=0.3",
        prefixes=2,
        prefix_tokens=2,
        workers=2,
        extra_body="{}" if api == "chat" else '{"return_token_ids": true}',
    )
    server.wait_until_idle()
    grown = {name: value - before.get(name, 0.0) for name, value in scraped(server).items()}
    requests, about = run.recording.requests, run.recording.about
    assert (about.scenario.served_model_name, about.versions["server"]) == ("tiny", VERSION)
    summary = summarize(run.recording, window=(0.0, about.seconds + 1))
    samples, tokens = int(requests["n"].sum()), int((requests["n"] * requests["max_tokens"]).sum())

    assert summary.completed == summary.planned == len(requests) == 50
    assert summary.errors == {}
    assert (requests["usage_output_tokens"] == requests["n"] * requests["max_tokens"]).all()
    around = set(requests["usage_prompt_tokens"] - requests["prompt_tokens"])
    assert len(around) == 1, "what a template adds is the same for all"
    assert around == {0} or api == "chat"
    assert grown["srm_completion_tokens_total"] == tokens
    assert grown["srm_prompt_tokens_total"] == requests["usage_prompt_tokens"].sum()
    assert grown["srm_e2e_request_latency_seconds_count"] == len(requests)
    assert grown["srm_engine_time_to_first_token_seconds_count"] == samples
    assert grown["srm_engine_inter_token_latency_seconds_count"] == tokens - samples

    e2e = mean(grown, "srm_e2e_request_latency_seconds")
    assert e2e * 0.99 < summary.e2e.mean
    if not streamed:
        assert summary.ttft.count == summary.itl.count == 0
    elif api == "completions":  # whose events say how many tokens they have
        assert summary.usage_output_tokens == summary.counted_output_tokens == tokens
        assert (summary.checked, summary.miscounted) == (len(requests), 0)
        assert 0 < summary.itl.count <= tokens - samples  # those read with a first one: no
        assert mean(grown, "srm_time_to_first_token_seconds") * 0.99 < summary.ttft.mean
