"""`srm evaluate passk` against our own server and against one that knows nothing of us."""

from __future__ import annotations

import hashlib
import json
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import srm
from tests.serving import ROOT, Server, complete

REWARD = "def vowel(text, question):\n    return any(one in text for one in 'aeiou')\n"
LINES = '{"question": "a cat", "answer": "#### 1"}\n{"question": "a mat", "answer": "#### 2"}\n'


class Foreign:
    """An OpenAI-style server of its own kind: the completion is a number below ten, and the same
    for the same prompt and seed + index. `faults` are met first, one by each request."""

    def __init__(self) -> None:
        self.faults: list[Any] = []
        """A status with a message; `cut`, the end of the connection; `hold`, none before
        `released`; or members of the reply."""
        self.bodies: list[dict[str, Any]] = []
        """Of the requests that were answered well."""
        self.held, self.released = threading.Event(), threading.Event()
        self.owner = "somebody"
        self.retry_after_s = 0
        self.list_status = 200
        self.lock = threading.Lock()

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for index in range(body["n"]):
            seed = body["seed"] + index  # as vLLM has it
            drawn = hashlib.sha256(f"{body['prompt']} {seed}".encode()).digest()
            choices.append({"index": index, "text": f"#### {drawn[0] % 10}", "logprobs": None})
        usage = {"prompt_tokens": 5, "completion_tokens": 3 * body["n"], "total_tokens": 0}
        return {"choices": choices[::-1], "usage": usage, "object": "text_completion"}


@contextmanager
def listening(foreign: Foreign) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            assert self.path == "/v1/models"
            listed = {"data": [{"id": "other", "owned_by": foreign.owner}]}
            self.answer(foreign.list_status, listed)

        def do_POST(self) -> None:
            assert self.path == "/v1/completions"
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with foreign.lock:
                fault = foreign.faults.pop(0) if foreign.faults else {}
                if fault == "hold":
                    foreign.held.set()
                    foreign.released.wait(120)
                if fault == "packed":
                    self.answer(200, {}, encoding="gzip")
                elif fault in ("cut", "hold"):
                    self.close_connection = True
                elif isinstance(fault, tuple):
                    self.answer(fault[0], {"error": {"message": fault[1]}})
                else:
                    foreign.bodies.append(body)
                    self.answer(200, foreign.completion(body) | fault)

        def answer(self, status: int, content: dict[str, Any], encoding: str = "identity") -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-encoding", encoding)
            self.send_header("content-length", str(len(data)))
            self.send_header("retry-after", str(foreign.retry_after_s))
            self.end_headers()
            self.wfile.write(data)

    class Listener(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            """A client that leaves is no fault."""

    with Listener(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def foreign() -> Foreign:
    return Foreign()


@pytest.fixture
def url(foreign: Foreign) -> Iterator[str]:
    with listening(foreign) as address:
        yield address


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "questions.jsonl").write_text(LINES)
    return tmp_path


def arguments(url: str, folder: Path, **settings: Any) -> list[str]:
    flags = {
        "url": url,
        "output": folder / "out",
        "input": folder / "questions.jsonl",
        "problems": 0,
        "samples": 20,
        "concurrency": 3,
        **settings,
    }
    given = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    return ["evaluate", "passk", *given]


def run(url: str, folder: Path, **settings: Any) -> int:
    return srm.main(arguments(url, folder, **settings))


def result(output: Path) -> dict[str, Any]:
    (path,) = output.glob("*-passk*.json")
    found: dict[str, Any] = json.loads(path.read_bytes())
    assert path.with_suffix(".svg").name in path.with_suffix(".md").read_text()
    return found


def tallies(folder: Path) -> list[tuple[int, int]]:
    return [(one["drawn"], one["right"]) for one in result(folder / "out")["problems"]]


def expected(foreign: Foreign, body: dict[str, Any], digit: int) -> int:
    choices = foreign.completion(body)["choices"]
    return sum(one["text"] == f"#### {digit}" for one in choices)


def test_our_server_counts_what_it_draws(
    server: Server, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"reward": f"{folder}/reward.py:vowel", "samples": 300, "max_tokens": 2}
    assert run(server.url + "/v1", folder, keep_texts="true", **settings) == 0
    said = capsys.readouterr()
    lines = (folder / "out/journal.jsonl").read_text().splitlines()
    journal = [json.loads(line[9:]) for line in lines]
    assert journal[0]["is_srm"] and journal[0]["n"] == 300 and len(journal) == 3
    for number, question in enumerate(("a cat", "a mat")):
        (answer,) = (one for one in journal[1:] if one.get("problem", 0) == number)
        assert sum(count for _, count, _ in answer["texts"]) == 300
        assert len(answer["texts"]) == answer["texts_scored"] < 300
        prompt = f"Question: {question}\nAnswer:"
        seed = int.from_bytes(hashlib.sha256(f"0 {number}".encode()).digest()[:4], "big") % 2**31
        drawn = complete(server, prompt=prompt, n=300, max_tokens=2, seed=seed, stop=["Question:"])
        right = sum(any(one in choice["text"] for one in "aeiou") for choice in drawn["choices"])
        found = result(folder / "out")["problems"][number]
        assert (found["drawn"], found["right"]) == (300, right) and 0 < right < 300
        assert found["completion_tokens"] == drawn["usage"]["completion_tokens"]
    written = result(folder / "out")
    assert written["fingerprints"] == [drawn["system_fingerprint"]]
    assert written["points"][0]["coverage"] == pytest.approx(
        sum(right for _, right in tallies(folder)) / 600
    )
    assert written["points"][-1]["k"] == 300 and written["commit"] and written["machine"]
    assert "| 100 | " in said.out and "2 of 2 problems" in said.err
    (picture,) = (folder / "out").glob("*.svg")
    assert picture.read_text().startswith("<?xml")


def test_drawing_ends_early_in_the_same_way_here_and_on_the_server(
    server: Server, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"reward": f"{folder}/reward.py:vowel", "n": 50, "samples": 500, "max_tokens": 2}
    found = []
    for match in ("", "[aeiou]"):
        own = folder / f"of {match}"
        assert run(server.url, folder, output=own, match=match, until=20, **settings) == 0
        problems = result(own)["problems"]
        assert all(one["is_until"] and one["right"] == 20 < one["drawn"] for one in problems)
        found.append([one["drawn"] for one in problems])
        assert len((own / "journal.jsonl").read_text().splitlines()) > 3  # several parts
    assert found[0] == found[1]
    assert run(server.url, folder, match="[xyz]", until=5, **settings) == 2
    assert "match = '[xyz]' and reward disagree on" in capsys.readouterr().err


def test_any_other_server_is_asked_for_choices(foreign: Foreign, url: str, folder: Path) -> None:
    assert run(url, folder, n=7, top_p=0.9, stop="", max_tokens=9) == 0
    assert [body["n"] for body in foreign.bodies].count(7) == 4  # and 6, of both problems
    seeds = [(one["prompt"], one["seed"] + i) for one in foreign.bodies for i in range(one["n"])]
    assert len(set(seeds)) == 40  # no sample is drawn twice
    for number, digit in enumerate((1, 2)):
        own = [one for one in foreign.bodies if ("mat" in one["prompt"]) == bool(number)]
        right = sum(expected(foreign, body, digit) for body in own)
        assert tallies(folder)[number] == (20, right)
    body = foreign.bodies[0]
    assert set(body) == {
        *("model", "prompt", "n", "max_tokens", "temperature", "top_p", "seed"),
    }
    assert (body["model"], body["top_p"], body["max_tokens"]) == ("other", 0.9, 9)


def test_samples_behind_the_last_right_one_are_left_out(
    foreign: Foreign, url: str, folder: Path
) -> None:
    assert run(url, folder, n=7, until=2, samples=200) == 0
    for number, digit in enumerate((1, 2)):
        own = [one for one in foreign.bodies if ("mat" in one["prompt"]) == bool(number)]
        texts = [
            choice["text"] for body in own for choice in foreign.completion(body)["choices"][::-1]
        ]
        places = [place for place, text in enumerate(texts, 1) if text == f"#### {digit}"]
        assert tallies(folder)[number] == (places[1], 2)
        assert len(texts) - 7 < places[1]  # no further request was sent


def test_a_run_goes_on_behind_what_it_has(
    foreign: Foreign, url: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"n": 4, "concurrency": 1}
    assert run(url, folder, output=folder / "whole", **settings) == 0
    foreign.bodies.clear()
    foreign.faults = [{}, {}, {}, (400, "no more today")]
    assert run(url, folder, **settings) == 2
    said = capsys.readouterr().err
    assert "refused with 400: no more today" in said and "3 replies are in" in said
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


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)]
)
def test_a_run_that_is_killed_goes_on(
    foreign: Foreign, url: str, folder: Path, number: signal.Signals, code: int
) -> None:
    foreign.faults = [{}, {}, {}, "hold"]
    settings = {"n": 4, "concurrency": 1}
    command = [sys.executable, "srm.py", *arguments(url, folder, **settings)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert foreign.held.wait(120)
        process.send_signal(number)
        _, said = process.communicate(timeout=120)
    assert process.returncode == code
    assert ("3 replies are in" in said) == (number == signal.SIGINT)
    foreign.released.set()
    assert run(url, folder, **settings) == 0
    assert len(foreign.bodies) == 10
    assert len({(body["prompt"], body["seed"]) for body in foreign.bodies}) == 10


def test_damage_and_another_runs_journal_are_named(
    foreign: Foreign, url: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(url, folder) == 0
    journal = folder / "out" / "journal.jsonl"
    for settings, said in (
        ({"samples": 21}, "samples = 20, this one has 21"),
        ({"temperature": 0.5}, "temperature = 1.0, this one has 0.5"),
        ({"problems": 1}, "is of a run with other problems: choose"),
        ({"n": 3}, "n = 20, this one has 3"),
        ({"reward": f"{folder}/reward.py:vowel"}, "with reward = 'training.questions"),
    ):
        assert run(url, folder, **settings) == 2
        assert said in capsys.readouterr().err
    whole = journal.read_bytes()
    journal.write_bytes(whole.replace(b'"drawn":20', b'"drawn":21', 1))
    assert run(url, folder) == 2
    assert "journal.jsonl, line 2 is damaged" in capsys.readouterr().err
    journal.write_bytes(b"\0" * 5)  # nothing of it was written yet
    assert run(url, folder) == 0
    assert journal.read_bytes().split(b"\n")[0] == whole.split(b"\n")[0]
    journal.write_bytes(b"a diary\n")
    assert run(url, folder) == 2
    assert "journal.jsonl, line 1 is damaged" in capsys.readouterr().err
    assert journal.read_bytes() == b"a diary\n"


def test_a_run_that_was_refused_goes_on_with_what_is_not(
    foreign: Foreign, url: str, folder: Path
) -> None:
    foreign.faults = [(400, "temperature must be at most 2")]
    assert run(url, folder, temperature=3, concurrency=1) == 2
    assert run(url, folder, temperature=1) == 0
    assert (
        json.loads((folder / "out/journal.jsonl").read_bytes()[9:].splitlines()[0])
        == (result(folder / "out")["sampled"])
    )


def test_a_disk_that_takes_no_more_is_named_and_what_it_has_stays(
    foreign: Foreign, url: str, folder: Path
) -> None:
    settings = {"n": 1, "samples": 40}
    program = f"import resource, srm, sys\nresource.setrlimit({resource.RLIMIT_FSIZE}, (3000, -1))"
    command = [sys.executable, "-c", f"{program}\nsys.exit(srm.main(sys.argv[1:]))"]
    ended = subprocess.run(
        [*command, *arguments(url, folder, **settings)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
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
    command = [sys.executable, "srm.py", *arguments(url, folder, **settings)]
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
    said = capsys.readouterr().err
    assert re.search(r"not answered within timeout_s = 2000; the last try: .*still loading", said)
    assert "0 replies are in" in said


@pytest.mark.parametrize(
    ("fault", "said"),
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
    foreign: Foreign,
    url: str,
    folder: Path,
    fault: Any,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    foreign.faults = [fault] * 3
    assert run(url, folder) == 2
    assert re.search(said, capsys.readouterr().err)


def test_samples_of_other_weights_are_not_added_up(
    foreign: Foreign, url: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign.owner = "srm"
    counted = {"samples": [{"drawn": 20, "counts": [{"text": "#### 1", "count": 20}]}]}
    foreign.faults = [counted | {"system_fingerprint": name} for name in ("one", "two")]
    assert run(url, folder, concurrency=1) == 2
    assert "weights were changed during the run" in capsys.readouterr().err
    assert foreign.bodies[0]["return"] == "counts"
    foreign.faults = [counted | {"system_fingerprint": "one", "first_weights_version": 1}]
    assert run(url, folder, concurrency=1, output=folder / "new") == 2
    assert "weights were changed during the run" in capsys.readouterr().err
    foreign.faults = [{"system_fingerprint": "one"}]  # it did not count
    assert run(url, folder, concurrency=1, output=folder / "newer") == 2
    assert "did not count the samples" in capsys.readouterr().err


def test_what_the_server_cannot_take_is_its_own_words(
    server: Server, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server.url, folder, samples=5_000) == 2
    assert "n = 5000 of 1 prompts: this server takes at most max_waiting = 3000" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"samples": 0}, "samples must be 1 … 1000000, got 0"),
        ({"problems": -1}, "problems must be 0 … 1000000, got -1"),
        ({"problems": 3}, "problems = 3, but .*questions.jsonl has 2 questions"),
        ({"temperature": "nan"}, "temperature must be 0 … 100, got nan"),
        ({"top_p": "nan"}, "top_p must be .* got nan"),
        ({"timeout_s": "nan"}, "timeout_s must be .* got nan"),
        ({"until": 21}, "until must be 0 … 20, got 21"),
        ({"match": "a"}, "match = 'a' ends nothing where until is 0"),
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
def test_what_makes_no_run_is_refused_before_anything_is_drawn(
    url: str,
    folder: Path,
    settings: dict[str, Any],
    said: str,
    foreign: Foreign,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(**{"url": url, "folder": folder, **settings}) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not foreign.bodies and not (folder / "out").exists()


@pytest.mark.parametrize(("status", "code"), [(503, 2), (404, 0)])
def test_a_server_may_have_no_list_of_models_but_not_fail(
    url: str,
    folder: Path,
    foreign: Foreign,
    status: int,
    code: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    foreign.list_status = status
    assert run(url, folder, served_model_name="other") == code
    assert run(url, folder, output=folder / "new") == 2
    assert f"/v1/models refused with {status}" in capsys.readouterr().err


def test_match_is_for_servers_that_know_it(
    url: str, folder: Path, foreign: Foreign, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(url, folder, match="a", until=2) == 2
    assert "match = 'a' needs an SRM server" in capsys.readouterr().err


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
