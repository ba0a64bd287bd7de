"""lm-eval on local tasks: its scores and its texts are those of the torch model."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from srm.engine.config import DEMO_MODEL
from srm.training.problems.drawn import problems
from tests.clients.conftest import Noted, Run, write_tokenizer
from tests.clients.expected import TOLERANCE, greedy, scores, tokenizer
from tests.kit.serving import Server

TASKS = Path(__file__).parent / "tasks"
NUM_PROBLEMS = 12
NUM_TOKENS = 48
"""What the tasks ask for."""
STOPS = ("\n####", "Question:", "\n\n")
OWN = "tokenizer_backend=huggingface,tokenizer=tokenizer,add_bos_token=True"
"""A tokenizer of lm-eval's own, which begins texts as the model was taught to."""
OF_THE_SERVER = "tokenizer_backend=auto"

Samples = dict[str, list[dict[str, Any]]]
Evaluate = Callable[..., Samples]


@pytest.fixture
def evaluate(demo: Server, run: Run, tmp_path: Path) -> Evaluate:
    """evaluate("local-completions", PATH, MODEL_ARGS, TASKS, …): the samples logged, by task."""
    with (tmp_path / "problems.jsonl").open("w") as file:
        for problem in islice(problems("held-out", 3), NUM_PROBLEMS):
            first = problem.solution.split("\n")[0]
            for solution in (first, problem.solution):  # the first line is often the likeliest
                line = {"prompt": problem.prompt, "solution": solution}
                file.write(json.dumps(line) + "\n")
    write_tokenizer(DEMO_MODEL, tmp_path / "tokenizer")

    def samples(kind: str, path: str, settings: str, tasks: str, *flags: str) -> Samples:
        run(
            "lm-eval",
            *("run", "--model", kind, "--log_samples", "--output_path", "out"),
            *("--model_args", f"model=demo,base_url={demo.url}{path}{settings}"),
            *("--tasks", tasks, "--include_path", str(TASKS), *flags),
        )
        return {
            path.name.removeprefix("samples_").rsplit("_", 1)[0]: [
                json.loads(line) for line in path.read_text().splitlines()
            ]
            for path in (tmp_path / "out").rglob("samples_*.jsonl")
        }

    return samples


def arguments(sample: dict[str, Any]) -> tuple[str, Any]:
    """Context, and continuation or generation settings."""
    first = sample["arguments"]["gen_args_0"]
    return first["arg_0"], first["arg_1"]


@pytest.mark.parametrize(
    ("backend", "has_bos"), [(OWN, True), (OF_THE_SERVER, False)], ids=["own", "of-the-server"]
)
def test_scores_and_texts_are_torchs(
    evaluate: Evaluate, noted: Noted, backend: str, has_bos: bool
) -> None:
    samples = evaluate(
        "local-completions",
        "/v1/completions",
        f",num_concurrent=4,max_retries=3,{backend},max_length=512",
        "srm_likelihood,srm_generation",
        *("--batch_size", "8"),
    )

    def ids_of(text: str) -> list[int]:
        ids: list[int] = tokenizer().encode(text, add_special_tokens=has_bos).ids
        return ids

    assert len(samples["srm_likelihood"]) == len(samples["srm_generation"]) == 2 * NUM_PROBLEMS
    kinds = set()
    for sample in samples["srm_likelihood"]:
        context, continuation = arguments(sample)
        prompt = ids_of(context)
        logprobs, is_greedy = scores(prompt, ids_of(context + continuation)[len(prompt) :])
        ((result, found_greedy),) = sample["resps"][0]
        assert float(result) == pytest.approx(sum(logprobs), rel=0, abs=TOLERANCE)
        assert found_greedy == str(is_greedy)
        kinds.add(is_greedy)
    assert kinds == {True, False} or not has_bos
    entries = {arguments(sample)[0]: sample["resps"][0][0] for sample in samples["srm_generation"]}
    assert len(entries) == NUM_PROBLEMS
    assert entries == {context: greedy(ids_of(context), NUM_TOKENS, STOPS) for context in entries}
    noted(
        "lm-eval", f"`local-completions`, the tokenizer {'its own' if has_bos else 'of the server'}"
    )


def test_chats(evaluate: Evaluate, noted: Noted) -> None:
    kind, path = "local-chat-completions", "/v1/chat/completions"
    flags = ("--apply_chat_template", "--limit", "4")
    ((_, samples),) = evaluate(kind, path, "", "srm_generation", *flags).items()
    assert len(samples) == 4
    assert all(sample["resps"][0][0] for sample in samples)
    noted("lm-eval", "`local-chat-completions`")
