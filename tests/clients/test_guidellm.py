"""guidellm drives the server with streams and counts what we count."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from engine.config import DEMO_MODEL
from tests.clients.conftest import Run, write_tokenizer
from tests.serving import Server
from training.tasks import problems

NUM_REQUESTS, NUM_TOKENS = 24, 16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with (tmp_path / "prompts.jsonl").open("w") as file:
        for problem in islice(problems("held-out", 6), NUM_REQUESTS):
            line = {"prompt": problem.prompt, "output_tokens_count": NUM_TOKENS}
            file.write(json.dumps(line) + "\n")
    write_tokenizer(DEMO_MODEL, tmp_path / "tokenizer")
    return tmp_path


def benchmark(run: Run, folder: Path, url: str, route: str) -> dict[str, Any]:
    run(
        "guidellm",
        *("run", "--backend", f"kind=openai_http,target={url},request_format={route}"),
        *("--profile", "kind=concurrent,streams=6"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", "kind=huggingface_auto,model=tokenizer"),
        *("--data", "kind=json_file,path=prompts.jsonl"),
        *("--output", "kind=json,path=result.json", "--disable-console"),
    )
    (found,) = json.loads((folder / "result.json").read_text())["benchmarks"]
    result: dict[str, Any] = found
    return result


def check(result: dict[str, Any]) -> None:
    assert result["metrics"]["request_totals"] == {
        "successful": NUM_REQUESTS,
        "errored": 0,
        "incomplete": 0,
        "total": NUM_REQUESTS,
    }
    for one in result["requests"]["successful"]:
        assert one["output_tokens"] == NUM_TOKENS
        assert one["output"]
        assert one["time_to_first_token_ms"] > 0


def test_completions(demo: Server, run: Run, folder: Path) -> None:
    before = demo.metric("srm_completion_tokens_total")
    result = benchmark(run, folder, demo.url, "/v1/completions")
    check(result)
    assert all(one["prompt_tokens"] > 10 for one in result["requests"]["successful"])
    grown = demo.metric("srm_completion_tokens_total") - before
    assert grown == NUM_REQUESTS * NUM_TOKENS


def test_chats(demo: Server, run: Run, folder: Path) -> None:
    check(benchmark(run, folder, demo.url, "/v1/chat/completions"))
