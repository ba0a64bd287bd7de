"""`until` of the Python API gives what the server gives, and computes less than all samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from srm.engine.messages import SamplingParams
from srm.engine.python.offline import GenerateProgress
from srm.engine.python.request_output import Completion
from srm.engine.python.until import Until
from srm.errors import EngineUnavailable, InvalidRequest
from tests.kit.serving import Server, complete
from tests.unit.engine.python.test_offline import make, tokens

PROMPTS = ["the cat", "the other mat", "a dog"]
PARAMS = SamplingParams(n=200, max_tokens=12, seed=7, temperature=1.5)
FIELDS: dict[str, Any] = {"n": 200, "max_tokens": 12, "seed": 7, "temperature": 1.5}


def has_a(completion: Completion) -> bool:
    return "a" in completion.text[:2]


@pytest.mark.parametrize("budget", [None, 1, 150, 1_000_000])
@pytest.mark.parametrize("count", [1, 5, 200])
def test_it_gives_what_the_server_gives(
    text_model: Path, server: Server, count: int, budget: int | None
) -> None:
    until = {"match": r"^.?a", "count": count, **({} if budget is None else {"budget": budget})}
    reply = complete(server, prompt=PROMPTS, return_token_ids=True, until=until, **FIELDS)
    llm, steps = make(text_model)
    reports: list[GenerateProgress] = []
    with llm:
        until_right = Until(has_a, count, budget)
        generateds = llm.generate(PROMPTS, PARAMS, until=until_right, on_progress=reports.append)
        assert not steps.has_work
    made = [ids for generated in generateds for ids in tokens(generated.completions)]
    assert made == [choice["token_ids"] for choice in reply["choices"]]
    assert [len(generated.completions) for generated in generateds] == [
        samples["drawn"] for samples in reply["samples"]
    ]
    assert reports[-1].finished == reports[-1].total == 600
    if count == 1:
        assert reports[-1].tokens < 3 * 200 * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("a",), "until.is_right must be a function of a Completion, got 'a'"),
        ((has_a, 0), "until.count must be a whole number of at least 1, got 0"),
        ((has_a, True), "until.count must be a whole number of at least 1, got True"),
        ((has_a, 1, 1.5), "until.budget must be a whole number of at least 1, got 1.5"),
        ((has_a, 201), "until.count must be at most n = 200 of prompt 0, got 201"),
    ],
)
def test_a_wrong_value_is_named(text_model: Path, given: Any, message: str) -> None:
    with make(text_model)[0] as llm, pytest.raises(InvalidRequest, match=message):
        llm.generate(PROMPTS, PARAMS, until=Until(*given))


def test_what_the_function_raises_ends_all(text_model: Path) -> None:
    with make(text_model)[0] as llm:
        with pytest.raises(EngineUnavailable, match="another generate"):
            llm.generate(PROMPTS, PARAMS, until=Until(lambda _: bool(llm.generate(PROMPTS))))
        assert len(llm.generate(PROMPTS)) == 3
