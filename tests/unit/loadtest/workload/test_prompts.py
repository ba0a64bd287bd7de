"""Prompts from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from srm.errors import ConfigError
from srm.loadtest.counter_rng import Draws
from srm.loadtest.workload.prompts import Prompts, WorkloadPrompt
from srm.loadtest.workload.words import Words
from tests.kit.serving import ROOT

Api = Literal["completions", "chat"]


def prompts(folder: Path, *lines: Any, api: Api = "completions", seed: int = 0) -> Prompts:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return Prompts(file, api, Words(ROOT / "models/demo"), Draws(seed))


def test_each_pass_has_every_prompt_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    def order(seed: int, indices: range) -> list[int]:
        result = prompts(tmp_path, *({"prompt": [number]} for number in range(50)), seed=seed)
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
def test_what_a_line_says_is_kept(
    tmp_path: Path, api: Api, line: dict[str, Any], fields: dict[str, Any], num_tokens: int
) -> None:
    result = prompts(tmp_path, line | {"max_tokens": 9}, api=api).make_prompt(3)
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
        prompts(tmp_path, right, line, api=api)
