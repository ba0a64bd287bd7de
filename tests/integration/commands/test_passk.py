"""`srm evaluate passk` against our own server and against one that knows nothing of us."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

import research.experiments.__main__ as experiments
import srm.__main__ as srm
from tests.integration.commands.foreign_server import Foreign, counts, expected, result, run
from tests.kit.serving import Server, complete


def test_our_server_counts_what_it_draws(
    server: Server, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"reward": f"{folder}/reward.py:vowel", "samples": 300, "max_tokens": 2}
    assert run(server.url + "/v1", folder, keep_texts="true", **settings) == 0
    printed = capsys.readouterr()
    lines = (folder / "out/journal.jsonl").read_text().splitlines()
    journal = [json.loads(line[9:]) for line in lines]
    assert journal[0]["is_srm"] and journal[0]["n"] == 300 and len(journal) == 3
    for number, question in enumerate(("a cat", "a mat")):
        (answer,) = (item for item in journal[1:] if item.get("problem", 0) == number)
        assert sum(count for _, count, _ in answer["texts"]) == 300
        assert len(answer["texts"]) == answer["texts_scored"] < 300
        prompt = f"Question: {question}\nAnswer:"
        seed = int.from_bytes(hashlib.sha256(f"0 {number}".encode()).digest()[:4], "big") % 2**31
        drawn = complete(server, prompt=prompt, n=300, max_tokens=2, seed=seed, stop=["Question:"])
        right = sum(any(item in choice["text"] for item in "aeiou") for choice in drawn["choices"])
        results = result(folder / "out")["problems"][number]
        assert (results["drawn"], results["right"]) == (300, right) and 0 < right < 300
        assert results["completion_tokens"] == drawn["usage"]["completion_tokens"]
    written = result(folder / "out")
    assert written["fingerprints"] == [drawn["system_fingerprint"]]
    assert written["points"][0]["coverage"] == pytest.approx(
        sum(right for _, right in counts(folder)) / 600
    )
    assert written["points"][-1]["k"] == 300 and written["commit"] and written["machine"]
    assert "| 100 | " in printed.out and "2 of 2 problems" in printed.err
    (picture,) = (folder / "out").glob("*.svg")
    assert picture.read_text().startswith("<?xml")


def test_completions_are_kept_to_a_regex(server: Server, folder: Path) -> None:
    settings = {"samples": 50, "max_tokens": 8, "keep_texts": "true", "regex": "#### [0-9]{1,3}"}
    assert run(server.url, folder, **settings) == 0
    lines = (folder / "out/journal.jsonl").read_text().splitlines()
    texts = [text for line in lines[1:] for text, _, _ in json.loads(line[9:])["texts"]]
    assert len(texts) > 20 and all(re.fullmatch("#### [0-9]{1,3}", text) for text in texts)
    assert run(server.url, folder, **settings | {"regex": ""}) == 2, "another run's"
    assert run(server.url, folder, output=folder / "bad", **settings | {"regex": "("}) == 2


def test_drawing_ends_early_in_the_same_way_here_and_on_the_server(
    server: Server, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"reward": f"{folder}/reward.py:vowel", "n": 50, "samples": 500, "max_tokens": 2}
    results = []
    for match in ("", "[aeiou]"):
        own = folder / f"of {match}"
        assert run(server.url, folder, output=own, match=match, until=20, **settings) == 0
        problems = result(own)["problems"]
        assert all(
            problem["is_until"] and problem["right"] == 20 < problem["drawn"]
            for problem in problems
        )
        results.append([problem["drawn"] for problem in problems])
        assert len((own / "journal.jsonl").read_text().splitlines()) > 3  # several parts
    assert results[0] == results[1]
    assert run(server.url, folder, match="[xyz]", until=5, **settings) == 2
    assert "match = '[xyz]' and reward disagree on" in capsys.readouterr().err


def test_any_other_server_is_asked_for_choices(foreign: Foreign, url: str, folder: Path) -> None:
    assert run(url, folder, n=7, top_p=0.9, stop="", max_tokens=9) == 0
    assert [body["n"] for body in foreign.bodies].count(7) == 4  # and 6, of both problems
    seeds = [
        (body["prompt"], body["seed"] + i) for body in foreign.bodies for i in range(body["n"])
    ]
    assert len(set(seeds)) == 40  # no sample is drawn twice
    for number, digit in enumerate((1, 2)):
        own = [body for body in foreign.bodies if ("mat" in body["prompt"]) == bool(number)]
        right = sum(expected(foreign, body, digit) for body in own)
        assert counts(folder)[number] == (20, right)
    body = foreign.bodies[0]
    assert set(body) == {*("model", "prompt", "n", "max_tokens", "temperature", "top_p", "seed")}
    assert (body["model"], body["top_p"], body["max_tokens"]) == ("other", 0.9, 9)


def test_the_prompt_is_what_is_asked_for(foreign: Foreign, url: str, folder: Path) -> None:
    assert run(url, folder, prompt="{question}, or {question}?") == 0
    assert {body["prompt"] for body in foreign.bodies} == {
        f"{question}, or {question}?" for question in ("a cat", "a mat")
    }
    assert run(url, folder, prompt="question?", output=folder / "other") == 2


def test_the_page_is_what_the_counts_say(
    foreign: Foreign, url: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(url, folder) == 0
    (path,) = (folder / "out").glob("*-passk.json")
    assert experiments.main(["page", str(path)]) == 0
    written = json.loads(path.read_bytes())
    before, right = (sum(right for _, right in counts(folder)) + more for more in (0, 1))
    written["problems"][0]["right"] += 1
    path.write_text(json.dumps(written))
    capsys.readouterr()
    assert experiments.main(["page", str(path)]) == 1
    named = capsys.readouterr().out
    assert f"\n-| 1 | {before / 40:.4f} |" in named and f"\n+| 1 | {right / 40:.4f} |" in named


def test_samples_behind_the_last_right_one_are_left_out(
    foreign: Foreign, url: str, folder: Path
) -> None:
    assert run(url, folder, n=7, until=2, samples=200) == 0
    for number, digit in enumerate((1, 2)):
        own = [body for body in foreign.bodies if ("mat" in body["prompt"]) == bool(number)]
        texts = [
            choice["text"] for body in own for choice in foreign.completion(body)["choices"][::-1]
        ]
        places = [place for place, text in enumerate(texts, 1) if text == f"#### {digit}"]
        assert counts(folder)[number] == (places[1], 2)
        assert len(texts) - 7 < places[1]  # no further request was sent


def test_a_run_goes_on_behind_what_it_has(
    foreign: Foreign, url: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"n": 4, "concurrency": 1}
    assert run(url, folder, output=folder / "whole", **settings) == 0
    foreign.bodies.clear()
    foreign.faults = [{}, {}, {}, (400, "no more today")]
    assert run(url, folder, **settings) == 2
    err = capsys.readouterr().err
    assert "refused with 400: no more today" in err and "3 replies are in" in err
    journal = folder / "out" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-9])  # killed while it wrote
    assert run(url, folder, **settings) == 0
    assert len(foreign.bodies) == 10 + 1  # of the line that was damaged
    whole, resumed = (result(folder / name) for name in ("whole", "out"))
    assert resumed["problems"] == whole["problems"] and resumed["points"] == whole["points"]
    assert (whole["totals"]["sessions"], resumed["totals"]["sessions"]) == (1, 2)
    foreign.bodies.clear()
    assert run(url, folder, **settings) == 0
    assert not foreign.bodies


def test_examples_go_before_questions(url: str, folder: Path, foreign: Foreign) -> None:
    (folder / "examples.jsonl").write_text('{"question": "an ant", "answer": "#### 3"}\n')
    assert run(url, folder, examples=folder / "examples.jsonl", shots=1, problems=1) == 0
    (body,) = foreign.bodies
    assert body["prompt"] == "Question: an ant\nAnswer: #### 3\n\nQuestion: a cat\nAnswer:"


def test_without_a_file_there_are_word_problems(
    url: str, tmp_path: Path, foreign: Foreign, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--url={url}", f"--output={tmp_path}/out", "--samples=3", "--shots=2"]
    assert srm.main(["evaluate", "passk", *flags, "--problems=1"]) == 0
    (body,) = foreign.bodies
    assert body["prompt"].count("\nAnswer:") == 3 and body["prompt"].endswith("\nAnswer:")
    assert "| 3 | " in capsys.readouterr().out
    assert result(tmp_path / "out")["points"][0]["over_problems"] is None  # of one problem
    assert srm.main(["evaluate", "passk", *flags, "--problems=0"]) == 2
