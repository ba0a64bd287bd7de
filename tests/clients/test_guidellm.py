"""guidellm drives the server with streams and counts what we count."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from srm.training.problems.drawn import problems
from tests.clients.conftest import Noted
from tests.clients.figures import guidellm
from tests.kit.serving import Server

NUM_REQUESTS, NUM_TOKENS = 24, 16


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_all_requests_are_counted(demo: Server, tmp_path: Path, noted: Noted, route: str) -> None:
    prompts = [problem.prompt for problem in islice(problems("held-out", 6), NUM_REQUESTS)]
    lines = [{"prompt": prompt, "output_tokens_count": NUM_TOKENS} for prompt in prompts]
    before = demo.metric("srm_completion_tokens_total")
    result = guidellm(tmp_path, demo.url, route, "kind=concurrent,streams=6", lines)
    none = {"errored": 0, "incomplete": 0}
    counted = {"successful": NUM_REQUESTS, "total": NUM_REQUESTS, **none}
    assert result["metrics"]["request_totals"] == counted
    for request in result["requests"]["successful"]:
        assert request["output_tokens"] == NUM_TOKENS and request["output"]
        assert request["time_to_first_token_ms"] > 0
    if route == "/v1/completions":
        assert all(request["prompt_tokens"] > 10 for request in result["requests"]["successful"])
        grown = demo.metric("srm_completion_tokens_total") - before
        assert grown == NUM_REQUESTS * NUM_TOKENS
    noted("guidellm", f"`run`, `{route}`")
