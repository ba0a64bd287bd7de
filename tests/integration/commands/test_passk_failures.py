"""Runs of `srm evaluate passk` that are stopped, damaged or refused, and servers that fail."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.commands.foreign_server import Foreign, arguments, result, run
from tests.kit.serving import ROOT, Server, run_python

Refusal = Callable[..., str]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)]
)
def test_a_run_that_is_killed_goes_on(
    foreign: Foreign, url: str, folder: Path, number: signal.Signals, code: int
) -> None:
    foreign.faults = [{}, {}, {}, "hold"]
    settings = {"n": 4, "concurrency": 1}
    command = [sys.executable, "-m", "srm", *arguments(url, folder, **settings)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert foreign.held.wait(120)
        process.send_signal(number)
        _, message = process.communicate(timeout=120)
    assert process.returncode == code
    assert ("3 replies are in" in message) == (number == signal.SIGINT)
    foreign.released.set()
    assert run(url, folder, **settings) == 0
    assert len(foreign.bodies) == 10
    assert len({(body["prompt"], body["seed"]) for body in foreign.bodies}) == 10


def test_damage_and_another_runs_journal_are_named(
    url: str, folder: Path, refusal: Refusal
) -> None:
    assert run(url, folder) == 0
    journal = folder / "out" / "journal.jsonl"
    for settings, message in (
        ({"samples": 21}, "samples = 20, this one has 21"),
        ({"temperature": 0.5}, "temperature = 1.0, this one has 0.5"),
        ({"problems": 1}, "is of a run with other problems: choose"),
        ({"n": 3}, "n = 20, this one has 3"),
        ({"reward": f"{folder}/reward.py:vowel"}, "with reward = 'srm.training.questions"),
    ):
        assert message in refusal(**settings)
    whole = journal.read_bytes()
    journal.write_bytes(whole.replace(b'"drawn":20', b'"drawn":21', 1))
    assert "journal.jsonl, line 2 is damaged" in refusal()
    journal.write_bytes(b"\0" * 5)  # nothing of it was written yet
    assert run(url, folder) == 0
    assert journal.read_bytes().split(b"\n")[0] == whole.split(b"\n")[0]
    journal.write_bytes(b"a diary\n")
    assert "journal.jsonl, line 1 is damaged" in refusal()
    assert journal.read_bytes() == b"a diary\n"


def test_a_refused_run_goes_on_with_other_settings(
    foreign: Foreign, url: str, folder: Path
) -> None:
    foreign.faults = [(400, "temperature must be at most 2")]
    assert run(url, folder, temperature=3, concurrency=1) == 2
    assert run(url, folder, temperature=1) == 0
    first, *_ = (folder / "out/journal.jsonl").read_bytes().splitlines()
    assert json.loads(first[9:]) == result(folder / "out")["sampled"]


def test_a_disk_that_takes_no_more_is_named_and_what_it_has_stays(
    foreign: Foreign, url: str, folder: Path
) -> None:
    settings = {"n": 1, "samples": 40}
    program = "import resource, sys, srm.__main__ as srm\n"
    program += f"resource.setrlimit({resource.RLIMIT_FSIZE}, (3000, -1))"
    program += "\nsys.exit(srm.main(sys.argv[1:]))"
    ended = run_python(program, *arguments(url, folder, **settings))
    assert ended.returncode == 2, ended.stderr
    assert "out/journal.jsonl cannot be written: File too large" in ended.stderr
    assert "Traceback" not in ended.stderr
    foreign.bodies.clear()
    assert run(url, folder, **settings) == 0
    assert 0 < len(foreign.bodies) < 80
    for suffix in ("json", "md", "svg"):
        (written,) = (folder / "out").glob(f"*-passk.{suffix}")
        written.unlink()
        written.mkdir()
        assert run(url, folder, **settings) == 2
        written.rmdir()


@pytest.mark.parametrize("ends_by_itself", [True, False])
def test_a_slow_reward_ends_with_the_text_it_has_or_by_a_second_signal(
    foreign: Foreign, url: str, folder: Path, ends_by_itself: bool
) -> None:
    counted = "import pathlib, time\n\ndef slow(text, question):\n"
    counted += f"    pathlib.Path('{folder}/calls').open('a').write('.')\n"
    counted += f"    while pathlib.Path('{folder}/held').exists(): time.sleep(0.01)\n    return 1\n"
    (folder / "slow.py").write_text(counted)
    (folder / "calls").touch()
    settings = {"reward": f"{folder}/slow.py:slow", "concurrency": 1}
    command = [sys.executable, "-m", "srm", *arguments(url, folder, **settings)]
    foreign.faults = ["hold"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert foreign.held.wait(120)
        asked = (folder / "calls").stat().st_size  # of answers, before anything was drawn
        (folder / "held").touch()
        foreign.released.set()
        while (folder / "calls").stat().st_size == asked:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert "0 replies are in" in process.stderr.readline()
        if ends_by_itself:
            (folder / "held").unlink()
        else:
            process.send_signal(signal.SIGINT)
        process.wait(120)
    assert process.returncode == (130 if ends_by_itself else -signal.SIGINT)
    assert (folder / "calls").stat().st_size == asked + 1


def test_what_passes_is_waited_for(foreign: Foreign, url: str, folder: Path) -> None:
    foreign.faults = [(429, "slower"), "cut", (503, "loading"), (500, "oh"), "cut"]
    assert run(url, folder, n=10) == 0
    assert len(foreign.bodies) == 4 and not foreign.faults


def test_a_server_that_stays_away_is_named(
    foreign: Foreign, url: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign.faults = [(503, "still loading")] * 3
    foreign.retry_after_s = 3_000  # longer than there is: it is not waited for
    assert run(url, folder, timeout_s=2_000) == 1
    err = capsys.readouterr().err
    assert re.search(r"not answered within timeout_s = 2000; the last try: .*still loading", err)
    assert "0 replies are in" in err


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("packed", "answered with what cannot be unpacked"),
        ((401, "no such key"), "refused with 401: no such key"),
        ((404, "no such model"), "refused with 404: no such model"),
        ({"choices": [{"index": 0, "text": "1"}]}, "n = 20 choices were asked for, and 1 came"),
        ({"usage": None}, r"no completion: .*usage"),
        ({"choices": "none"}, r"no completion: .*choices"),
    ],
)
def test_replies_that_are_none_are_named(
    foreign: Foreign, refusal: Refusal, fault: Any, message: str
) -> None:
    foreign.faults = [fault] * 3
    assert re.search(message, refusal())


def test_samples_of_other_weights_are_not_added_up(
    foreign: Foreign, folder: Path, refusal: Refusal
) -> None:
    foreign.owner = "srm"
    counted = {"samples": [{"drawn": 20, "counts": [{"text": "#### 1", "count": 20}]}]}
    foreign.faults = [counted | {"system_fingerprint": name} for name in ("one", "two")]
    assert "weights were changed during the run" in refusal(concurrency=1)
    assert foreign.bodies[0]["return"] == "counts"
    foreign.faults = [counted | {"system_fingerprint": "one", "first_weights_version": 1}]
    printed = refusal(concurrency=1, output=folder / "new")
    assert "weights were changed during the run" in printed
    foreign.faults = [{"system_fingerprint": "one"}]  # it did not count
    printed = refusal(concurrency=1, output=folder / "newer")
    assert "did not count the samples" in printed


def test_a_refusal_of_the_server_is_in_its_own_words(server: Server, refusal: Refusal) -> None:
    printed = refusal(url=server.url, samples=5_000)
    assert "n = 5000 of 1 prompts: this server takes at most max_waiting = 3000" in printed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 0}, "samples must be 1 … 1000000, got 0"),
        ({"problems": -1}, "problems must be 0 … 1000000, got -1"),
        ({"problems": 3}, "problems = 3, but .*questions.jsonl has 2 questions"),
        ({"temperature": "nan"}, "temperature must be 0 … 100, got nan"),
        ({"top_p": "nan"}, "top_p must be .* got nan"),
        ({"timeout_s": "nan"}, "timeout_s must be .* got nan"),
        ({"until": 21}, "until must be 0 … 20, got 21"),
        ({"match": "a"}, "match = 'a' ends nothing where until is 0"),
        ({"match": "a", "until": 2}, "match = 'a' needs an SRM server"),
        ({"shots": 1}, "shots = 1 of questions from a file need examples"),
        ({"url": "somewhere"}, "url must begin with http"),
        ({"url": "http://127.0.0.1:1"}, "url: http://127.0.0.1:1 does not answer"),
        ({"url": "http://a:b"}, "url = 'http://a:b': Invalid port"),
        ({"url": "http://a:65536"}, "the port must be at most 65535, got 65536"),
        ({"problems": 10**9}, "problems must be 0 … 1000000, got 1000000000"),
        ({"shots": 10**9}, "shots must be 0 … 1000, got 1000000000"),
        ({"reward": "nowhere"}, "reward must be module:function"),
        ({"input": "/nowhere.jsonl"}, "/nowhere.jsonl"),
    ],
)
def test_a_bad_setting_is_refused_before_anything_is_drawn(
    folder: Path, settings: dict[str, Any], message: str, foreign: Foreign, refusal: Refusal
) -> None:
    assert re.search(message, refusal(**settings))
    assert not foreign.bodies and not (folder / "out").exists()


@pytest.mark.parametrize(("status", "code"), [(503, 2), (404, 0)])
def test_a_server_may_have_no_list_of_models_but_not_fail(
    url: str, folder: Path, foreign: Foreign, status: int, code: int, refusal: Refusal
) -> None:
    foreign.list_status = status
    assert run(url, folder, served_model_name="other") == code
    assert f"/v1/models refused with {status}" in refusal(output=folder / "new")
