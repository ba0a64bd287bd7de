"""`srm score` as a user calls it, with the numpy engine: every line in order, or its error."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer

from engine.errors import CheckpointError, ConfigError
from tests.engines.numpy_runner import feed, tiny_weights
from tests.serving import ROOT, TEXT_MODEL

WEIGHTS = tiny_weights(config=TEXT_MODEL)
"""Those of the numpy engine."""


def command(
    model: Path, *flags: str, engine_module: str = "tests.engines.numpy_engine"
) -> list[str]:
    program = (
        "import sys; from server.commands.score import main; from engine.errors import SRMError\n"
        f"try: code = main(sys.argv[1:], engine_module={engine_module!r})\n"
        "except SRMError as error: code = error.exit_code; print(error.message, file=sys.stderr)\n"
        "sys.exit(code)"
    )
    return [sys.executable, "-c", program, f"--model={model}", "--num-slots=16", *flags]


def run(
    model: Path, *flags: str, given: bytes = b"", engine_module: str = "tests.engines.numpy_engine"
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command(model, *flags, engine_module=engine_module),
        input=given,
        cwd=ROOT,
        capture_output=True,
        check=False,
    )


def score(
    model: Path, folder: Path, lines: list[Any], *flags: str, code: int = 0
) -> list[dict[str, Any]]:
    """The results of lines of JSON."""
    source, sink = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("\n".join(json.dumps(line) for line in lines))
    done = run(model, str(source), "-o", str(sink), *flags)
    assert done.returncode == code, done.stderr.decode()
    assert done.stdout == b""
    return [json.loads(line) for line in sink.read_text().splitlines()]


def expected(tokens: list[int]) -> tuple[list[float], list[bool]]:
    """Log-probability of each token but the first, and whether it is the likeliest."""
    state = np.zeros((TEXT_MODEL.num_layers, TEXT_MODEL.d_model))
    logprobs, greedy = [], []
    for position, (token, following) in enumerate(pairwise(tokens)):
        logits, state = feed(WEIGHTS, token, position, state)
        logprobs.append(
            float(logits[following] - logits.max()) - math.log(np.exp(logits - logits.max()).sum())
        )
        greedy.append(int(logits.argmax()) == following)
    return logprobs, greedy


def check(result: dict[str, Any], prompt: list[int], completion: list[int] | None) -> None:
    tokens = prompt + (completion or [])
    logprobs, greedy = expected(tokens)
    assert result["token_ids"] == tokens
    assert len(result["tokens"]) == len(tokens)
    assert result["num_prompt_tokens"] == len(prompt)
    assert result["token_logprobs"][0] is None
    assert result["token_logprobs"][1:] == pytest.approx(logprobs, abs=1e-4)
    first = 0 if completion is None else len(prompt) - 1
    assert result["logprob"] == pytest.approx(sum(logprobs[first:]), abs=1e-3)
    assert result["is_greedy"] == all(greedy[first:])


def test_token_ids_with_and_without_completions(text_model: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines: list[dict[str, Any]] = []
    for i in range(60):
        prompt = rng.integers(0, TEXT_MODEL.vocab_size, rng.integers(1, 60)).tolist()
        lines.append({"prompt": prompt})
        if i % 2:
            lines[-1]["completion"] = rng.integers(0, 300, rng.integers(1, 60)).tolist()
        if i % 3 == 0:
            lines[-1]["id"] = f"line {i}"
    results = score(text_model, tmp_path, lines, "--max-waiting=7", "--max-step-tokens=2100")
    assert [one["id"] for one in results] == [
        line.get("id", number) for number, line in enumerate(lines, 1)
    ]
    for line, result in zip(lines, results, strict=True):
        check(result, line["prompt"], line.get("completion"))


def test_texts_are_tokenized_apart(text_model: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(text_model / "tokenizer.json"))
    lines = [{"prompt": "the cat", "completion": " sat on é"}, {"prompt": "", "completion": "the"}]
    for line, result in zip(lines, score(text_model, tmp_path, lines), strict=True):
        prompt = tokenizer.encode(line["prompt"]).ids
        completion = tokenizer.encode(line["completion"], add_special_tokens=False).ids
        assert prompt[0] == 0
        check(result, prompt, completion)
        assert result["tokens"][0] == "<|begin_of_text|>"


def test_a_greedy_completion_is_said_to_be(text_model: Path, tmp_path: Path) -> None:
    tokens = [0, 5, 6]
    state = np.zeros((TEXT_MODEL.num_layers, TEXT_MODEL.d_model))
    for position in range(8):
        logits, state = feed(WEIGHTS, tokens[position], position, state)
        if position >= 2:
            tokens.append(int(logits.argmax()))
    lines = [
        {"prompt": tokens[:3], "completion": tokens[3:]},
        {"prompt": tokens[:3], "completion": [*tokens[3:-1], (tokens[-1] + 1) % 300]},
        {"prompt": tokens[:4], "completion": []},
    ]
    assert [one["is_greedy"] for one in score(text_model, tmp_path, lines[:2])] == [True, False]
    (refused,) = score(text_model, tmp_path, lines[2:], code=1)
    assert "completion" in refused["error"]["message"]


def test_bad_lines_do_not_stop_the_others(text_model: Path, tmp_path: Path) -> None:
    lines: list[Any] = [
        {"prompt": [5, 6]},
        {"prompt": [5, 400], "id": "too large"},
        {"prompt": [5] * 129, "id": 77},
        {"prompt": [5], "completions": "x", "id": "misspelt"},
        [1, 2],
        {"id": "nothing"},
        {"prompt": [7], "completion": [8]},
    ]
    results = score(text_model, tmp_path, lines, code=1)
    assert [one["id"] for one in results] == [1, "too large", 77, "misspelt", 5, "nothing", 7]
    codes = [one.get("error", {}).get("code") for one in results]
    assert codes == [
        *(None, "invalid_request", "context_length_exceeded", "invalid_request"),
        *("invalid_request", "invalid_request", None),
    ]
    check(results[-1], [7], [8])


def test_standard_input_and_output_carry_results_and_nothing_else(text_model: Path) -> None:
    given = b'{"prompt": [5, 6, 7]}\n\n  \n{"prompt": [9]}\n'
    done = run(text_model, given=given)
    assert done.returncode == 0, done.stderr.decode()
    first, last = (json.loads(line) for line in done.stdout.splitlines())
    check(first, [5, 6, 7], None)
    assert last == {
        "id": 4,
        "tokens": last["tokens"],
        "token_ids": [9],
        "token_logprobs": [None],
        "num_prompt_tokens": 1,
        "logprob": 0.0,
        "is_greedy": True,
    }
    assert b"scoring" in done.stderr


def test_without_a_tokenizer_token_ids_are_scored(text_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "nameless"
    model.mkdir()
    (model / "config.json").write_bytes((text_model / "config.json").read_bytes())
    lines = [{"prompt": [5, 6]}, {"prompt": [5], "completion": "x"}]
    result, refused = score(model, tmp_path, lines, code=1)
    assert result["tokens"] == ["token_id:5", "token_id:6"]
    assert refused["error"]["param"] == "completion"


def test_what_it_cannot_begin_with_is_said(text_model: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": [5, 6]}\n')
    for flags, code, message in (
        (("nowhere.jsonl",), ConfigError.exit_code, "input = nowhere.jsonl: No such file"),
        ((str(source), "-o", str(source)), ConfigError.exit_code, "would be lost"),
        ((str(source), "-o", str(tmp_path)), ConfigError.exit_code, "Is a directory"),
        ((str(source), f"--model={tmp_path}"), CheckpointError.exit_code, "config.json"),
        ((str(source), "--nonsense=1"), 2, "unrecognized arguments"),
    ):
        done = run(text_model, *flags)
        assert (done.returncode, message in done.stderr.decode()) == (code, True), done.stderr
    assert source.read_text() == '{"prompt": [5, 6]}\n'
    done = run(text_model, str(source), engine_module="tests.no_such_engine")
    assert done.returncode == 1
    assert b"the engine process ended, exit code 1" in done.stderr


def test_an_interrupt_keeps_what_is_done_and_leaves_no_process(
    text_model: Path, tmp_path: Path
) -> None:
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": [5, 6, 7, 8]}\n' * 100_000)
    flags = (str(source), f"--output={sink}", "--max-step-tokens=2049")
    with subprocess.Popen(
        command(text_model, *flags), cwd=ROOT, stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 60
        while not (sink.exists() and sink.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
    assert children and not psutil.wait_procs(children, timeout=120)[1]
    lines = sink.read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == list(range(1, len(lines) + 1))
    assert 0 < len(lines) < 100_000
