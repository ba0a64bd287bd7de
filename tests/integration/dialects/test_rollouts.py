"""vLLM's and SGLang's native routes, as trainers and routers call them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.kit.processes.held_engine import held, release
from tests.kit.serving import (
    COMPLETIONS,
    SERVER_FLAGS,
    Server,
    children,
    complete,
    error_of,
    free_port,
    is_ready,
    wait_until,
)

TOKENS, GENERATE = "/inference/v1/generate", "/generate"
IDS = [9, 21, 33, 14]
LONG_CHOICE = {"max_tokens": 100, "structured_outputs": {"choice": ["a choice of many tokens"]}}
KEY = {"Authorization": "Bearer the-key-of-the-operator"}


@pytest.fixture(scope="module")
def trained(folders: Path) -> Iterator[Server]:
    """Has two API processes, so that a request and its end come to different ones."""
    flags = (*SERVER_FLAGS, f"--weights-dir={folders}", f"--data-dir={folders / 'data'}",
             f"--admin-port={free_port()}", "--api-processes=2")  # fmt: skip
    with Server(folders / "0", *flags, engine_module="tests.kit.processes.held_engine") as running:
        yield running


def ask(server: Server, path: str, **body: Any) -> Any:
    reply = server.admin.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def tell(server: Server, path: str, **body: Any) -> Any:
    """A fresh connection each, so that any of the API processes answers."""
    reply = httpx.post(f"{server.admin_url}{path}", json=body or None, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()


def names(server: Server) -> set[str]:
    """What each route calls the weights in use, a connection each, so that all processes answer."""
    replies = [
        httpx.get(f"{server.url}{path}", timeout=120).json()
        for path in ("/get_weight_version", "/server_info", "/model_info")
        for _ in range(4)
    ]
    return {reply["weight_version"] for reply in replies}


@contextmanager
def running(server: Server, path: str, count: int = 1, **body: Any) -> Iterator[Future[Any]]:
    """A request that has sampled a few tokens and stands still until the block is left."""
    folder = server.folder
    with ThreadPoolExecutor() as pool:
        with held(folder, steps=9):
            asked = pool.submit(ask, server, path, **body)
            wait_until(lambda: server.metric("srm_engine_running_sequences") == count)
            yield asked
        asked.result()


def test_token_ids_in_and_out(trained: Server) -> None:
    params = {"max_tokens": 5, "logprobs": 1, "temperature": 0, "stop_token_ids": [],
              "skip_special_tokens": False, "ignore_eos": True, "n": 2}  # fmt: skip
    reply = ask(trained, TOKENS, token_ids=IDS, sampling_params=params, cache_salt="7")
    plain = complete(trained, prompt=IDS, return_token_ids=True, logprobs=1, max_tokens=5,
                     temperature=0, ignore_eos=True)["choices"][0]  # fmt: skip
    assert reply["request_id"].startswith("gen-") and len(reply["choices"]) == 2
    for index, choice in enumerate(reply["choices"]):
        assert (choice["index"], choice["finish_reason"]) == (index, "length")
        assert choice["token_ids"] == plain["token_ids"]
        content = choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [
            f"token_id:{id}" for id in choice["token_ids"]
        ]
        assert [entry["token_id"] for entry in content] == choice["token_ids"]
        assert [entry["logprob"] for entry in content] == plain["logprobs"]["token_logprobs"]
        assert [len(entry["top_logprobs"]) for entry in content] == [1] * 5
        whole = {"version": reply["weights_version"], "start": 0, "end": 5}
        assert choice["weight_versions"] == [whole]


def events_of(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    text = server.admin.post(path, json={"stream": True, **body}).text
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("stop", [[], ["no such text"]])
def test_token_ids_as_a_stream(trained: Server, stop: list[str]) -> None:
    params = {"max_tokens": 6, "logprobs": 0, "seed": 3, "ignore_eos": True, "stop": stop}
    whole = ask(trained, TOKENS, token_ids=IDS, sampling_params=params)["choices"][0]
    events = events_of(trained, TOKENS, token_ids=IDS, sampling_params=params)
    choices = [choice for event in events for choice in event["choices"]]
    assert [id for choice in choices for id in choice["token_ids"]] == whole["token_ids"]
    scores = [score for choice in choices for score in choice["logprobs"]["content"]]
    assert scores == whole["logprobs"]["content"]
    assert choices[-1]["finish_reason"] == "length"
    assert choices[-1]["weight_versions"][-1]["end"] == 6


def test_generate_in_sglangs_form(trained: Server) -> None:
    params = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True, "no_stop_trim": True,
              "spaces_between_special_tokens": False}  # fmt: skip
    reply = ask(trained, GENERATE, input_ids=IDS, sampling_params=params, return_logprob=True,
                top_logprobs_num=2, rid="r-1")  # fmt: skip
    plain = complete(trained, prompt=IDS, return_token_ids=True, logprobs=2, max_tokens=5,
                     temperature=0, ignore_eos=True)["choices"][0]  # fmt: skip
    meta = reply["meta_info"]
    assert (reply["text"], reply["output_ids"]) == (plain["text"], plain["token_ids"])
    assert meta["id"] == "r-1" and meta["finish_reason"] == {"type": "length", "length": 5}
    scores = plain["logprobs"]["token_logprobs"]
    triples = [[p, id, None] for p, id in zip(scores, plain["token_ids"], strict=True)]
    assert meta["output_token_logprobs"] == triples
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 5
    assert [top[0] for top in meta["output_top_logprobs"]] == triples, "greedy"
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (4, 5)
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 5}]
    batch = ask(trained, GENERATE, input_ids=[IDS, IDS[:2]], sampling_params=params | {"n": 2})
    assert [item["index"] for item in batch] == [0, 1, 2, 3]
    assert [item["meta_info"]["prompt_tokens"] for item in batch] == [4, 4, 2, 2]
    assert batch[0]["output_ids"] == reply["output_ids"]
    assert len(ask(trained, GENERATE, text=["the cat"], sampling_params=params)) == 1
    sampled = {"max_new_tokens": 6, "sampling_seed": 3, "ignore_eos": True}
    asked: dict[str, Any] = {"text": "the cat", "sampling_params": sampled, "return_logprob": True}
    whole = ask(trained, GENERATE, **asked)
    events = events_of(trained, GENERATE, **asked)
    last = events[-1]
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    assert last["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"]
    for before, after in pairwise(events):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None


def test_prompts_are_scored_in_both_forms(trained: Server) -> None:
    ids = [*IDS, 50, 51, 52]
    plain = complete(trained, prompt=ids, max_tokens=0, prompt_logprobs=2)["choices"][0]
    rest = [entry[str(id)] for entry, id in zip(plain["prompt_logprobs"][1:], ids[1:], strict=True)]
    for start, longest in ((0, 0), (4, 0), (4, 2), (6, 2)):
        body = {"input_ids": ids, "logprob_start_len": start, "return_logprob": True}
        body |= {"top_logprobs_num": 2, "sampling_params": {"max_new_tokens": longest}}
        meta = ask(trained, GENERATE, **body)["meta_info"]
        scored = zip(rest[start:], ids[start + 1 :], strict=True)
        expected = [[None, ids[start], None], *([e["logprob"], id, None] for e, id in scored)]
        assert meta["input_token_logprobs"] == expected
        none, *tops = meta["input_top_logprobs"]
        assert none is None and [len(top) for top in tops] == [2] * (len(expected) - 1)
    meta = ask(trained, GENERATE, **body | {"logprob_start_len": -1})["meta_info"]
    assert "input_token_logprobs" not in meta
    params = {"max_tokens": 1, "prompt_logprobs": 2, "prompt_logprobs_start": -2}
    reply = ask(trained, TOKENS, token_ids=ids, sampling_params=params)
    assert reply["prompt_logprobs"] == [None] * 5 + plain["prompt_logprobs"][5:]


def test_named_tokens_are_scored_in_both_forms(trained: Server) -> None:
    ids, named = [*IDS, 50], [7, 280, 5]
    params = {"max_tokens": 4, "seed": 3, "ignore_eos": True, "temperature": 0.7}
    reply = ask(trained, TOKENS, token_ids=ids,
                sampling_params=params | {"logprob_token_ids": named})["choices"][0]  # fmt: skip
    content = reply["logprobs"]["content"]
    assert [[top["token_id"] for top in entry["top_logprobs"]] for entry in content] == [named] * 4
    params |= {"max_new_tokens": params.pop("max_tokens")}
    body = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
    body |= {"token_ids_logprob": named}
    meta = ask(trained, GENERATE, **body)["meta_info"]
    assert meta["output_token_ids_logprobs"] == [
        [[top["logprob"], top["token_id"], None] for top in entry["top_logprobs"]]
        for entry in content
    ]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["token_ids"]
    assert not {"output_top_logprobs", "input_token_ids_logprobs"} & meta.keys()
    streamed = events_of(trained, GENERATE, **body)[-1]["meta_info"]
    assert streamed["output_token_ids_logprobs"] == meta["output_token_ids_logprobs"]
    meta = ask(trained, GENERATE, **body, logprob_start_len=1)["meta_info"]
    none, *scores = meta["input_token_ids_logprobs"]
    scored = complete(trained, prompt=ids, max_tokens=0, prompt_logprobs=0,
                      prompt_logprob_token_ids=named)["choices"][0]["prompt_logprobs"]  # fmt: skip
    assert none is None and "input_top_logprobs" not in meta
    assert scores == [
        [[entry[str(id)]["logprob"], id, None] for id in named] for entry in scored[2:]
    ]
    body["sampling_params"] = {"max_new_tokens": 0}
    alone = ask(trained, GENERATE, **body, logprob_start_len=1)["meta_info"]
    assert alone["input_token_ids_logprobs"] == meta["input_token_ids_logprobs"]
    assert alone["output_token_ids_logprobs"] == []


def test_a_stop_string_remains_if_it_is_not_trimmed(trained: Server) -> None:
    params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    whole = ask(trained, GENERATE, text="the cat", sampling_params=params)["text"]
    stop = next(character for character in whole[1:] if " " <= character <= "~")
    end = whole.index(stop)
    for keeps, text in ((False, whole[:end]), (True, whole[: end + len(stop)])):
        more = params | {"stop": stop, "no_stop_trim": keeps}
        assert ask(trained, GENERATE, text="the cat", sampling_params=more)["text"] == text


def test_a_pause_keeps_what_runs_where_it_is(trained: Server) -> None:
    greedy: dict[str, Any] = {"prompt": IDS, "max_tokens": 100, "ignore_eos": True}
    greedy["temperature"] = 0
    expected = complete(trained, **greedy)["choices"][0]["text"]
    for pause, resume in (("/pause?mode=keep&clear_cache=false", "/resume"),
                          ("/pause_generation", "/continue_generation")):  # fmt: skip
        with running(trained, COMPLETIONS, **greedy) as asked:
            for _ in range(2):  # a second one changes nothing
                tell(trained, pause)
            assert trained.admin.get("/is_paused").json() == {"is_paused": True}
            release(trained.folder)
            steps = trained.metric("srm_engine_steps_total")
            other = ThreadPoolExecutor(1).submit(complete, trained, max_tokens=1)
            wait_until(lambda: trained.metric("srm_engine_waiting_sequences") == 1)
            assert trained.metric("srm_engine_steps_total") == steps
            assert httpx.get(f"{trained.url}/ready").status_code == 200
            assert not asked.done() and not other.done()
            for _ in range(2):  # nor does one without a pause
                tell(trained, resume)
            assert asked.result()["choices"][0]["text"] == expected
            assert "text" in other.result()["choices"][0]
        wait_until(lambda: not trained.admin.get("/is_paused").json()["is_paused"])


@pytest.mark.parametrize("query", ["mode=wait", "wait_for_inflight_requests=true"])
def test_a_pause_may_wait_for_what_runs(trained: Server, query: str) -> None:
    body: dict[str, Any] = {"prompt": IDS, "max_tokens": 30, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        with running(trained, COMPLETIONS, **body) as asked:
            paused = pool.submit(tell, trained, f"/pause?{query}")
            wait_until(lambda: trained.admin.get("/is_paused").json()["is_paused"])
            later = pool.submit(complete, trained, max_tokens=1)
            wait_until(lambda: trained.metric("srm_engine_waiting_sequences") == 1)
            assert not paused.done() and not asked.done()
        assert asked.result()["usage"]["completion_tokens"] == 30
        assert paused.result() == {"status": "paused"}
        assert not later.done() and trained.metric("srm_engine_waiting_sequences") == 1
        tell(trained, "/resume")
        assert later.result()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("path", ["/resume", "/continue_generation"])
def test_a_resume_counts_though_its_client_leaves(trained: Server, path: str) -> None:
    tell(trained, "/pause")
    address = urlsplit(trained.admin_url)
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    wait_until(lambda: not trained.admin.get("/is_paused").json()["is_paused"])


def test_a_resume_ends_a_pause_that_still_waits(trained: Server) -> None:
    with ThreadPoolExecutor() as pool, running(trained, COMPLETIONS, prompt=IDS, max_tokens=30):
        paused = pool.submit(httpx.post, f"{trained.admin_url}/pause?mode=wait", timeout=120)
        wait_until(lambda: trained.admin.get("/is_paused").json()["is_paused"])
        tell(trained, "/resume")
        assert "it was resumed before" in error_of(paused.result(), 503)["message"]
    assert complete(trained, max_tokens=1)["choices"]


SPELLINGS: dict[str, Any] = {
    "regex": "(yes|no)",
    "ebnf": 'root ::= "yes" | "no"',
    "json_schema": json.dumps({"enum": ["yes", "no"]}),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_sglangs_constraints_are_held_at_every_route(trained: Server, name: str) -> None:
    given, allowed = {name: SPELLINGS[name]}, {"yes", "no", '"yes"', '"no"'}
    params = {"max_new_tokens": 20, "n": 4, **given}
    made = ask(trained, GENERATE, text="the cat", sampling_params=params)
    assert {choice["text"] for choice in made} <= allowed
    made = complete(trained, max_tokens=20, n=4, **given)["choices"]
    assert {choice["text"] for choice in made} <= allowed
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 20}
    made = ask(trained, "/v1/chat/completions", **body, **given)["choices"]
    assert {choice["message"]["content"] for choice in made} <= allowed
    rendered = ask(trained, "/v1/chat/completions/render", **body, **given)
    made = ask(trained, TOKENS, token_ids=rendered["token_ids"],
               sampling_params=rendered["sampling_params"])  # fmt: skip
    (choice,) = made["choices"]
    text = trained.http.post("/detokenize", json={"tokens": choice["token_ids"]}).json()["prompt"]
    assert text.removesuffix("<|end_of_text|>") in allowed


def test_prompts_are_scored_from_their_beginning(trained: Server) -> None:
    for start in (-1, 0):  # as SGLang's clients send it, without return_logprob
        made = ask(trained, GENERATE, input_ids=IDS, logprob_start_len=start)
        assert "input_token_logprobs" not in made["meta_info"]
    for ids in (IDS, IDS[:1]):
        made = ask(trained, GENERATE, input_ids=ids, logprob_start_len=0, return_logprob=True)
        scored = made["meta_info"]["input_token_logprobs"]
        assert [id for _, id, _ in scored] == ids and scored[0][0] is None


def test_weights_change_between_pause_and_resume(trained: Server, folders: Path) -> None:
    """In slime's order, then in prime-rl's, each folder deleted at once."""
    for at, seed in enumerate((1, 0)):
        folder = Path(shutil.copytree(folders / str(seed), folders / f"step-{at}"))
        params = {"max_tokens": 100, "ignore_eos": True}
        body: dict[str, Any] = {"token_ids": IDS, "sampling_params": params}
        with running(trained, TOKENS, **body) as asked:
            if at:
                tell(trained, "/pause?mode=keep&clear_cache=false")
                tell(trained, "/update_weights", weight_dir=str(folder))
            else:
                tell(trained, "/pause_generation", mode="in_place")
                assert httpx.get(f"{trained.admin_url}/flush_cache").json()["success"] is True
                done = tell(trained, "/update_weights_from_disk", model_path=str(folder),
                            weight_version="policy-7")  # fmt: skip
                assert (done["success"], done["num_paused_requests"]) == (True, 1)
                assert names(trained) == {"policy-7"}, "at once, whichever process made the change"
            shutil.rmtree(folder)
            tell(trained, "/continue_generation")
        spans = asked.result()["choices"][0]["weight_versions"]
        assert len(spans) == 2 and spans[0]["version"] + 1 == spans[1]["version"]
        assert spans[0]["end"] == spans[1]["start"] and spans[1]["end"] == 100
        sampled = ask(trained, GENERATE, input_ids=IDS)["meta_info"]["weight_version"]
        assert sampled == (str(spans[1]["version"]) if at else "policy-7")


def test_what_was_retracted_is_of_the_new_weights(trained: Server, folders: Path) -> None:
    params: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "temperature": 0, "n": 2}
    in_use = complete(trained, max_tokens=1)["system_fingerprint"]
    folder = folders / ("1" if in_use == "tiny-0" else "0")
    with running(trained, TOKENS, count=2, token_ids=IDS, sampling_params=params) as asked:
        tell(trained, "/pause_generation", mode="retract")
        tell(trained, "/update_weights_from_disk", model_path=str(folder))
        tell(trained, "/continue_generation")
    for choice in asked.result()["choices"]:
        before, after = choice["weight_versions"]
        begin, tokens = after["start"], choice["token_ids"]
        assert (before["end"], after["end"]) == (begin, 100)
        more = params | {"max_tokens": 100 - begin, "n": 1}
        ids = IDS + tokens[:begin]
        again = ask(trained, TOKENS, token_ids=ids, sampling_params=more)["choices"][0]
        assert again["token_ids"] == tokens[begin:]


def test_only_a_change_that_is_made_ends_requests(trained: Server, folders: Path) -> None:
    params = {"max_tokens": 100, "ignore_eos": True}
    with running(trained, TOKENS, token_ids=IDS, sampling_params=params) as asked:
        change = {"model_path": str(folders / "1"), "abort_all_requests": True}
        body = change | {"model_path": "/nowhere"}
        error_of(trained.admin.post("/update_weights_from_disk", json=body))
        assert trained.metric("srm_engine_running_sequences") == 1
        tell(trained, "/update_weights_from_disk", **change)
        (choice,) = asked.result()["choices"]
        count = len(choice["token_ids"])
        (span,) = choice["weight_versions"]
    assert choice["finish_reason"] == "abort" and 0 < count < 100
    assert (span["start"], span["end"]) == (0, count)
    assert complete(trained, max_tokens=1)["weights_version"] == span["version"] + 1


def step_of(dialect: str, folder: Path, server: Server) -> list[int]:
    """One step of a trainer: statuses of pausing, changing weights and resuming."""
    asked: dict[str, dict[str, str]] = {"/pause": {}}
    asked |= {"/update_weights": {"weight_dir": str(folder)}, "/resume": {}}
    if dialect == "sglang":
        asked = {"/pause_generation": {"mode": "in_place"}}
        asked |= {"/update_weights_from_disk": {"model_path": str(folder)}}
        asked |= {"/continue_generation": {}}
    url = server.admin_url
    replies = [httpx.post(f"{url}{path}", json=asked[path], timeout=120) for path in asked]
    for reply in replies:
        if reply.status_code != 200:
            assert error_of(reply, 409)["code"] == "swap_in_progress"
    return [reply.status_code for reply in replies]


def test_two_trainers_at_once(trained: Server, folders: Path) -> None:
    before = complete(trained, max_tokens=1)["weights_version"]
    params = {"max_tokens": 100, "ignore_eos": True, "n": 40}
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, trained, TOKENS, token_ids=IDS, sampling_params=params)
        steps = [
            pool.submit(step_of, dialect, folders / str(seed), trained)
            for _ in range(6)
            for seed, dialect in enumerate(("vllm", "sglang"))
        ]
        statuses = [step.result() for step in steps]
        choices = asked.result()["choices"]
    assert {(first, last) for first, _, last in statuses} == {(200, 200)}
    changes = sum(status == 200 for _, status, _ in statuses)
    assert changes > 0
    assert trained.admin.get("/is_paused").json() == {"is_paused": False}
    reply = complete(trained, max_tokens=1)
    assert reply["weights_version"] == before + changes
    for choice in choices:
        spans = [span["version"] for span in choice["weight_versions"]]
        assert spans == sorted(set(spans)) and len(choice["token_ids"]) == 100


def test_refuses_a_change_that_waits_for_a_pause(trained: Server, folders: Path) -> None:
    with running(trained, COMPLETIONS, prompt=IDS, max_tokens=100, ignore_eos=True):
        tell(trained, "/pause")
        body = {"path": str(folders / "0"), "running": "finish"}
        error = error_of(trained.admin.post("/v1/admin/weights", json=body))
        assert error["param"] == "running" and "paused" in error["message"]
        tell(trained, "/resume")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "logprobs"), [([], 0), ([], 1), (["no such text"], 0)])
def test_aborts_keep_tokens(trained: Server, stop: list[str], logprobs: int, stream: bool) -> None:
    params = {"max_tokens": 100, "ignore_eos": True, "seed": 1, "stop": stop, "n": 3,
              "logprobs": logprobs}  # fmt: skip
    whole = ask(trained, TOKENS, token_ids=IDS, sampling_params=params)["choices"]
    with held(trained.folder, steps=9), ThreadPoolExecutor() as pool:
        body = {"token_ids": IDS, "sampling_params": params, "request_id": "mine", "stream": stream}
        mine = pool.submit(trained.http.post, TOKENS, json=body)
        wait_until(lambda: trained.metric("srm_engine_running_sequences") == 3)
        for ids in ([], ["unknown"]):
            assert tell(trained, "/abort_requests", request_ids=ids) == {"aborted": 0}
        assert tell(trained, "/abort_request", rid="mine")["message"] == "ended 1 requests"
        reply = mine.result()  # though the engine makes no step
        assert tell(trained, "/abort_request", rid="mine")["message"] == "ended 0 requests"
    if stream:
        choices: list[dict[str, Any]] = [{"token_ids": [], "content": []} for _ in range(3)]
        for line in reply.text.splitlines():
            for part in json.loads(line[6:])["choices"] if line.startswith("data: {") else []:
                choice = choices[part["index"]]
                choice["token_ids"] += part["token_ids"]
                choice["content"] += part["logprobs"]["content"]
                choice["finish_reason"] = part["finish_reason"]
    else:
        choices = [choice | choice["logprobs"] for choice in reply.json()["choices"]]
    for choice, full in zip(choices, whole, strict=True):
        count = len(choice["token_ids"])
        assert choice["finish_reason"] == "abort" and 0 < count < 100
        assert choice["token_ids"] == full["token_ids"][:count]
        assert choice["content"] == full["logprobs"]["content"][:count]


def test_an_abort_of_one_that_may_end_early_keeps_its_tokens(trained: Server) -> None:
    body = {"prompt": IDS, "max_tokens": 100, "ignore_eos": True, "n": 3,
            "return_token_ids": True, "until": {"match": "(?s).*", "count": 3}}  # fmt: skip
    with running(trained, COMPLETIONS, count=3, **body) as asked:
        tell(trained, "/abort_request", abort_all=True)
        choices = asked.result()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["abort"] * 3
    assert all(choice["token_ids"] for choice in choices)


def test_a_state_that_is_aborted_is_none(trained: Server) -> None:
    with ThreadPoolExecutor() as pool:
        tell(trained, "/pause")
        asked = pool.submit(trained.http.post, "/v1/states", json={"prompt": IDS})
        wait_until(lambda: trained.metric("srm_engine_waiting_sequences") == 1)
        assert tell(trained, "/abort_requests") == {"aborted": 1}
        assert "the state was not made" in error_of(asked.result(), 503)["message"]
        tell(trained, "/resume")
    assert trained.get("/v1/states").json()["data"] == []


def test_all_are_aborted_with_what_waits(trained: Server) -> None:
    body = {"prompt": IDS, "max_tokens": 100, "ignore_eos": True, "n": 200,
            "return_token_ids": True}  # fmt: skip
    with running(trained, COMPLETIONS, count=64, **body) as asked:
        assert tell(trained, "/abort_requests") == {"aborted": 1}
        choices = asked.result()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["abort"] * 200
    assert sum(bool(choice["token_ids"]) for choice in choices) == 64


def test_who_pauses_and_dies_leaves_no_pause(folders: Path) -> None:
    flags = (*SERVER_FLAGS, f"--data-dir={folders / 'lease'}", f"--admin-port={free_port()}",
             "--pause-lease-s=0.5")  # fmt: skip
    with Server(folders / "0", *flags) as server:
        tell(server, "/pause")
        assert complete(server, max_tokens=2)["choices"]
        assert not server.admin.get("/is_paused").json()["is_paused"]
        assert any("nobody has resumed" in line for line in server.lines)


def test_a_restarted_engine_is_paused_and_has_its_weights(trained: Server, folders: Path) -> None:
    change = {"model_path": str(folders / "1"), "weight_version": "policy-8"}
    tell(trained, "/pause?mode=keep")
    tell(trained, "/update_weights_from_disk", **change)
    for _ in range(2):
        killed = children(trained)["engine"]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: children(trained).get("engine", killed) != killed)  # noqa: B023
        wait_until(lambda: is_ready(trained))
        assert trained.admin.get("/is_paused").json() == {"is_paused": True}
        assert trained.admin.get("/get_weight_version").json() == {"weight_version": "policy-8"}
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, trained, GENERATE, input_ids=IDS)
        wait_until(lambda: trained.metric("srm_engine_waiting_sequences") == 1)
        assert not asked.done()
        tell(trained, "/continue_generation")
        assert asked.result()["meta_info"]["weight_version"] == "policy-8"


def test_a_stop_lets_what_is_paused_end(folders: Path) -> None:
    flags = (*SERVER_FLAGS, f"--data-dir={folders / 'stopped'}", f"--admin-port={free_port()}",
             "--api-processes=2", "--drain-s=120")  # fmt: skip
    server = Server(folders / "0", *flags)
    tell(server, "/pause")
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(complete, server, max_tokens=5)
        wait_until(lambda: server.metric("srm_engine_waiting_sequences") == 1)
        server.process.send_signal(signal.SIGTERM)
        assert asked.result()["choices"]
    assert server.wait() == 0


def test_kept_states_are_of_one_salt(trained: Server) -> None:
    prompt = [*range(20, 60)]

    def cached(**more: Any) -> int:
        reply = complete(trained, prompt=prompt, max_tokens=1, **more)
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert (cached(cache_salt="a"), cached(cache_salt="b"), cached()) == (0, 0, 0)
    assert (cached(cache_salt="a"), cached(cache_salt="b"), cached()) == (39, 39, 39)
    assert tell(trained, "/reset_prefix_cache") == {"success": True}
    assert (cached(cache_salt="a"), cached()) == (0, 0)


def test_what_is_asked_and_changes_nothing(trained: Server) -> None:
    config = trained.http.get("/server_info?config_format=json").json()["vllm_config"]
    assert config["weight_transfer_config"] is None
    model = config["model_config"]
    assert (model["dtype"], model["logprobs_mode"]) == ("torch.float32", "processed_logprobs")
    info = trained.http.get("/get_server_info").json()
    assert (info["tp_size"], info["max_model_len"], info["enable_memory_saver"]) == (1, 128, False)
    for path in ("/model_info", "/get_model_info"):
        assert trained.http.get(path).json()["is_generation"] is True
    assert trained.http.get("/health_generate").json() == {"status": "ready"}
    loads = trained.http.get("/v1/loads?include=core").json()["loads"]
    assert loads == [{"num_running_reqs": 0, "num_waiting_reqs": 0}]


@pytest.mark.parametrize("shares", [False, True])
def test_keeps_prompts_and_names_of_keys_apart(folders: Path, shares: bool) -> None:
    keys = folders / f"{shares}.txt"
    keys.write_text("admin the-key-of-the-operator\nother the-key-of-somebody-else\n")
    other = {"Authorization": "Bearer the-key-of-somebody-else"}
    flags = (*SERVER_FLAGS, f"--data-dir={folders / keys.stem}", f"--weights-dir={folders}",
             f"--api-keys-file={keys}", "--trainer-routes",
             *("--share-prompts",) * shares)  # fmt: skip
    prompt = [*range(20, 60)]
    with Server(folders / "0", *flags, engine_module="tests.kit.processes.held_engine") as server:

        def cached(key: dict[str, str], path: str = COMPLETIONS) -> Any:
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": 1}
            if path == GENERATE:
                body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}
            reply = httpx.post(f"{server.url}{path}", headers=key, json=body, timeout=120).json()
            if path == GENERATE:
                return reply["meta_info"]["cached_tokens"]
            return reply["usage"]["prompt_tokens_details"]["cached_tokens"]

        strangers = 39 if shares else 0
        assert [cached(KEY), cached(KEY), cached(other)] == [0, 39, strangers]
        assert [cached(key, GENERATE) for key in (KEY, other)] == [39, 39]

        body = {"prompt": IDS, "max_tokens": 30, "request_id": "mine", "ignore_eos": True}
        url = f"{server.url}{COMPLETIONS}"
        with ThreadPoolExecutor() as pool, held(server.folder, steps=9):
            asked = [
                pool.submit(httpx.post, url, headers=key, json=body, timeout=120)
                for key in (KEY, other)
            ]
            wait_until(lambda: under_way(server) == 2)
            again = httpx.post(url, headers=other, json=body)
            assert error_of(again, 409)["param"] == "request_id"
            ended = {"request_ids": ["mine"]}
            reply = httpx.post(f"{server.url}/abort_requests", headers=KEY, json=ended)
            assert reply.json() == {"aborted": 1}
            assert asked[0].result().json()["choices"][0]["finish_reason"] == "abort"
            assert under_way(server) == 1
            release(server.folder)
            assert asked[1].result().json()["choices"][0]["finish_reason"] == "length"


def under_way(server: Server) -> int:
    reply = httpx.get(f"{server.url}/v1/loads", headers=KEY).json()
    (load,) = reply["loads"]
    return int(load["num_running_reqs"] + load["num_waiting_reqs"])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TOKENS, {"token_ids": IDS * 31, "sampling_params": LONG_CHOICE}, "token_ids"),
        ("/pause?mode=later", None, "mode"),
        ("/pause", {"mode": "abort"}, "mode"),
        ("/resume", {"mode": "abort"}, "mode"),
        ("/resume?tags=weights", None, "tags"),
        ("/reset_prefix_cache?reset_running_requests=true", None, "reset_running_requests"),
        ("/reset_prefix_cache", {"device": "cpu"}, "device"),
        ("/reset_prefix_cache", {"reset_running_requests": True}, "reset_running_requests"),
        ("/flush_cache?timeout=-1", None, "timeout"),
        ("/update_weights?weight_dir=x", None, "weight_dir"),
        ("/abort_requests?request_ids=x", None, "request_ids"),
        ("/abort_requests", {"request_ids": ["x"] * 4097}, "request_ids"),
        ("/pause_generation", {"mode": "wait"}, "mode"),
        ("/abort_request", {}, "rid"),
        ("/abort_request", {"rid": "a", "abort_all": True}, "rid"),
        ("/update_weights", {"update_info": {"names": []}}, "weight_dir"),
        ("/update_weights", {"weight_dir": "/nowhere"}, "weight_dir"),
        ("/update_weights_from_disk", {}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "/etc"}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "0", "load_format": "x"}, "load_format"),
    ],
)
def test_what_is_wrong_is_named(trained: Server, path: str, body: Any, param: str) -> None:
    error = error_of(trained.admin.post(path, json=body))
    assert error["param"] == param
    assert trained.admin.get("/is_paused").json() == {"is_paused": False}


def test_what_asks_for_nothing_more_is_taken(trained: Server) -> None:
    for path, body in (
        ("/reset_prefix_cache", {"reset_running_requests": False}),  # as SkyRL sends it
        ("/reset_prefix_cache?reset_running_requests=False&reset_external=false", None),
        ("/flush_cache?timeout=30", None),
        ("/resume", {}),
    ):
        reply = trained.admin.post(path, json=body)
        assert reply.status_code == 200, reply.text


def test_as_many_and_as_long_ids_are_taken_as_may_be_sent(trained: Server) -> None:
    body = {"request_ids": [f"{number:0128}" for number in range(4096)]}
    assert trained.admin.post("/abort_requests", json=body).json() == {"aborted": 0}


def test_rendered_ids_are_ids_that_are_taken(trained: Server) -> None:
    body = {"prompt": ["a"] * 11, "request_id": "x" * 128, "max_tokens": 1}
    reply = trained.http.post("/v1/completions/render", json=body)
    assert reply.status_code == 200, reply.text
    ids = [rendered["request_id"] for rendered in reply.json()]
    assert len({*ids}) == 11 and max(map(len, ids)) == 128


def test_routes_of_other_servers_say_what_does_that_here(trained: Server) -> None:
    for path, way in (
        ("/init_weight_transfer_engine", "/update_weights"),
        ("/sleep", "/pause"),
        ("/v1/load_lora_adapter", "merge"),
    ):
        assert way in error_of(trained.http.post(path, json={}), 404)["message"]
