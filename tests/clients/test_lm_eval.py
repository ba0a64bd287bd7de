"""lm-eval's `local-completions` on a local task: its scores are those of the torch model."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from engine.config import DEMO_MODEL
from tests.clients.conftest import Run, write_tokenizer
from tests.serving import Server
from training.checkpoint import load_model
from training.model import SRM
from training.tasks import problems

TASKS = Path(__file__).parent / "tasks"
TOLERANCE = 1e-4
"""Of a sum of log-probabilities, absolute."""
NUM_PROBLEMS = 12
NUM_TOKENS = 48
"""What the tasks ask for."""
STOPS = ("\n####", "Question:", "\n\n")


@pytest.fixture(scope="module")
def model() -> SRM:
    return load_model(DEMO_MODEL).double()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where lm-eval runs: the data, and a tokenizer as transformers wants it."""
    with (tmp_path / "problems.jsonl").open("w") as file:
        for problem in islice(problems("held-out", 3), NUM_PROBLEMS):
            first = problem.solution.split("\n")[0]
            for solution in (first, problem.solution):  # the first line is often the likeliest
                line = {"prompt": problem.prompt, "solution": solution}
                file.write(json.dumps(line) + "\n")
    write_tokenizer(DEMO_MODEL, tmp_path / "tokenizer")
    return tmp_path


def evaluate(run: Run, folder: Path, url: str, tokenizer: str) -> dict[str, list[dict[str, Any]]]:
    """The samples of both tasks, as lm-eval logs them."""
    base = f"model=demo,base_url={url}/v1/completions,num_concurrent=4,max_retries=3"
    run(
        "lm-eval",
        *("run", "--model", "local-completions", "--batch_size", "8", "--log_samples"),
        *("--model_args", f"{base},{tokenizer},max_length=512"),
        *("--tasks", "srm_likelihood,srm_generation", "--include_path", str(TASKS)),
        *("--output_path", "out"),
    )
    samples = {}
    for path in (folder / "out").rglob("samples_*.jsonl"):
        task = path.name.removeprefix("samples_").rsplit("_", 1)[0]
        samples[task] = [json.loads(line) for line in path.read_text().splitlines()]
    return samples


def arguments(sample: dict[str, Any]) -> tuple[str, Any]:
    """Context, and continuation or generation settings."""
    first = sample["arguments"]["gen_args_0"]
    return first["arg_0"], first["arg_1"]


def scores(model: SRM, prompt: list[int], rest: list[int]) -> tuple[float, bool]:
    """Sum of the log-probabilities of `rest`, and whether each is the likeliest."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + rest]))[0][len(prompt) - 1 : -1]
    logprobs = logits.log_softmax(-1)
    chosen = logprobs[torch.arange(len(rest)), torch.tensor(rest)]
    return float(chosen.sum()), bool((logprobs.argmax(-1) == torch.tensor(rest)).all())


def greedy(model: SRM, tokenizer: Tokenizer, prompt: list[int], num_tokens: int) -> str:
    """The likeliest text, up to a stop string, the end of text or so many tokens."""
    tokens = list(prompt)
    state = model.empty_state(1)
    for position in range(len(prompt) + num_tokens - 1):
        with torch.no_grad():
            logits, state = model.step(torch.tensor([tokens[position]]), state, position)
        if position + 1 < len(prompt):
            continue
        tokens.append(int(logits[0].argmax()))
        text = tokenizer.decode(tokens[len(prompt) :])
        found = [text.index(stop) for stop in STOPS if stop in text]
        if found:
            return text[: min(found)]
        if tokens[-1] == model.config.eos_token_id:
            break
    return tokenizer.decode(tokens[len(prompt) :])


def check(
    samples: dict[str, list[dict[str, Any]]], model: SRM, tokenizer: Tokenizer, has_bos: bool
) -> None:
    assert len(samples["srm_likelihood"]) == len(samples["srm_generation"]) == 2 * NUM_PROBLEMS
    worst = 0.0
    kinds = set()
    for sample in samples["srm_likelihood"]:
        context, continuation = arguments(sample)
        whole = tokenizer.encode(context + continuation, add_special_tokens=has_bos).ids
        prompt = tokenizer.encode(context, add_special_tokens=has_bos).ids
        expected, is_greedy = scores(model, prompt, whole[len(prompt) :])
        ((found, found_greedy),) = sample["resps"][0]
        worst = max(worst, abs(float(found) - expected))
        assert found_greedy == str(is_greedy)
        kinds.add(is_greedy)
    print(f"largest difference of a sum of log-probabilities: {worst:.2e}")
    assert worst < TOLERANCE
    assert kinds == ({True, False} if has_bos else {False})
    said = {arguments(one)[0]: one["resps"][0][0] for one in samples["srm_generation"]}
    assert len(said) == NUM_PROBLEMS
    for context, text in said.items():
        prompt = tokenizer.encode(context, add_special_tokens=has_bos).ids
        assert text == greedy(model, tokenizer, prompt, NUM_TOKENS)


def test_scores_and_texts_are_torchs(
    demo: Server, run: Run, folder: Path, model: SRM, tokenizer: Tokenizer
) -> None:
    """With a tokenizer of lm-eval's own, which begins texts as the model was taught to."""
    own = "tokenizer_backend=huggingface,tokenizer=tokenizer,add_bos_token=True"
    check(evaluate(run, folder, demo.url, own), model, tokenizer, has_bos=True)


def test_the_servers_tokenizer_serves_as_well(
    demo: Server, run: Run, folder: Path, model: SRM, tokenizer: Tokenizer
) -> None:
    found = evaluate(run, folder, demo.url, "tokenizer_backend=auto")
    check(found, model, tokenizer, has_bos=False)


def test_chats(demo: Server, run: Run, folder: Path) -> None:
    run(
        "lm-eval",
        *("run", "--model", "local-chat-completions", "--apply_chat_template", "--log_samples"),
        *("--model_args", f"model=demo,base_url={demo.url}/v1/chat/completions"),
        *("--tasks", "srm_generation", "--include_path", str(TASKS), "--output_path", "out"),
        *("--limit", "4"),
    )
    (path,) = (folder / "out").rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(samples) == 4
    assert all(sample["resps"][0][0] for sample in samples)
