"""Bodies of requests: what they say, also of prompts of a file, whoever makes them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from srm.errors import ConfigError
from srm.loadtest.counter_rng import Draws
from srm.loadtest.scenario import Scenario
from srm.loadtest.workload.prompts import Prompts, WorkloadPrompt
from srm.loadtest.workload.words import Words
from srm.loadtest.workload.workload import Workload
from tests.kit.serving import ROOT

DEMO = ROOT / "models/demo"
RICH = Scenario(
    served_model_name="demo", seed=3, tokenizer=DEMO, prompt_tokens="lognormal:40,0.5,min=20",
    output_tokens="uniform:1,90", n="choice:1=0.8,16=0.2",
    prefixes=3, prefix_tokens=12, prefix_share=0.6,
)  # fmt: skip


def body(scenario: Scenario, index: int = 0) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Workload(scenario).request(index).body)
    return document


def test_a_body_says_what_the_scenario_says() -> None:
    scenario = Scenario(
        served_model_name="demo", prompt_tokens="5", output_tokens="7", n="9",
        temperature=0.5, top_p=0.9, top_k=40, vocab_size=11,
        extra_body='{"min_p": 0.1, "return_token_ids": true}',
    )  # fmt: skip
    result = body(scenario)
    prompt, seed = result.pop("prompt"), result.pop("seed")
    assert result == {
        "model": "demo", "max_tokens": 7, "n": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 40,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        "min_p": 0.1, "return_token_ids": True,
    }  # fmt: skip
    assert len(prompt) == 5 and set(prompt) <= set(range(11))
    assert 0 <= seed < 2**31
    asked = Workload(scenario).request(0)
    assert (asked.n, asked.prompt_tokens, asked.max_tokens) == (9, 5, 7)


def test_what_is_not_set_is_not_sent_and_extra_members_win() -> None:
    result = body(Scenario(stream=False, ignore_eos=False))
    assert set(result) == {"prompt", "max_tokens", "n", "seed", "temperature"}
    result = body(Scenario(extra_body='{"seed": null, "temperature": 0, "ignore_eos": false}'))
    assert (result["seed"], result["temperature"], result["ignore_eos"]) == (None, 0, False)


def test_requests_are_the_same_in_another_process() -> None:
    """In any order: tests/property/test_workload.py."""
    script = (
        "import sys, msgspec\nfrom loadtest.scenario import Scenario, as_path\n"
        "from srm.loadtest.workload.workload import Workload\n"
        "given = msgspec.json.decode(sys.stdin.read(), type=Scenario, dec_hook=as_path)\n"
        "workload = Workload(given)\n"
        "for index in reversed(range(60)): print(workload.request(index).body.decode())\n"
    )
    given, command = msgspec.json.encode(RICH, enc_hook=str), [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, input=given, capture_output=True, check=True)
    workload = Workload(RICH)
    expected = [workload.request(index).body for index in range(60)]
    assert done.stdout.splitlines()[::-1] == expected


def test_seeds_and_indices_give_other_requests() -> None:
    scenarios = (Scenario(prompt_tokens="64", seed=seed) for seed in (0, 1))
    results = [body(scenario, index) for scenario in scenarios for index in range(50)]
    assert len({str(item["prompt"]) for item in results}) == 100
    assert len({item["seed"] for item in results}) == 100


def test_a_setting_changes_nothing_else() -> None:
    one, other = body(Scenario(), 5), body(Scenario(output_tokens="9", n="uniform:2,5"), 5)
    assert one["prompt"] == other["prompt"] and one["seed"] == other["seed"]
    longer = body(Scenario(prompt_tokens="100"), 5)
    assert longer["prompt"][:32] == one["prompt"]


def test_lengths_are_of_their_distributions() -> None:
    workload = Workload(
        Scenario(prompt_tokens="uniform:10,29", output_tokens="normal:200,20", n="choice:1=3,4=1")
    )
    results = [workload.request(index) for index in range(4000)]
    lengths, outputs, samples = np.array(
        [(asked.prompt_tokens, asked.max_tokens, asked.n) for asked in results]
    ).T
    assert (lengths.min(), lengths.max()) == (10, 29)
    assert lengths.mean() == pytest.approx(19.5, abs=4 * 5.8 / 4000**0.5)
    assert outputs.mean() == pytest.approx(200, abs=4 * 20 / 4000**0.5)
    assert outputs.std() == pytest.approx(20, rel=0.05)
    assert (samples == 4).mean() == pytest.approx(0.25, abs=4 * (0.1875 / 4000) ** 0.5)
    assert abs(np.corrcoef(lengths, outputs)[0, 1]) < 4 / 4000**0.5


@pytest.mark.parametrize("tokenizer", [None, DEMO])
def test_a_share_of_requests_begins_alike(tokenizer: Path | None) -> None:
    shared: dict[str, Any] = {"prefixes": 4, "prefix_tokens": 24, "prefix_share": 0.75}
    workload = Workload(Scenario(prompt_tokens="32", tokenizer=tokenizer, **shared))
    prompts = [json.loads(workload.request(index).body)["prompt"] for index in range(4000)]
    words = [prompt.split() if tokenizer else prompt for prompt in prompts]
    counts = Counter(tuple(prompt[:24]) for prompt in words)
    results = [count for count in counts.values() if count > 1]
    assert len(results) == 4
    assert sum(results) / 4000 == pytest.approx(0.75, abs=4 * (0.1875 / 4000) ** 0.5)
    assert min(results) > 0.2 * 3000
    assert len({tuple(prompt[24:]) for prompt in words}) == 4000


def test_the_least_prompt_has_a_token_of_its_own() -> None:
    assert Workload(Scenario(tokenizer=DEMO, prompt_tokens="1")).request(0).prompt_tokens == 2
    assert Workload(Scenario()).count_tokens("hello") is None


@pytest.mark.parametrize(
    ("prompt_tokens", "tokenizer", "longest"),
    [("32", None, 31), ("32", DEMO, 30), ("normal:1000,1", None, 0)],
)
def test_prefixes_must_be_shorter_than_prompts(
    prompt_tokens: str, tokenizer: Path | None, longest: int
) -> None:
    rest: dict[str, Any] = {"prompt_tokens": prompt_tokens, "tokenizer": tokenizer, "prefixes": 1}
    if longest:
        Workload(Scenario(prefix_tokens=longest, **rest))
    with pytest.raises(ConfigError, match=f"prefix_tokens must be at most {longest}, .* got 64"):
        Workload(Scenario(prefix_tokens=64, **rest))


def write(folder: Path, *lines: Any) -> Path:
    file = folder / f"{len(list(folder.iterdir()))}.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file


def test_lines_of_a_trace_say_lengths_and_more_than_a_prompt(tmp_path: Path) -> None:
    trace = write(
        tmp_path,
        {"timestamp": 2, "prompt_tokens": 3, "output_tokens": 4, "n": 5},
        {"timestamp": 1, "output_tokens": 6},
    )
    workload = Workload(Scenario(arrivals="trace", trace=trace))
    one, other = workload.request(0), workload.request(1)
    assert (one.prompt_tokens, one.max_tokens, one.n) == (32, 6, 1)
    assert (other.prompt_tokens, other.max_tokens, other.n) == (3, 4, 5)
    trace = write(tmp_path, {"timestamp": 0, "output_tokens": 9})
    prompts = write(tmp_path, {"prompt": [1, 2], "max_tokens": 4, "n": 3})
    asked = Workload(Scenario(arrivals="trace", trace=trace, prompts=prompts)).request(0)
    assert (asked.prompt_tokens, asked.max_tokens, asked.n) == (2, 9, 3)


@pytest.mark.parametrize("tokenizer", [None, DEMO])
def test_equal_ids_of_a_trace_are_equal_tokens(tmp_path: Path, tokenizer: Path | None) -> None:
    def line(length: int, *ids: int) -> dict[str, Any]:
        return {"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": ids}

    file = write(tmp_path, line(1000, 7, 8), line(1100, 7, 9, 8), line(1600, 7), line(300, 8))
    scenario = Scenario(arrivals="trace", trace=file, tokenizer=tokenizer, vocab_size=999_983)
    workload = Workload(scenario)
    prompts = [json.loads(workload.request(index).body)["prompt"] for index in range(4)]
    if tokenizer:
        own = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
        prompts = [[*own.encode(prompt).ids[1:], 0] for prompt in prompts]  # its first one put last
    first, second, third, fourth = prompts
    assert [len(prompt) for prompt in prompts] == [1000, 1100, 1600, 300]
    assert first[:512] == second[:512] == third[:512]
    assert first[512:] != second[512:1000] != third[512:1000]
    assert fourth[:299] == first[512 : 512 + 299]
    assert second[1024:1099] == fourth[:75]


def test_prompts_of_a_file_are_sent(tmp_path: Path) -> None:
    file = write(tmp_path, {"prompt": "hello", "n": 3}, {"prompt": [1, 2], "max_tokens": 4})
    workload = Workload(Scenario(prompts=file))
    asked = sorted((workload.request(index) for index in (0, 1)), key=lambda one: one.n)
    assert [json.loads(reply.body)["prompt"] for reply in asked] == [[1, 2], "hello"]
    known = [(reply.n, reply.max_tokens, reply.prompt_tokens) for reply in asked]
    assert known == [(1, 4, 2), (3, 128, -1)]


def test_what_files_say_together_must_be_possible(tmp_path: Path) -> None:
    prompts = write(tmp_path, {"prompt": "hello"})
    lines = write(tmp_path, {"timestamp": 0, "prompt_tokens": 9})
    with pytest.raises(ConfigError, match="prompts must not be set where the trace has prompt len"):
        Workload(Scenario(arrivals="trace", trace=lines, prompts=prompts))
    lines = write(tmp_path, {"timestamp": 0, "prompt_tokens": 900, "hash_ids": [1]})
    with pytest.raises(ConfigError, match="prefixes must be 0 where the trace has hash_ids"):
        Workload(Scenario(arrivals="trace", trace=lines, prefixes=1, prefix_tokens=4))


Api = Literal["completions", "chat"]


def prompts_of(folder: Path, *lines: Any, api: Api = "completions", seed: int = 0) -> Prompts:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return Prompts(file, api, Words(ROOT / "models/demo"), Draws(seed))


def test_each_pass_has_every_prompt_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    def order(seed: int, indices: range) -> list[int]:
        result = prompts_of(tmp_path, *({"prompt": [number]} for number in range(50)), seed=seed)
        return [result.make_prompt(at).fields["prompt"][0] for at in indices]

    passes = order(0, range(100))
    first, second = passes[:50], passes[50:]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second and list(range(50)) not in (first, second)
    assert order(0, range(99, 49, -1)) == second[::-1]
    assert order(1, range(50)) != first


TEXT = "two words"
WORDS = Words(ROOT / "models/demo")
USER = [{"role": "user", "content": TEXT}]
SYSTEM = {"role": "system", "content": "be kind"}
PARTS = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]


@pytest.mark.parametrize(
    ("api", "line", "fields", "num_tokens"),
    [
        ("completions", {"prompt": TEXT}, {"prompt": TEXT}, WORDS.count(TEXT) + 1),
        ("completions", {"prompt": [3, 4, 5]}, {"prompt": [3, 4, 5]}, 3),
        ("chat", {"prompt": TEXT}, {"messages": USER}, WORDS.count(TEXT)),
        ("chat", {"messages": [SYSTEM, *USER]}, {"messages": [SYSTEM, *USER]},
         WORDS.count("be kind") + WORDS.count(TEXT)),
        ("chat", {"messages": PARTS}, {"messages": PARTS}, -1),
    ],
)  # fmt: skip
def test_the_fields_of_a_line_are_kept(
    tmp_path: Path, api: Api, line: dict[str, Any], fields: dict[str, Any], num_tokens: int
) -> None:
    result = prompts_of(tmp_path, line | {"max_tokens": 9}, api=api).make_prompt(3)
    assert result == WorkloadPrompt(fields, num_tokens, 9, None)


@pytest.mark.parametrize(
    ("line", "api"),
    [
        ({}, "completions"),
        ({"messages": [{}]}, "completions"),
        ({"prompt": "a", "messages": [{}]}, "completions"),
        ({"prompt": "a", "messages": [{}]}, "chat"),
        ({"prompt": [1]}, "chat"),
        ({"prompt": [1, -2]}, "completions"),
        ({"prompt": [[1], [2]]}, "completions"),
        ({"prompt": []}, "completions"),
        ({"messages": []}, "chat"),
        ({"prompt": "a", "n": 0}, "completions"),
        ({"prompt": "a", "temperature": 1}, "completions"),
        ([1], "completions"),
    ],
)
def test_other_lines_are_refused_by_number(tmp_path: Path, line: Any, api: Api) -> None:
    right = {"prompt": "hello"}
    with pytest.raises(ConfigError, match=r"prompts.jsonl, line 2: .*; allowed is an object with"):
        prompts_of(tmp_path, right, line, api=api)
