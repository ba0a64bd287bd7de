"""`srm generate` as a user calls it, with the numpy engine."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from srm.errors import ConfigError, EngineUnavailable
from srm.server.commands import score
from srm.server.commands.generate import main
from srm.server.commands.standard_output import BROKEN_PIPE, INTERRUPTED
from tests.kit.serving import ROOT, Server, complete

FLAGS = ("--num-slots=16", "--max-step-rows=16", "--max-step-tokens=64")
ENGINE = "tests.kit.processes.numpy_engine"


@pytest.fixture
def generate(text_model: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> Callable[..., bytes]:
    """generate("the", "--n=2"): what it prints; nothing else may be said."""

    def printed(*flags: str) -> bytes:
        capfdbinary.readouterr()
        assert main([f"--model={text_model}", *FLAGS, *flags], engine_module=ENGINE) == 0
        message, complaints = capfdbinary.readouterr()
        assert complaints == b""
        return message

    return printed


def test_one_completion_is_its_text(
    generate: Callable[..., bytes], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: dict[str, Any] = {"max_tokens": 50, "seed": 5, "temperature": 1.3}
    (choice,) = complete(server, prompt="the cat", **fields)["choices"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the cat\n")))
    message = generate("--max-tokens=50", "--seed=5", "--temperature=1.3")
    assert message.decode() == choice["text"] + "\n"


def test_several_are_in_order_each_behind_its_number(
    generate: Callable[..., bytes], server: Server
) -> None:
    choices = complete(server, prompt=[5, 6], n=20, max_tokens=30, seed=1, stop=["t", "q"])
    flags = ("--n=20", "--max-tokens=30", "--seed=1", "--stop=t,q")
    decoded = generate("5, 6", "--token-ids", *flags).decode()
    assert decoded == "".join(
        f"[{choice['index']}]{choice['text']}\n" for choice in choices["choices"]
    )


def test_json_is_the_servers_reply(generate: Callable[..., bytes], server: Server) -> None:
    body = {"n": 2, "max_tokens": 9, "seed": 3, "logprobs": 1, "return_token_ids": True}
    expected = complete(server, prompt="the", **body)
    extra = json.dumps({"logprobs": 1, "return_token_ids": True})
    flags = ("--n=2", "--max-tokens=9", "--seed=3", f"--extra-body={extra}", "--json")
    document = json.loads(generate(*flags, "the"))
    assert document["choices"] == expected["choices"]
    assert document["model"] == "tiny"


@pytest.mark.parametrize("flags", [["a"], ["a", "--n=3"], ["a", "--json"]])
def test_a_terminal_counts_until_there_is_a_text(
    flags: list[str], generate: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    @contextmanager
    def count(doing: str) -> Iterator[None]:
        events.append(doing)
        yield
        events.append("end")

    monkeypatch.setattr("srm.server.commands.generate.count_seconds", count)
    monkeypatch.setattr(
        "srm.server.commands.generate._write", lambda data: events.append(data.decode())
    )
    generate(*flags)
    assert events[:2] == ["working on the prompt", "end"]
    assert len(events) > 2 and events.count("end") == 1


@pytest.mark.parametrize(
    ("message", "flags"),
    [
        ("temperature must be a number from 0", ["--temperature=-1", "a"]),
        ("temperature must be a finite number, got nan", ["--temperature=nan", "a"]),
        ("min_p must be a finite number, got inf", ["--min-p=inf", "a"]),
        ("prompt, stop and extra_body must be UTF-8, got b'a", ["a\udcff"]),
        ("prompt, stop and extra_body must be UTF-8, got b'", ["--stop=\udcff", "a"]),
        ("max_tokens must be an integer of at least 1", ["--max-tokens=0", "a"]),
        ("prompt must be token ids", ["--token-ids", "a b"]),
        ("extra_body must be a JSON object", ["--extra-body=[]", "a"]),
        ("'logits' is not a field of this request", ['--extra-body={"logits": 1}', "a"]),
        ("prompt must be one, got 2", ['--extra-body={"prompt": ["a", "b"]}', "a"]),
        ("the engine process ended, exit code 1", ["a"]),
    ],
)
def test_what_cannot_be_is_refused_before_the_engine_starts(
    flags: list[str], message: str, text_model: Path
) -> None:
    kind = EngineUnavailable if "engine" in message else ConfigError
    with pytest.raises(kind, match=message) as caught:
        main([f"--model={text_model}", *flags], engine_module="tests.no_such_engine")
    assert caught.value.exit_code == (1 if kind is EngineUnavailable else 2)


@pytest.mark.parametrize(
    ("program", "given"), [(main, b""), (main, b"\n"), (main, None), (score.main, None)]
)
def test_an_empty_or_closed_standard_input_is_no_prompt(
    program: Callable[..., int],
    given: bytes | None,
    text_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`srm generate </dev/null` made up a question, and with `<&-` both had a traceback."""
    stdin = None if given is None else io.TextIOWrapper(io.BytesIO(given))
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(ConfigError, match=r"(prompt|input) is missing"):
        program([f"--model={text_model}"], engine_module="tests.no_such_engine")


def test_what_only_the_model_can_refuse_is_a_bad_argument_too(text_model: Path) -> None:
    with pytest.raises(ConfigError, match="prompt has token id 400"):
        main([f"--model={text_model}", *FLAGS, "--token-ids", "400"], engine_module=ENGINE)


@pytest.mark.parametrize("is_closed", [False, True])
def test_an_end_of_its_reader_or_by_ctrl_c_leaves_no_process(
    text_model: Path, is_closed: bool
) -> None:
    program = (
        "import sys; from srm.server.commands.generate import main\n"
        f"sys.exit(main(sys.argv[1:], engine_module={ENGINE!r}))"
    )
    flags = [*FLAGS, "the cat", "--n=50000", "--max-tokens=100"]
    command = [sys.executable, "-c", program, f"--model={text_model}", *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(3) == b"[0]"
        children = psutil.Process(process.pid).children(recursive=True)
        if is_closed:
            process.stdout.close()
        else:
            process.send_signal(signal.SIGINT)
        assert process.wait(120) == (BROKEN_PIPE if is_closed else INTERRUPTED)
    assert children and not psutil.wait_procs(children, timeout=120)[1]
