"""Scenarios: what is read, what is refused, those that are ready-made, and their page."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from srm.errors import ConfigError
from srm.loadtest import lengths
from srm.loadtest.__main__ import RUN
from srm.loadtest.scenario import MEASURED, SCENARIOS, Arrivals, Scenario, read
from srm.loadtest.workload import arrivals
from srm.loadtest.workload.workload import Workload
from tests.kit.serving import ROOT

PAGE = (ROOT / "docs/loadtest-scenarios.md").read_text()
READY_MADE = sorted(path.stem for path in SCENARIOS.glob("*.toml"))


def table(heading: str) -> list[str]:
    """The first cells of the table below a heading, without backticks."""
    below = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [name for name in re.findall(r"^\| `(.*?)` \|", below, re.M) if name != "arrivals"]


def block(info: str) -> str:
    (result,) = re.findall(rf"^```{info}\n(.*?)^```$", PAGE, re.M | re.S)
    return str(result)


def scenario(tmp_path: Path, text: str, *argv: str) -> Scenario:
    file = tmp_path / "scenario.toml"
    file.write_text(text)
    return read([str(file), *argv], RUN)


def test_flags_beat_the_environment_which_beats_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read([], RUN) == Scenario()
    result = scenario(tmp_path, 'prompt_tokens = 64\nn = 8\nobjectives = ["ttft<1", "e2e<9"]\n')
    assert result == Scenario(prompt_tokens="64", n="8", objectives=("ttft<1", "e2e<9"))
    file = str(tmp_path / "scenario.toml")  # it may stand behind flags, or be one
    for argv in (["--requests", "4", file], ["--requests=4", "--config", file]):
        assert read(argv, RUN) == msgspec.structs.replace(result, requests=4)
    monkeypatch.setenv("SRM_OUTPUT", "2")
    monkeypatch.setenv("SRM_URL", "http://2")
    text = 'output = "1"\nurl = "http://1"\nconcurrency = 1\n'
    result = scenario(tmp_path, text, "--url", "http://3")
    assert result == Scenario(concurrency=1, output=Path("2"), url="http://3")


@pytest.mark.parametrize("name", READY_MADE)
def test_ready_made_scenarios_make_requests(name: str) -> None:
    content = read([name], RUN)
    assert content != Scenario()
    asked = Workload(content).request(0)
    assert asked.n >= 1 and asked.prompt_tokens >= 1
    assert not content.open_loop or len(arrivals.times(content)) > 50
    assert read([name, "--seed=9"], RUN) == msgspec.structs.replace(content, seed=9)


def test_a_file_comes_before_a_ready_made_scenario(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read(["ci"], RUN).arrivals == "constant"
    (tmp_path / "ci").write_text("seed = 5")
    assert read(["ci"], RUN) == Scenario(seed=5)
    with pytest.raises(ConfigError, match=r"no such file: nowhere; .* none of ci, interactive, "):
        read(["nowhere"], RUN)


TRACE = Path("trace.jsonl")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "localhost:8000"}, "url must be an address .*, got 'localhost:8000'"),
        ({"metrics_url": "off"}, "metrics_url must be an address, none, or empty, got 'off'"),
        *(({name: 0}, f"{name} must be at least 1, got 0")
          for name in ("concurrency", "workers", "vocab_size")),
        *(({name: bad}, f"{name} must be above 0, and finite, got {bad}")
          for name in ("rate", "trace_scale", "timeout_s") for bad in (0.0, -1.0, math.nan)),
        *(({name: bad}, f"{name} must be at least 0, and finite, got {bad}")
          for name in ("duration_s", "warmup_s", "cooldown_s", "grace_s", "temperature")
          for bad in (-1.0, math.inf)),
        *(({name: -1}, f"{name} must be at least 0, got -1") for name in ("requests", "retries")),
        ({"seed": -1}, r"seed must be 0 … 2\*\*64 - 1, got -1"),
        ({"prefix_share": 1.5}, "prefix_share must be 0 … 1, got 1.5"),
        ({"n": "0"}, "n = '0': 0 is not 1 … "),
        ({"prompt_tokens": "gamma:1,2"}, "prompt_tokens must be a number .*, got 'gamma:1,2'"),
        ({"output_tokens": "uniform:9,5"}, "output_tokens = 'uniform:9,5': "),
        ({"arrivals": "trace"}, "trace must be a file where arrivals is trace, got None"),
        ({"trace": TRACE}, "trace must be left out where arrivals is concurrent, got .*jsonl"),
        ({"arrivals": "ramp"}, r"rate_end must be above 0 where arrivals is ramp, got 0.0"),
        ({"rate_end": 9.0}, r"rate_end must be left out where arrivals is concurrent, got 9.0"),
        ({"duration_s": 0.0}, "duration_s must be above 0 .* and requests is 0, got 0"),
        ({"arrivals": "ramp", "rate_end": 9.0, "duration_s": 0.0, "requests": 5},
         "duration_s must be above 0 where arrivals is ramp, got 0"),
        ({"duration_s": 10.0, "warmup_s": 6.0, "cooldown_s": 4.0},
         r"warmup_s \+ cooldown_s must be less than duration_s = 10.0, got 10.0"),
        ({"api": "chat"}, "tokenizer or prompts must be given where api is chat"),
        ({"prefixes": 2}, "prefixes and prefix_tokens must both be 0 or neither, got 2 and 0"),
        ({"prefix_tokens": 2}, "prefixes and prefix_tokens must both be 0 or neither"),
        ({"prefixes": 2, "prefix_tokens": 4, "prompts": Path("prompts.jsonl")},
         "prefixes must be 0 where prompts is a file, got 2"),
        ({"extra_body": "[]"}, r"extra_body must be a JSON object, got '\[\]'"),
        ({"extra_body": "{"}, "extra_body must be a JSON object, got '{'"),
        *(({"extra_body": f'{{"{name}": 1}}'}, f"must not have {name}: ") for name in MEASURED),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scenario(**settings)


def test_refusals_on_the_command_line_are_errors_of_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="concurrency must be at least 1, got 0"):
        read(["--concurrency=0"], RUN)
    with pytest.raises(ConfigError, match=r"scenario.toml: unknown setting 'conccurrency'"):
        scenario(tmp_path, "conccurrency = 4")
    with pytest.raises(ConfigError, match=r"got 100.0; .*/ramp.toml sets rate_end$"):
        read(["ramp", "--arrivals=poisson"], RUN)
    with pytest.raises(ConfigError, match=r"got 5.0$"):
        read(["ramp", "--arrivals=poisson", "--rate-end=5"], RUN)


def test_runs_may_end_by_requests_or_with_a_trace() -> None:
    Scenario(duration_s=0, requests=5)
    Scenario(duration_s=0, arrivals="trace", trace=TRACE)


def test_the_page_lists_what_there_is_and_its_examples_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sorted(table("Ready-made scenarios")) == READY_MADE
    assert table("Arrivals") == list(get_args(Arrivals))

    monkeypatch.chdir(tmp_path)
    Path("lengths.jsonl").write_text('7\n{"n": 9}\n')
    examples = table("Distributions")
    assert len(examples) == 7
    middles = [lengths.parse(example, "n").at(0.5) for example in examples]
    assert middles == [128, 136, 128, 128, 128, 1, 9]

    result = scenario(tmp_path, block("toml scenario"))
    assert (result.arrivals, result.rate, result.output_tokens) == ("poisson", 20, "128")
    assert 1000 < len(arrivals.times(result)) < 1400

    Path("prompts.jsonl").write_text(block("jsonl prompts"))
    workload = Workload(Scenario(prompts=Path("prompts.jsonl")))
    assert {workload.request(index).n for index in range(2)} == {1, 8}
    TRACE.write_text(block("jsonl trace"))
    result = Scenario(arrivals="trace", trace=TRACE, duration_s=0)
    assert arrivals.times(result).tolist() == [0, 0.7]
    assert [Workload(result).request(index).prompt_tokens for index in range(2)] == [600, 700]
