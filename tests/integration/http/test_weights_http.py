"""Other weights for a running server, over HTTP and from the console; crashes and wrong folders."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

import srm.__main__ as srm
from srm.server.supervise.own_folder import COPIES
from tests.kit.processes.held_engine import held, release
from tests.kit.serving import (
    CHAT_TEMPLATE,
    CHATS,
    COMPLETIONS,
    NUM_SLOTS,
    SERVER_FLAGS,
    Asked,
    Server,
    children,
    complete,
    error_of,
    free_port,
    is_ready,
    tries,
    wait_until,
)

WEIGHTS = "/v1/admin/weights"
HEADER = "the cat sat on the mat with the other cat and the other cat sat on the mat"
GREEDY = {"prompt": HEADER, "temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def reloading(folders: Path) -> Iterator[Server]:
    """Serves one of them."""
    flags = (*SERVER_FLAGS, f"--weights-dir={folders}", f"--data-dir={folders / 'data'}",
             f"--admin-port={free_port()}", "--api-processes=2")  # fmt: skip
    with Server(folders / "0", *flags, engine_module="tests.kit.processes.held_engine") as running:
        yield running


def reload_weights(server: Server, path: object, **more: str) -> dict[str, Any]:
    reply = server.admin.post(WEIGHTS, json={"path": str(path), **more})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def refused(server: Server, status: int, **body: object) -> dict[str, Any]:
    return error_of(server.admin.post(WEIGHTS, json=body), status)


def version(server: Server) -> int:
    """Of a reply, which knows it by its tokens; `state` of another process may be older."""
    return int(complete(server, max_tokens=1)["weights_version"])


def other(server: Server, folders: Path) -> Path:
    """The folder of the two that is not in use."""
    is_first = complete(server, max_tokens=1)["system_fingerprint"] == "tiny-0"
    return folders / ("1" if is_first else "0")


def made_with(reply: dict[str, Any]) -> tuple[int, str]:
    return reply["weights_version"], reply["system_fingerprint"]


def cached(reply: dict[str, Any]) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_replies_follow_the_weights(reloading: Server, folders: Path) -> None:
    before = version(reloading)
    old = [complete(reloading, **GREEDY) for _ in range(2)]
    done = reload_weights(reloading, folders / "1")
    assert done["weights_version"] == before + 1
    assert done["path"] == str(folders / "1") and done["running"] == "finish"
    assert 0 < done["pause_seconds"] <= done["seconds"]
    new = complete(reloading, **GREEDY)
    assert (cached(old[1]) > 0, cached(new)) == (True, 0)
    assert new["choices"][0]["text"] != old[0]["choices"][0]["text"]
    in_use = (before + 1, done["fingerprint"])
    assert {made_with(item) for item in old} == {(before, old[0]["system_fingerprint"])}
    assert made_with(new) == in_use and old[0]["system_fingerprint"] != done["fingerprint"]
    assert "first_weights_version" not in new
    chat = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 2}
    assert made_with(reloading.http.post(CHATS, json=chat).json()) == in_use
    assert reloading.metric("srm_weights_version") == before + 1
    for _ in tries():  # it is a second old at most
        state = reloading.admin.get("/v1/admin/state").json()
        if state["weights_version"] == before + 1:
            break
    assert (state["state"], state["num_slots"]) == ("ready", NUM_SLOTS)
    assert state["fingerprint"] == done["fingerprint"]
    done = reload_weights(reloading, "0")
    for _ in range(8):  # a connection each, so that both processes answer
        url = f"{reloading.url}{COMPLETIONS}"
        reply = httpx.post(url, json={"prompt": "a"}, timeout=120).json()
        assert made_with(reply) == (before + 2, done["fingerprint"])
    back = complete(reloading, **GREEDY)
    for name in ("choices", "system_fingerprint"):
        assert back[name] == old[0][name]


def events(server: Server, **fields: Any) -> Generator[dict[str, Any], None, None]:
    body = {"prompt": "the cat", "stream": True, **fields}
    with server.http.stream("POST", COMPLETIONS, json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize(
    "fields",
    [{}, {"logprobs": 0, "stream_options": {"include_usage": True}}],
    ids=["arrays", "objects"],
)
def test_events_name_their_weights(
    reloading: Server, folders: Path, fields: dict[str, Any]
) -> None:
    before, folder = version(reloading), other(reloading, folders)
    many = {"max_tokens": 120, "n": 1_000, "ignore_eos": True}
    with closing(events(reloading, **many, **fields)) as stream:
        with held(folders / "0", steps=9):
            results = [next(stream)]
            done = reload_weights(reloading, folder, running="continue")
        for event in stream:
            results.append(event)
            if event["weights_version"] > before:
                break
    versions = [event["weights_version"] for event in results]
    assert versions == sorted(versions) and set(versions) == {before, before + 1}
    prints = dict(map(made_with, results))
    assert prints[before] != prints[before + 1] == done["fingerprint"]
    reloading.wait_until_idle()


@pytest.mark.parametrize("stop", [None, ["no such text"]], ids=["final", "columns"])
def test_what_runs_says_both(reloading: Server, folders: Path, stop: list[str] | None) -> None:
    before, folder = version(reloading), other(reloading, folders)
    with held(folders / "0"):
        asked = Asked(reloading, n=5, stop=stop)
        reload_weights(reloading, folder, running="continue")
    reply = asked.answer().json()
    assert (reply["first_weights_version"], reply["weights_version"]) == (before, before + 1)
    assert [len(choice["text"]) > 0 for choice in reply["choices"]] == [True] * 5


def test_what_runs_is_dropped(reloading: Server, folders: Path) -> None:
    with held(folders / "0"):
        asked = Asked(reloading, n=5)
        done = reload_weights(reloading, folders / "1", running="drop")
        reply = asked.answer()
    error = error_of(reply, 503)
    assert error["code"] == "engine_unavailable" and "other weights" in error["message"]
    assert reply.headers["retry-after"] == "2"
    assert version(reloading) == done["weights_version"]
    reloading.wait_until_idle()


def test_waits_for_what_runs_and_refuses_a_second_change(reloading: Server, folders: Path) -> None:
    before = version(reloading)
    with held(folders / "0"), ThreadPoolExecutor() as pool:
        asked = Asked(reloading, n=5)
        change = pool.submit(reload_weights, reloading, folders / "0")
        for _ in tries():
            second = reloading.admin.post(WEIGHTS, json={"path": "no folder"})
            if second.status_code == 409:
                break
            if change.done():  # refused itself, since the second was looked at just then
                change = pool.submit(reload_weights, reloading, folders / "0")
        release(folders / "0")
        reply = asked.answer().json()
        assert change.result()["weights_version"] == before + 1
    error = error_of(second, 409)
    assert (error["code"], error["type"]) == ("swap_in_progress", "conflict_error")
    assert reply["weights_version"] == before and "first_weights_version" not in reply


def test_a_wrong_folder_is_refused_and_changes_nothing(reloading: Server, folders: Path) -> None:
    before, refusals = version(reloading), reloading.metric("srm_weight_swaps_total", "refused")
    wrong = folders / "wrong"
    config = json.loads((folders / "0" / "config.json").read_text()) | {"num_layers": 3}
    for name, content, message in (
        ("config.json", json.dumps(config), "num_layers = 3 "),
        ("config.json", "{", "config.json"),
        ("model.safetensors", "\0" * 100, "model.safetensors"),
        ("chat_template.jinja", CHAT_TEMPLATE + "!", "chat template is not"),
        ("tokenizer.json", "{}", "tokenizer.json is not"),
    ):
        shutil.copytree(folders / "0", wrong)
        (wrong / name).write_text(content)
        assert message in refused(reloading, 400, path=str(wrong))["message"]
        shutil.rmtree(wrong)
    assert reloading.metric("srm_weight_swaps_total", "refused") == refusals + 3
    for status, param, message, body in (
        (404, "path", "nowhere", {"path": "nowhere"}),
        (400, "pause", "pause", {"path": "1", "pause": True}),
        (400, "path", "weights_dir", {"path": "../../etc"}),
        (400, "path", "path is required", {}),
        (400, "running", "running", {"path": "1", "running": "stop"}),
    ):
        error = refused(reloading, status, **body)
        assert error["param"] == param and message in error["message"]
    assert version(reloading) == before
    shutil.copytree(folders / "0", wrong)
    for name in ("tokenizer.json", "chat_template.jinja"):  # without them it is as good as any
        (wrong / name).unlink()
    reload_weights(reloading, wrong)
    shutil.rmtree(wrong)


def test_the_commands_change_weights_and_take_a_snapshot(
    reloading: Server,
    server: Server,
    folders: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SRM_API_KEYS", raising=False)
    before, admin = version(reloading), f"--url={reloading.admin_url}"
    assert srm.main(["weights", str(folders / "1"), admin, "--running=continue"]) == 0
    assert json.loads(capsys.readouterr().out)["weights_version"] == before + 1
    taken = reloading.admin.post("/v1/admin/snapshot").json()
    assert (taken["path"], taken["requests"], taken["sequences"]) == (None, 0, 0)
    assert srm.main(["snapshot", f"{admin}/"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == taken.keys()
    for code, message, argv in (
        (1, "nowhere", ["weights", str(folders / "nowhere"), admin]),
        (1, "--admin-port", ["weights", str(folders / "1"), f"--url={server.url}"]),
        (1, "does not answer", ["snapshot", "--url=http://127.0.0.1:1"]),
        (2, "", ["weights"]),
        (2, "", ["snapshot", "--url=127.0.0.1:1"]),
    ):
        assert srm.main(argv) == code
        captured = capsys.readouterr()
        assert captured.out == "" and message in captured.err


def test_what_runs_outlives_its_folders(folders: Path, tmp_path: Path) -> None:
    """The folder of weights that were put to use, and that of the model, which processes that are
    started again read: both are gone, or have others."""
    first = Path(shutil.copytree(folders / "0", tmp_path / "0"))
    gone = Path(shutil.copytree(folders / "1", tmp_path / "gone"))
    flags = (*SERVER_FLAGS, f"--admin-port={free_port()}", f"--data-dir={tmp_path / 'data'}")
    with Server(first, *flags) as server:
        done = reload_weights(server, gone)
        text = complete(server, **GREEDY)["choices"]
        shutil.rmtree(gone)
        (first / "seed").write_text("7")
        (first / "tokenizer.json").write_text("{}")
        for name in ("engine", "engine", "api", "jobs"):
            killed = children(server)[name]
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: children(server).get(name, killed) != killed)  # noqa: B023
            wait_until(lambda: is_ready(server))
            again = complete(server, **GREEDY)
            assert again["choices"] == text
            assert made_with(again) == (done["weights_version"], done["fingerprint"])
    assert not list((tmp_path / "data" / "running").iterdir()), "its copies go with the server"


def test_a_crash_without_any_weights_ends_the_server(folders: Path, tmp_path: Path) -> None:
    gone = Path(shutil.copytree(folders / "1", tmp_path / "gone"))
    flags = (*SERVER_FLAGS, f"--admin-port={free_port()}", f"--data-dir={tmp_path / 'data'}")
    server = Server(folders / "0", *flags)
    done = reload_weights(server, gone)
    shutil.rmtree(gone)
    (copies,) = (tmp_path / "data" / "running").glob(f"*/{COPIES}")
    shutil.rmtree(copies)
    os.kill(children(server)["engine"], signal.SIGKILL)
    assert server.wait() == 3
    text = "".join(server.lines)
    assert f"weights version {done['weights_version']}" in text and str(gone) in text
