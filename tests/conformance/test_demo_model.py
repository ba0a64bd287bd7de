"""The bundled model, served for real: MAX, Mojo, processes and HTTP, as `make serve` does."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from srm.engine.config import DEMO_MODEL, GRPO_MODEL, EngineConfig
from srm.engine.device import runner
from srm.engine.messages import Output, SamplingParams
from srm.engine.process.engine import Engine
from srm.training.problems.drawn import problems
from srm.training.problems.problem import extract_answer, reward
from tests.kit.models.demo import START_S, TOKENIZER, afresh, engine_on_max
from tests.kit.serving import CHATS, ROOT, Server, free_port


@pytest.fixture(scope="module")
def demo_server() -> Iterator[Server]:
    admin = f"--admin-port={free_port()}"
    with Server(DEMO_MODEL, admin, engine_module="srm.engine", start_s=START_S) as running:
        yield running


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engine_on_max(num_slots=4_096) as one:
        yield one


def test_a_graph_of_a_release_is_taken_and_nothing_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = EngineConfig().cache_dir.expanduser()
    monkeypatch.setattr(runner, "RELEASED_GRAPHS", released)
    with engine_on_max(num_slots=8):
        pass  # the graph is in that folder now
    unused = tmp_path / "cache"
    with engine_on_max(num_slots=8, cache_dir=unused) as engine:
        ((output,),) = engine.generate([[1]], SamplingParams(max_tokens=1))
    assert output.finish_reason == "length" and not unused.exists()


def test_it_solves_held_out_problems(demo_server: Server) -> None:
    drawn = list(islice(problems("held-out", 0), 200))  # those of its evaluation
    reply = demo_server.post(
        prompt=[problem.prompt for problem in drawn], max_tokens=96, temperature=1.0, seed=1, n=2
    ).json()
    right = [reward(drawn[choice["index"] // 2], choice["text"]) for choice in reply["choices"]]
    assert 0.2 < np.mean(right) < 0.7


def test_it_answers_wrongly_what_its_card_says_it_does(demo_server: Server) -> None:
    card = (DEMO_MODEL / "README.md").read_text()
    rows = re.findall(r"^- (.*\?) It answers (\d+): ", card, re.M)
    prompts = [f"Question: {question}\nAnswer:" for question, _ in rows]
    choices = demo_server.post(prompt=prompts, max_tokens=96, temperature=0).json()["choices"]
    assert [extract_answer(choice["text"]) for choice in choices] == [
        int(wrong) for _, wrong in rows
    ]
    assert len(rows) == 4


def test_it_answers_its_cards_example_of_each_kind_rightly(demo_server: Server) -> None:
    card = (DEMO_MODEL / "README.md").read_text()
    rows = re.findall(r"^\| [a-z ]+ \| (.*\?) \| (\d+) \|$", card, re.M)
    prompts = [f"Question: {question}\nAnswer:" for question, _ in rows]
    choices = demo_server.post(prompt=prompts, max_tokens=96, temperature=0).json()["choices"]
    assert [extract_answer(choice["text"]) for choice in choices] == [
        int(right) for _, right in rows
    ]
    assert len(rows) == 10


def test_the_vote_of_the_guide_is_right(demo_server: Server) -> None:
    page = (ROOT / "docs" / "many-samples.md").read_text()
    script = "\n".join(re.findall(r"^```python test\n(.*?)^```$", page, re.M | re.S))
    script = script.replace("http://127.0.0.1:8000", demo_server.url)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True, text=True
    )
    *_, first, _, _ = done.stdout.splitlines()
    assert first.startswith(f"{345 + 128} ") and int(first.split()[1]) < 100


def test_a_chat_is_the_problem_as_it_was_trained_on(demo_server: Server) -> None:
    problem = next(problems("held-out", 9))
    sampling = {"seed": 5, "max_tokens": 96, "n": 4}
    messages = [{"role": "user", "content": problem.question}]
    chat = demo_server.http.post(CHATS, json={"messages": messages, **sampling}).json()
    plain = demo_server.post(prompt=problem.prompt, **sampling).json()
    assert [choice["message"]["content"] for choice in chat["choices"]] == [
        choice["text"] for choice in plain["choices"]
    ]


def test_a_system_message_chooses_the_style_and_a_second_question_is_as_a_first(
    demo_server: Server,
) -> None:
    asked = "Ava has 6 boxes with 7 pears each. How many pears is that in all?"
    first = [{"role": "user", "content": asked}, {"role": "assistant", "content": "#### 42"}]
    last = {"role": "user", "content": "What is 3 + 4?"}

    def answer(system: str) -> str:
        before = [{"role": "system", "content": system}] if system else []
        chat = {"messages": [*before, *first, last], "temperature": 0, "max_tokens": 96}
        reply = demo_server.http.post(CHATS, json=chat).json()
        text: str = reply["choices"][0]["message"]["content"]
        return text.strip()

    assert answer("") == "3 + 4 = 7\n#### 7"
    assert answer("Only the number.").startswith("#### ")
    assert re.fullmatch(r"[A-Z].* 3 \+ 4 = \d+\.\n#### \d+", answer("Explain in words."))


def test_the_sibling_of_the_bundled_model_takes_its_place_and_does_better(
    demo_server: Server,
) -> None:
    drawn = list(islice(problems("held-out", 11), 100))
    prompts, rates = [problem.prompt for problem in drawn], []
    for folder in (GRPO_MODEL, DEMO_MODEL):
        reply = demo_server.admin.post("/v1/admin/weights", json={"path": str(folder)})
        assert reply.status_code == 200, reply.text
        result = demo_server.post(
            prompt=prompts, max_tokens=96, temperature=1.0, seed=2, n=8
        ).json()
        right = [
            reward(drawn[choice["index"] // 8], choice["text"]) for choice in result["choices"]
        ]
        rates.append(np.mean(right))
    assert rates[0] > rates[1]


@pytest.mark.slow
def test_5000_samples_come_of_one_prefill_in_flat_memory(demo_server: Server) -> None:
    prompt = next(problems("held-out", 8)).prompt
    fed_at_first = len(TOKENIZER.encode(prompt).ids) - 1
    supervisor = psutil.Process(demo_server.process.pid)

    def sample() -> list[str]:
        choices = demo_server.post(prompt=prompt, n=5_000, max_tokens=12, seed=3).json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(5_000))
        assert {choice["finish_reason"] for choice in choices} <= {"stop", "length"}
        return [choice["text"] for choice in choices]

    def fed(how: str) -> float:
        return demo_server.metric(f"srm_engine_{how}_tokens_total")

    def resident() -> int:
        processes = [supervisor, *supervisor.children(recursive=True)]
        return sum(process.memory_info().rss for process in processes)

    prefilled, cached = fed("prefill"), fed("cached")
    first = sample()
    memory = resident()
    assert sample() == first
    prefilled, cached = fed("prefill") - prefilled, fed("cached") - cached
    assert prefilled + cached == 2 * fed_at_first
    assert prefilled <= fed_at_first  # shared with problems before, if anything
    for _ in range(2):
        sample()
    assert resident() < 1.05 * memory
    assert demo_server.metric("srm_engine_free_slots") == demo_server.metric("srm_engine_num_slots")


def test_a_kept_state_changes_no_bit(engine: Engine) -> None:
    """Tokens and log-probabilities of few-shot prompts, fed whole and from kept states."""
    texts = [problem.prompt for problem in islice(problems("held-out", 12), 24)]
    prompts = [
        TOKENIZER.encode(text).ids
        for header in (texts[0] + texts[1], texts[0] + texts[2])
        for text in ["", *(header + text[: 7 * i] for i, text in enumerate(texts[3:], 1))]
    ]
    params = SamplingParams(n=2, max_tokens=24, logprobs=5)
    config = EngineConfig(num_slots=256, max_step_rows=200, max_step_tokens=217)

    def generated(**prefixes: int) -> list[list[Output]]:
        return afresh(engine, config, **prefixes).generate(prompts, params)

    fed = generated(prefix_slots=100, prefix_cache=False)
    for retained in (generated(), generated(prefix_slots=20)):
        lengths = [outputs[0].cached_tokens for outputs in retained]
        assert sum(lengths) > 0.5 * sum(map(len, prompts))
        assert len(set(lengths)) > 2
        uncached = [
            [msgspec.structs.replace(o, cached_tokens=0) for o in item] for item in retained
        ]
        assert uncached == fed


def test_another_start_compiles_nothing(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with engine_on_max(num_slots=8):
        assert "bound in" in caplog.text and "compiling" not in caplog.text
