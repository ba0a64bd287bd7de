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

import srm
from tests.engines.held_engine import held, release
from tests.integration.commands.test_serve import Asked, children, is_ready, wait_until
from tests.serving import CHAT_TEMPLATE, NUM_SLOTS, SERVER_FLAGS, Server, complete, free_port, tries

WEIGHTS = "/v1/admin/weights"
HEADER = "the cat sat on the mat with the other cat and the other cat sat on the mat"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has model folders `first` and `second`, which differ in their weights."""
    root = tmp_path_factory.mktemp("weights")
    for seed, name in enumerate(("first", "second")):
        shutil.copytree(text_model, root / name)
        (root / name / "seed").write_text(str(seed))
    return root


@pytest.fixture(scope="module")
def swapping(folders: Path) -> Iterator[Server]:
    flags = (*SERVER_FLAGS, f"--weights-dir={folders}", f"--data-dir={folders / 'data'}",
             f"--admin-port={free_port()}", "--api-processes=2")  # fmt: skip
    with Server(folders / "first", *flags, engine_module="tests.engines.held_engine") as running:
        yield running


def swap(server: Server, path: object, **more: str) -> dict[str, Any]:
    reply = server.admin.post(WEIGHTS, json={"path": str(path), **more})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def refused(server: Server, status: int, **body: object) -> dict[str, Any]:
    reply = server.admin.post(WEIGHTS, json=body)
    assert reply.status_code == status, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


def state(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.admin.get("/v1/admin/state").json()
    return found


def version(server: Server) -> int:
    """Of a reply, which knows it by its tokens; `state` of another process may be older."""
    return int(complete(server, max_tokens=1)["weights_version"])


def test_replies_follow_the_weights(swapping: Server, folders: Path) -> None:
    before = version(swapping)
    old = [complete(swapping, prompt=HEADER, **GREEDY) for _ in range(2)]
    assert old[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    done = swap(swapping, folders / "second")
    assert done["weights_version"] == before + 1
    assert done["path"] == str(folders / "second") and done["running"] == "finish"
    assert 0 < done["pause_seconds"] <= done["seconds"]
    new = complete(swapping, prompt=HEADER, **GREEDY)
    assert new["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert new["choices"][0]["text"] != old[0]["choices"][0]["text"]
    assert [one["weights_version"] for one in (*old, new)] == [before, before, before + 1]
    assert new["system_fingerprint"] == done["fingerprint"] != old[0]["system_fingerprint"]
    assert "first_weights_version" not in new
    chat = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 2}
    reply = swapping.http.post("/v1/chat/completions", json=chat).json()
    assert reply["weights_version"] == before + 1
    assert reply["system_fingerprint"] == done["fingerprint"]
    assert swapping.metric("srm_weights_version") == before + 1
    done = swap(swapping, "first")
    for _ in range(8):  # a connection each, so that both processes answer
        url = f"{swapping.url}/v1/completions"
        one = httpx.post(url, json={"prompt": "a"}, timeout=120).json()
        assert one["weights_version"] == done["weights_version"]
        assert one["system_fingerprint"] == done["fingerprint"]
    back = complete(swapping, prompt=HEADER, **GREEDY)
    assert back["choices"] == old[0]["choices"]
    assert back["system_fingerprint"] == old[0]["system_fingerprint"]


def events(server: Server, **fields: Any) -> Generator[dict[str, Any], None, None]:
    body = {"prompt": "the cat", "stream": True, **fields}
    with server.http.stream("POST", "/v1/completions", json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def other(server: Server, folders: Path) -> Path:
    """The folder of the two that is not in use."""
    is_first = complete(server, max_tokens=1)["system_fingerprint"] == "tiny-0"
    return folders / ("second" if is_first else "first")


@pytest.mark.parametrize("plain", [True, False], ids=["arrays", "objects"])
def test_a_stream_says_of_each_event_which_weights(
    swapping: Server, folders: Path, plain: bool
) -> None:
    before, folder = version(swapping), other(swapping, folders)
    fields: dict[str, Any] = {"max_tokens": 120, "n": 1_000, "ignore_eos": True}
    if not plain:
        fields |= {"logprobs": 0, "stream_options": {"include_usage": True}}
    with closing(events(swapping, **fields)) as stream:
        with held(folders / "first", steps=9):
            said = [next(stream)]
            done = swap(swapping, folder, running="continue")
        for event in stream:
            said.append(event)
            if event["weights_version"] > before:
                break
    versions = [event["weights_version"] for event in said]
    assert versions == sorted(versions) and set(versions) == {before, before + 1}
    prints = {event["weights_version"]: event["system_fingerprint"] for event in said}
    assert prints[before] != prints[before + 1] == done["fingerprint"]
    swapping.wait_until_idle()


@pytest.mark.parametrize("stop", [None, ["no such text"]], ids=["final", "columns"])
def test_what_runs_goes_on_and_says_so(
    swapping: Server, folders: Path, stop: list[str] | None
) -> None:
    before, folder = version(swapping), other(swapping, folders)
    with held(folders / "first"):
        asked = Asked(swapping, n=5, stop=stop)
        swap(swapping, folder, running="continue")
    reply = asked.answer().json()
    assert (reply["first_weights_version"], reply["weights_version"]) == (before, before + 1)
    assert [len(choice["text"]) > 0 for choice in reply["choices"]] == [True] * 5


def test_what_runs_is_dropped(swapping: Server, folders: Path) -> None:
    with held(folders / "first"):
        asked = Asked(swapping, n=5)
        done = swap(swapping, folders / "second", running="drop")
        reply = asked.answer()
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "engine_unavailable"
    assert "other weights" in reply.json()["error"]["message"]
    assert reply.headers["retry-after"] == "2"
    assert complete(swapping)["weights_version"] == done["weights_version"]
    swapping.wait_until_idle()


def test_what_runs_is_waited_for_and_a_second_change_is_refused(
    swapping: Server, folders: Path
) -> None:
    before = version(swapping)
    with held(folders / "first"), ThreadPoolExecutor() as pool:
        asked = Asked(swapping, n=5)
        wait_until(lambda: swapping.metric("srm_engine_running_sequences") > 0)
        change = pool.submit(swap, swapping, folders / "first")
        for _ in tries():
            second = swapping.admin.post(WEIGHTS, json={"path": "no folder"})
            if second.status_code == 409:
                break
        release(folders / "first")
        reply = asked.answer().json()
        changed = change.result()
    assert second.json()["error"]["code"] == "swap_in_progress"
    assert second.json()["error"]["type"] == "conflict_error"
    assert reply["weights_version"] == before and "first_weights_version" not in reply
    assert changed["weights_version"] == before + 1


def test_a_wrong_folder_is_refused_and_changes_nothing(swapping: Server, folders: Path) -> None:
    before, refusals = version(swapping), swapping.metric("srm_weight_swaps_total", "refused")
    wrong = folders / "wrong"
    config = json.loads((folders / "first" / "config.json").read_text()) | {"num_layers": 3}
    for name, content, message in (
        ("config.json", json.dumps(config), "num_layers = 3 "),
        ("config.json", "{", "config.json"),
        ("model.safetensors", "\0" * 100, "model.safetensors"),
        ("chat_template.jinja", CHAT_TEMPLATE + "!", "chat template is not"),
        ("tokenizer.json", "{}", "tokenizer.json is not"),
    ):
        shutil.copytree(folders / "first", wrong)
        (wrong / name).write_text(content)
        assert message in refused(swapping, 400, path=str(wrong))["message"]
        shutil.rmtree(wrong)
    assert swapping.metric("srm_weight_swaps_total", "refused") == refusals + 3
    assert refused(swapping, 404, path="nowhere")["param"] == "path"
    assert refused(swapping, 400, path="second", pause=True)["param"] == "pause"
    for message, body in (
        ("weights_dir", {"path": "../../etc"}),
        ("weights_dir", {"path": "/etc"}),
        ("path is required", {}),
        ("running", {"path": "second", "running": "stop"}),
    ):
        assert message in refused(swapping, 400, **body)["message"]
    assert version(swapping) == before
    shutil.copytree(folders / "first", wrong)
    for name in ("tokenizer.json", "chat_template.jinja"):  # without them it is as good as any
        (wrong / name).unlink()
    swap(swapping, wrong)
    shutil.rmtree(wrong)


def test_the_commands_change_weights_and_take_a_snapshot(
    swapping: Server,
    folders: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SRM_API_KEYS", raising=False)
    before = version(swapping)
    flags = (f"--url={swapping.admin_url}", "--running=continue")
    assert srm.main(["weights", str(folders / "second"), *flags]) == 0
    assert json.loads(capsys.readouterr().out)["weights_version"] == before + 1
    assert srm.main(["weights", str(folders / "nowhere"), *flags]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "404" in said.err and "nowhere" in said.err
    assert srm.main(["weights"]) == 2
    assert srm.main(["snapshot", "--url=http://127.0.0.1:1"]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert srm.main(["snapshot", "--url=127.0.0.1:1"]) == 2
    taken = swapping.admin.post("/v1/admin/snapshot").json()
    assert (taken["path"], taken["requests"], taken["sequences"]) == (None, 0, 0)
    capsys.readouterr()
    assert srm.main(["snapshot", f"--url={swapping.admin_url}/"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == taken.keys()


def test_a_crashed_engine_comes_back_with_the_weights_in_use(
    swapping: Server, folders: Path
) -> None:
    done = swap(swapping, folders / "second")
    text = complete(swapping, prompt=HEADER, **GREEDY)["choices"]
    for _ in range(2):
        killed = children(swapping)["engine"]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: children(swapping).get("engine", killed) != killed)  # noqa: B023
        wait_until(lambda: is_ready(swapping))
        again = complete(swapping, prompt=HEADER, **GREEDY)
        assert again["choices"] == text
        assert again["weights_version"] == done["weights_version"]
        assert again["system_fingerprint"] == done["fingerprint"]


def test_without_the_folder_in_use_a_crash_ends_the_server(
    text_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "gone"
    shutil.copytree(text_model, folder)
    (folder / "seed").write_text("1")
    with Server(text_model, *SERVER_FLAGS, f"--admin-port={free_port()}") as running:
        assert swap(running, folder)["weights_version"] == 2
        shutil.rmtree(folder)
        os.kill(children(running)["engine"], signal.SIGKILL)
        assert running.wait() == 3
        said = "".join(running.lines)
    assert "weights version 2" in said and str(folder) in said


def test_the_state_is_that_of_replies(swapping: Server) -> None:
    for _ in tries():  # it is a second old at most
        reply, found = complete(swapping, max_tokens=1), state(swapping)
        if reply["weights_version"] == found["weights_version"]:
            break
    assert (found["state"], found["num_slots"]) == ("ready", NUM_SLOTS)
    assert found["fingerprint"] == reply["system_fingerprint"]


def test_without_keys_the_public_port_changes_nothing(
    swapping: Server, server: Server, folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Behind a proxy on this machine, whoever asks seems to be on this machine."""
    before = version(swapping)
    assert version(server) == 1
    assert swapping.http.post(WEIGHTS, json={"path": str(folders / "second")}).status_code == 404
    assert server.http.post("/v1/admin/snapshot").status_code == 403
    assert version(swapping) == before
    assert srm.main(["weights", str(folders / "second"), f"--url={server.url}"]) == 1
    assert "--admin-port" in capsys.readouterr().err
