"""`srm loadtest` says what guidellm says of the same server under the same load, within 5 %."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.figures import MEASURES, Figures, Histograms, Load, by_guidellm, by_srm, by_toy
from tests.kit.loads.toy_server import ToyConfig, ToyServer
from tests.kit.serving import Server

TOY = ToyConfig(ttft_s=1.0, itl_s=0.05)
"""So slow that what a busy machine adds to it is little of it."""
PROMPT = "Question: Ava has 6 boxes with 7 pears each. How many pears is that in all?\nAnswer:"


def within(who: str, figures: Figures, expected: Figures) -> None:
    assert figures.requests == expected.requests
    for name in MEASURES:
        close = pytest.approx(getattr(expected, name), rel=0.05)
        assert getattr(figures, name) == close, f"{name} of {who}"


@pytest.mark.parametrize(
    "load",
    [
        Load(requests=32, tokens=32, prompt=PROMPT, streams=8),
        Load(requests=40, tokens=32, prompt=PROMPT, rate=6),
    ],
    ids=["closed", "open"],
)
def test_on_a_server_of_exact_timing(tmp_path: Path, load: Load) -> None:
    with ToyServer(TOY) as toy:
        ours = by_srm(tmp_path / "srm", toy.url, load)
        within("srm, truth", ours, by_toy(toy.served))
        toy.served.clear()
        theirs = by_guidellm(tmp_path / "guidellm", toy.url, load)
        within("guidellm, truth", theirs, by_toy(toy.served))
    within("srm, guidellm", ours, theirs)


def test_on_our_server_tokens_are_the_same_and_so_are_its_histograms(
    tmp_path: Path, demo: Server
) -> None:
    """Times are those of one run on a busy machine."""
    load = Load(requests=40, tokens=64, prompt=PROMPT, streams=8)
    for tool in (by_srm, by_guidellm):
        before = demo.metric("srm_completion_tokens_total")
        histograms = Histograms(demo.url)
        reported = tool(tmp_path / tool.__name__, demo.url, load)
        truth = histograms.figures()
        assert reported.requests == truth.requests == load.requests
        grown = demo.metric("srm_completion_tokens_total") - before
        assert grown == load.requests * load.tokens
        assert reported.e2e_s >= truth.e2e_s * 0.95
        assert reported.tpot_s == pytest.approx(truth.tpot_s, rel=0.25)
