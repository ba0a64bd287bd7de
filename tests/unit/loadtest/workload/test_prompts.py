"""Prompts from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from engine.errors import ConfigError
from loadtest.counter_rng import Draws
from loadtest.workload.prompts import Prompts
from loadtest.workload.words import Words
from tests.serving import ROOT

Api = Literal["completions", "chat"]


def prompts(folder: Path, *lines: Any, api: Api = "completions", seed: int = 0) -> Prompts:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return Prompts(file, api, Words(ROOT / "models/demo"), Draws(seed))


def test_each_pass_has_every_prompt_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    found = prompts(tmp_path, *({"prompt": [number]} for number in range(50)))
    passes = [
        [found.of(50 * which + at).fields["prompt"][0] for at in range(50)] for which in (0, 1)
    ]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(50))
    assert passes[0] != passes[1] and list(range(50)) not in passes
    again = prompts(tmp_path, *({"prompt": [number]} for number in range(50)))
    assert [again.of(at).fields["prompt"][0] for at in range(99, 49, -1)] == passes[1][::-1]
    other = prompts(tmp_path, *({"prompt": [number]} for number in range(50)), seed=1)
    assert [other.of(at).fields["prompt"][0] for at in range(50)] != passes[0]


def test_what_a_line_says_is_kept(tmp_path: Path) -> None:
    found = prompts(tmp_path, {"prompt": "two words", "max_tokens": 9, "n": 4}).of(0)
    assert (found.fields, found.max_tokens, found.n) == ({"prompt": "two words"}, 9, 4)
    assert found.num_tokens == Words(ROOT / "models/demo").count("two words") + 1
    found = prompts(tmp_path, {"prompt": [3, 4, 5]}).of(0)
    assert (found.fields, found.num_tokens, found.n) == ({"prompt": [3, 4, 5]}, 3, None)


def test_chats_take_messages_and_text(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    words = Words(ROOT / "models/demo")
    found = prompts(tmp_path, {"messages": messages}, api="chat").of(0)
    assert found.fields == {"messages": messages}
    assert found.num_tokens == words.count("be kind") + words.count("hello")
    found = prompts(tmp_path, {"prompt": "hello"}, api="chat").of(0)
    assert found.fields == {"messages": [{"role": "user", "content": "hello"}]}
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert prompts(tmp_path, {"messages": parts}, api="chat").of(0).num_tokens == -1


def test_without_a_tokenizer_text_is_not_counted(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hello"}')
    assert Prompts(file, "completions", None, Draws(0)).of(3).num_tokens == -1


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
