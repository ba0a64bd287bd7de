"""`srm score` as a user calls it, with the numpy engine: every line in order, or its error."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer

from srm.errors import CheckpointError, ConfigError, EngineUnavailable
from srm.server.commands.score import main
from tests.kit.engines.likelihoods import distributions, greedy_after
from tests.kit.serving import ROOT, TEXT_MODEL, wait_until

ENGINE = "tests.kit.processes.numpy_engine"


def command(model: Path, *flags: str) -> list[str]:
    program = (
        "import sys; from srm.server.commands.score import main\n"
        f"sys.exit(main(sys.argv[1:], engine_module={ENGINE!r}))"
    )
    return [sys.executable, "-c", program, f"--model={model}", "--num-slots=16", *flags]


def score(
    model: Path, folder: Path, lines: list[Any], *flags: str, code: int = 0
) -> list[dict[str, Any]]:
    """The results of lines of JSON."""
    source, sink = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("\n".join(json.dumps(line) for line in lines), "utf-8-sig")
    arguments = [f"--model={model}", "--num-slots=16", str(source), "-o", str(sink), *flags]
    assert main(arguments, ENGINE) == code
    return [json.loads(line) for line in sink.read_text().splitlines()]


def check(result: dict[str, Any], prompt: list[int], completion: list[int] | None) -> None:
    """Whether a result has the model's own log-probabilities."""
    tokens = prompt + (completion or [])
    rows, following = distributions(tokens[:-1]), tokens[1:]
    logprobs = [float(row[token]) for row, token in zip(rows, following, strict=True)]
    assert result["token_ids"] == tokens
    assert len(result["tokens"]) == len(tokens)
    assert result["num_prompt_tokens"] == len(prompt)
    assert result["token_logprobs"][0] is None
    assert result["token_logprobs"][1:] == pytest.approx(logprobs, abs=1e-4)
    first = 0 if completion is None else len(prompt) - 1
    assert result["logprob"] == pytest.approx(sum(logprobs[first:]), abs=1e-3)
    greedy = [int(row.argmax()) == token for row, token in zip(rows, following, strict=True)]
    assert result["is_greedy"] == all(greedy[first:])


def test_every_line_has_its_scores_or_its_error(
    text_model: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Token ids and texts, with and without completions, and lines at fault among them."""
    rng = np.random.default_rng(0)
    likeliest = greedy_after([0, 5, 6], 6)
    other = [*likeliest[:-1], (likeliest[-1] + 1) % 300]
    lines: list[dict[str, Any]] = [
        {"id": "greedy", "prompt": [0, 5, 6], "completion": likeliest},
        {"id": "not greedy", "prompt": [0, 5, 6], "completion": other},
    ]
    for i in range(60):
        line = {"prompt": rng.integers(0, TEXT_MODEL.vocab_size, rng.integers(1, 60)).tolist()}
        if i % 2:
            line["completion"] = rng.integers(0, 300, rng.integers(1, 60)).tolist()
        if i % 3 == 0:
            line["id"] = f"line {i}"
        lines.append(line)
    texts = [{"prompt": "the cat", "completion": " sat on é"}, {"prompt": "", "completion": "the"}]
    bad: dict[str, dict[str, Any]] = {
        "too large": {"prompt": [5, 400]},
        "too long": {"prompt": [5] * 129},
        "misspelt": {"prompt": [5], "completions": "x"},
        "nothing": {},
        "empty": {"prompt": [5], "completion": []},
    }
    given = [*lines, *texts, *({**line, "id": id} for id, line in bad.items()), [1, 2], lines[0]]
    flags = ("--max-waiting=7", "--max-step-tokens=2100")
    results = score(text_model, tmp_path, given, *flags, code=1)
    assert [result["id"] for result in results] == [
        line.get("id", number) if isinstance(line, dict) else number
        for number, line in enumerate(given, 1)
    ]
    for line, result in zip([*lines, lines[0]], [*results[:62], results[-1]], strict=True):
        check(result, line["prompt"], line.get("completion"))
    assert [result["is_greedy"] for result in results[:2]] == [True, False]
    tokenizer = Tokenizer.from_file(str(text_model / "tokenizer.json"))
    for text, result in zip(texts, results[62:64], strict=True):  # each tokenized apart
        prompt = tokenizer.encode(text["prompt"]).ids
        completion = tokenizer.encode(text["completion"], add_special_tokens=False).ids
        assert prompt[0] == 0
        check(result, prompt, completion)
        assert result["tokens"][0] == "<|begin_of_text|>"
    errors = {result["id"]: result["error"] for result in results[64:-1]}
    assert "completion" in errors["empty"]["message"]
    assert {id: error["code"] for id, error in errors.items()} == {
        **dict.fromkeys([*bad, 70], "invalid_request"),
        "too long": "context_length_exceeded",
    }
    assert not capfdbinary.readouterr().out


def test_standard_input_and_output_carry_results_and_nothing_else(text_model: Path) -> None:
    given = b'{"prompt": [5, 6, 7]}\n\n  \n{"prompt": [9]}\n'
    done = subprocess.run(
        command(text_model), input=given, cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    first, last = (json.loads(line) for line in done.stdout.splitlines())
    check(first, [5, 6, 7], None)
    check(last, [9], None)
    names = "id tokens token_ids token_logprobs num_prompt_tokens logprob is_greedy"
    assert set(first) == set(last) == set(names.split())
    assert (first["id"], last["id"], last["logprob"], last["is_greedy"]) == (1, 4, 0.0, True)
    assert b"scoring" in done.stderr


def test_without_a_tokenizer_token_ids_are_scored(text_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "nameless"
    model.mkdir()
    (model / "config.json").write_bytes((text_model / "config.json").read_bytes())
    lines = [{"prompt": [5, 6]}, {"prompt": [5], "completion": "x"}]
    result, refused = score(model, tmp_path, lines, code=1)
    assert result["tokens"] == ["token_id:5", "token_id:6"]
    assert refused["error"]["param"] == "completion"


def test_what_it_cannot_begin_with_is_said(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": [5, 6]}\n')
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    for flags, kind, message in (
        (["nowhere.jsonl"], ConfigError, "input = nowhere.jsonl: No such file"),
        ([], ConfigError, "input is missing"),
        ([str(source), "-o", str(source)], ConfigError, "would be lost"),
        ([str(source), "-o", str(tmp_path)], ConfigError, "Is a directory"),
        ([str(source), f"--model={tmp_path}"], CheckpointError, "config.json"),
        ([str(source)], EngineUnavailable, "the engine process ended, exit code 1"),
    ):
        output = ["-o", str(tmp_path / "out.jsonl")]
        with pytest.raises(kind, match=message):
            main([f"--model={text_model}", *output, *flags], engine_module="tests.no_such_engine")
    assert source.read_text() == '{"prompt": [5, 6]}\n'


def test_an_interrupt_keeps_what_is_done_and_leaves_no_process(
    text_model: Path, tmp_path: Path
) -> None:
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": [5, 6, 7, 8]}\n' * 50_000)
    flags = (str(source), f"--output={sink}", "--max-step-tokens=2049")
    with subprocess.Popen(
        command(text_model, *flags), cwd=ROOT, stderr=subprocess.DEVNULL
    ) as process:
        wait_until(lambda: sink.exists() and sink.stat().st_size)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
    assert children and not psutil.wait_procs(children, timeout=120)[1]
    lines = sink.read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == list(range(1, len(lines) + 1))
    assert 0 < len(lines) < 50_000
