"""`srm generate` as a user calls it, with the numpy engine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.errors import ConfigError, EngineUnavailable
from server.commands.generate import main
from server.commands.standard_output import INTERRUPTED
from tests.serving import ROOT, Server, complete

FLAGS = ("--num-slots=16", "--max-step-rows=16", "--max-step-tokens=64")


def start(folder: Path, *flags: str, **options: Any) -> subprocess.Popen[bytes]:
    program = (
        "import sys; from server.commands.generate import main\n"
        "from engine.errors import SRMError\n"
        "try: code = main(sys.argv[1:], engine_module='tests.engines.numpy_engine')\n"
        "except SRMError as error: code = error.exit_code; print(error.message, file=sys.stderr)\n"
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", program, f"--model={folder}", *FLAGS, *flags]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, **pipes, **options)


def generate(folder: Path, *flags: str, given: bytes | None = None) -> bytes:
    """What it prints; nothing else may be said."""
    with start(folder, *flags, stdin=subprocess.PIPE) as process:
        said, complaints = process.communicate(given)
    assert (process.returncode, complaints) == (0, b"")
    return said


def test_one_completion_is_its_text(text_model: Path, server: Server) -> None:
    fields: dict[str, Any] = {"max_tokens": 50, "seed": 5, "temperature": 1.3}
    (choice,) = complete(server, prompt="the cat", **fields)["choices"]
    flags = ("--max-tokens=50", "--seed=5", "--temperature=1.3")
    assert generate(text_model, "the cat", *flags).decode() == choice["text"] + "\n"
    assert generate(text_model, *flags, given=b"the cat\n").decode() == choice["text"] + "\n"


def test_several_are_in_order_each_behind_its_number(text_model: Path, server: Server) -> None:
    choices = complete(server, prompt=[5, 6], n=20, max_tokens=30, seed=1, stop=["t", "q"])
    flags = ("--n=20", "--max-tokens=30", "--seed=1", "--stop=t,q")
    said = generate(text_model, "5, 6", "--token-ids", *flags).decode()
    assert said == "".join(f"[{one['index']}]{one['text']}\n" for one in choices["choices"])


def test_json_is_the_servers_reply(text_model: Path, server: Server) -> None:
    body = {"n": 2, "max_tokens": 9, "seed": 3, "logprobs": 1, "return_token_ids": True}
    expected = complete(server, prompt="the", **body)
    extra = json.dumps({"logprobs": 1, "return_token_ids": True})
    flags = ("--n=2", "--max-tokens=9", "--seed=3", f"--extra-body={extra}", "--json")
    found = json.loads(generate(text_model, *flags, "the"))
    assert found["choices"] == expected["choices"]
    assert found["model"] == "tiny"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature=-1", "a"], "temperature must be a number from 0"),
        (["--max-tokens=0", "a"], "max_tokens must be an integer of at least 1"),
        (["--token-ids", "a b"], "prompt must be token ids"),
        (["--extra-body=[]", "a"], "extra_body must be a JSON object"),
        (['--extra-body={"logits": 1}', "a"], "'logits' is not a field of this request"),
        (['--extra-body={"prompt": ["a", "b"]}', "a"], "prompt must be one, got 2"),
    ],
)
def test_what_cannot_be_is_refused_before_the_engine_starts(
    flags: list[str], message: str, text_model: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        main([f"--model={text_model}", *flags], engine_module="tests.no_such_engine")


def test_what_only_the_model_can_refuse_is_a_bad_argument_too(text_model: Path) -> None:
    for flags, message in (
        (["--token-ids", "400"], "prompt has token id 400"),
        (["the cat" * 400], "prompt has "),
    ):
        with pytest.raises(ConfigError, match=message):
            main(
                [f"--model={text_model}", *FLAGS, *flags],
                engine_module="tests.engines.numpy_engine",
            )


def test_an_engine_that_does_not_start_is_said(text_model: Path) -> None:
    with pytest.raises(EngineUnavailable, match="the engine process ended, exit code 1") as caught:
        main([f"--model={text_model}", "a"], engine_module="tests.no_such_engine")
    assert caught.value.exit_code == 1


def test_an_interrupt_leaves_no_process(text_model: Path) -> None:
    with start(text_model, "the cat", "--n=50000", "--max-tokens=100") as process:
        assert process.stdout is not None
        assert process.stdout.read(3) == b"[0]"
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == INTERRUPTED
    assert children and not psutil.wait_procs(children, timeout=120)[1]
