"""Trees and beams over HTTP: their nodes are what completions sample there."""

from __future__ import annotations

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.processes.held_engine import held, hold, release
from tests.kit.serving import (
    COMPLETIONS,
    SERVER_FLAGS,
    TEXT_MODEL,
    Asked,
    Server,
    complete,
    connect,
    error_of,
    free_port,
    read_all,
    wait_until,
)

TREES = "/v1/trees"
LIKELIEST: dict[str, Any] = {"candidates": "likeliest", "branching": 6, "width": 3, "depth": 5}


def grown(server: Server, **fields: Any) -> dict[str, Any]:
    reply = server.http.post(TREES, json={"prompt": "the cat", **fields})
    assert reply.status_code == 200, reply.text
    made: dict[str, Any] = reply.json()
    return made


def paths(nodes: list[dict[str, Any]]) -> list[list[int]]:
    """All tokens from the prompt to each node."""
    made: list[list[int]] = []
    for node in nodes:
        before = [] if node["parent"] is None else made[node["parent"]]
        made.append([*before, *node["token_ids"]])
    return made


def beams_of(reply: dict[str, Any], count: int, length_penalty: float = 1) -> list[list[int]]:
    """The best leaves of a tree of likeliest tokens."""
    whole = paths(reply["nodes"])
    leaves = [
        (node["logprob"] / len(ids) ** length_penalty, ids)
        for node, ids in zip(reply["nodes"], whole, strict=True)
        if node["is_leaf"]
    ]
    return [ids for _, ids in sorted(leaves, key=lambda leaf: -leaf[0])[:count]]


def test_nodes_have_the_scores_of_their_prompts(server: Server) -> None:
    prompt = server.http.post("/tokenize", json={"prompt": "the cat"}).json()["tokens"]
    tree = {"branching": 3, "node_tokens": 4, "depth": 3, "width": 2}
    before = server.metric("srm_engine_prefill_tokens_total")
    reply = grown(server, tree=tree, seed=5, split="a", temperature=0.7)
    fed = server.metric("srm_engine_prefill_tokens_total") - before
    assert fed <= len(prompt)  # children begin where their parents ended
    nodes, computed = reply["nodes"], 0
    whole = paths(nodes)
    for node, ids in zip(nodes, whole, strict=True):
        own = node["token_ids"]
        computed += len(own)
        body = {"prompt": [[*prompt, *ids]], "max_tokens": 0, "prompt_logprobs": 0}
        scored = complete(server, **body)["choices"][0]["prompt_logprobs"][-len(own) :]
        assert len(scored) == len(own)
        assert node["ends"] in {"split", "length", "stop"}
        texts = [
            server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
            for ids in (own, own[-1:], own[:-1] or own[-1:])
        ]
        assert node["text"] == texts[0]
        assert (node["ends"] == "split") == ("a" in texts[1])
        assert len(own) == 1 or "a" not in texts[2]
    assert reply["usage"]["completion_tokens"] == computed
    assert reply["usage"]["prompt_tokens"] == len(prompt)
    assert reply["weights_version"] == 1 and reply["system_fingerprint"]
    assert grown(server, tree=tree, seed=5, split="a", temperature=0.7)["nodes"] == nodes
    assert grown(server, tree=tree, seed=6, split="a", temperature=0.7)["nodes"] != nodes
    server.wait_until_idle()


def test_a_stream_has_the_nodes_of_the_reply(server: Server) -> None:
    fields: dict[str, Any] = {"tree": {"branching": 2, "depth": 4, "node_tokens": 2}, "seed": 1}
    whole = grown(server, **fields)
    body = {"prompt": "the cat", "stream": True, **fields}
    with server.http.stream("POST", TREES, json=body) as reply:
        events = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert events.pop() == "[DONE]"
    parts = [json.loads(event) for event in events]
    assert [node for part in parts for node in part["nodes"]] == whole["nodes"]
    assert ["usage" in part for part in parts] == [False] * 4 + [True]
    assert parts[-1]["usage"] == whole["usage"]


def test_a_rule_decides_what_is_expanded(server: Server) -> None:
    tree = {"branching": 6, "node_tokens": 2, "depth": 2, "width": 2}
    rule = {"match": "[a-z]"}
    fields: dict[str, Any] = {"tree": tree, "seed": 3, "ignore_eos": True}
    nodes = grown(server, verify=rule, score="verify", **fields)["nodes"]
    first = [node for node in nodes if node["depth"] == 1]
    assert {node["score"] for node in first} == {0, 1}
    assert all(node["score"] == bool(re.search("[a-z]", node["text"])) for node in first)
    best = sorted(first, key=lambda n: (-n["score"], -n["logprob"] / len(n["token_ids"])))[:2]
    assert {n["parent"] for n in nodes if n["depth"] == 2} == {node["id"] for node in best}
    # The score is there, and log-probability decides.
    nodes = grown(server, verify=rule, **fields)["nodes"]
    best = sorted(first, key=lambda node: -node["logprob"])[:2]
    assert {n["parent"] for n in nodes if n["depth"] == 2} == {node["id"] for node in best}
    assert "score" in nodes[0]


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 3.5])
def test_beam_search_gives_the_best_of_its_tree(server: Server, length_penalty: float) -> None:
    fields: dict[str, Any] = {"n": 3, "use_beam_search": True, "logprobs": 0, "max_tokens": 5}
    fields |= {"length_penalty": length_penalty, "return_token_ids": True}
    reply = complete(server, prompt=["the cat", "a"], **fields)
    for prompt, choices in (("the cat", reply["choices"][:3]), ("a", reply["choices"][3:])):
        tree = grown(server, prompt=prompt, tree=LIKELIEST)
        assert [c["token_ids"] for c in choices] == beams_of(tree, 3, length_penalty)
    assert reply["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in reply["choices"])
    assert reply["weights_version"] == 1 and "first_weights_version" not in reply
    for choice in reply["choices"]:
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
        assert choice["finish_reason"] in {"length", "stop"}


def test_beams_end_with_the_context(server: Server) -> None:
    body = {
        "use_beam_search": True,
        "n": 2,
        "max_tokens": 10 * TEXT_MODEL.n_ctx,
        "ignore_eos": True,
    }
    choices = complete(server, return_token_ids=True, **body)["choices"]
    prompt = server.http.post("/tokenize", json={"prompt": "the cat"}).json()["count"]
    assert {len(choice["token_ids"]) for choice in choices} == {TEXT_MODEL.n_ctx - prompt + 1}


def test_samples_whose_states_are_kept_are_gone_on_from(server: Server) -> None:
    """So a caller who scores nodes itself grows a tree of completions."""
    prompt = server.http.post("/tokenize", json={"prompt": "the mat"}).json()["tokens"]
    fields: dict[str, Any] = {"max_tokens": 7, "n": 3, "ignore_eos": True, "return_token_ids": True}
    reply = complete(server, prompt=[prompt], seed=9, keep_states=True, **fields)
    longer = [[*prompt, *choice["token_ids"]] for choice in reply["choices"]]
    before = server.metric("srm_engine_prefill_tokens_total")
    rest = complete(server, prompt=longer, seed=1, **fields)
    assert server.metric("srm_engine_prefill_tokens_total") == before
    alone = [complete(server, prompt=[ids], seed=1, cache_salt="x", **fields) for ids in longer]
    assert [c["token_ids"] for c in rest["choices"]] == [
        choice["token_ids"] for reply in alone for choice in reply["choices"]
    ]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tree": {"branching": 0}}, "tree", "branching, an integer from 1 to 1024"),
        ({"tree": {"deph": 1}}, "tree", "tree.deph is not a field"),
        (
            {"tree": {"candidates": "likeliest", "branching": 99, "width": 1}},
            "tree",
            "max_logprobs",
        ),
        ({"tree": {"depth": 17}}, "tree", "more than 131072 nodes"),
        ({"tree": {"budget": 5}}, "tree", "tree.width must be given with a budget, and is missing"),
        ({"tree": LIKELIEST, "top_p": 0.5}, "top_p", "does not go with candidates = likeliest"),
        ({"tree": LIKELIEST, "seed": 0}, "seed", "seed = 0 does not go with"),
        ({"tree": LIKELIEST, "split": "a"}, "split", "does not go with"),
        ({"split": "(("}, "split", "split = '((' is not allowed"),
        ({"split": "no such"}, "split", "split is found in 0 tokens"),
        ({"score": "verify"}, "score", "score = verify needs verify"),
        ({"verify": {"mtch": "a"}}, "verify", "mtch"),
        ({"refeed": True}, "refeed", "refeed = true needs a state"),
        ({"prompt": ["a", "b"]}, "prompt", "prompt must be a string or a list of token ids"),
        ({"prompt": [1] * 999}, "prompt", "context"),
        ({"n": 2}, "n", "'n' is not a field of this request"),
        ({"temperature": -1}, "temperature", "a number from 0"),
        ({"seed": 2**64}, "seed", "seed must be"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids", "99999"),
    ],
)
def test_a_wrong_tree_is_refused(
    server: Server, fields: dict[str, Any], param: str, message: str
) -> None:
    error = error_of(server.http.post(TREES, json={"prompt": "the cat", **fields}))
    assert error["param"] == param and message in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"best_of": 4}, "best_of"),
        ({"top_p": 0.5}, "top_p"),
        ({"seed": 1}, "seed"),
        ({"stop": "a"}, "stop"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"regex": "a"}, "regex"),
        ({"logprobs": 2}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"until": {"match": "a"}}, "until"),
        ({"n": 11}, "n"),
    ],
)
def test_beams_refuse_what_they_do_not_honour(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    body = {"prompt": "the cat", "use_beam_search": True, "n": 2, **fields}
    assert error_of(server.http.post(COMPLETIONS, json=body))["param"] == param


def test_a_length_penalty_needs_beams(server: Server) -> None:
    body = {"prompt": "the cat", "length_penalty": 2}
    assert error_of(server.http.post(COMPLETIONS, json=body))["param"] == "length_penalty"


def test_a_tree_goes_on_from_a_state(server: Server) -> None:
    state = server.http.post("/v1/states", json={"prompt": "the cat"}).json()["id"]
    fields: dict[str, Any] = {"tree": {"branching": 2, "depth": 2, "node_tokens": 2}, "seed": 4}
    whole = grown(server, **fields)
    own = server.http.post(TREES, json={"state": state, **fields}).json()
    assert own["nodes"] == whole["nodes"]
    other = server.http.post(TREES, json={"state": f"state_{'0' * 32}", **fields})
    assert error_of(other, 404)["param"] == "state"


def test_a_client_that_leaves_frees_the_slots(server: Server) -> None:
    tree = {"branching": 2, "depth": 14, "node_tokens": 2}
    body = {"prompt": "the cat", "tree": tree, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", TREES, json=body) as reply:
        assert next(reply.iter_lines()).startswith("data: ")
    # The one that asks: between two rounds an engine is idle too.
    wait_until(lambda: server.metric("http_requests_in_flight") == 1)
    server.wait_until_idle()


def test_log_probabilities_are_sums(server: Server) -> None:
    nodes = grown(server, tree={"branching": 2, "depth": 3, "node_tokens": 3}, seed=2)["nodes"]
    for node in nodes:
        before = 0.0 if node["parent"] is None else nodes[node["parent"]]["logprob"]
        own = np.array(node["logprobs"], np.float32).sum(dtype=np.float64)
        assert node["logprob"] == pytest.approx(before + own, abs=1e-6)


def test_a_slow_reader_holds_no_slot_and_nobody_up(text_model: Path) -> None:
    """Its search stands still between two rounds, in which the operator can end it."""
    tree = {"branching": 1_000, "width": 4, "depth": 12, "node_tokens": 8}
    sizes = ("--num-slots=4096", "--max-step-rows=4096", "--max-step-tokens=9000")
    flags = (*sizes, f"--admin-port={free_port()}")
    body: dict[str, Any] = {"tree": tree, "seed": 1}
    with Server(text_model, *flags, engine_module="research.bench.host.instant") as server:

        def is_over() -> bool:
            """Whether it has all of its tokens, or stands still."""
            server.wait_until_idle()
            before = server.metric("srm_engine_decode_tokens_total")
            complete(server, max_tokens=9)
            return server.metric("srm_engine_decode_tokens_total") == before + 9

        slow = connect(server, TREES, **body)
        wait_until(is_over)
        assert server.metric("srm_engine_decode_tokens_total") < 45_000 * 8
        received = read_all(slow)
        assert received.count(b'"parent":') == 1_000 + 11 * 4_000
        assert received.rstrip().endswith(b"data: [DONE]\n\n\r\n0")
        ended = connect(server, TREES, **body)
        wait_until(is_over)
        assert server.admin.post("/abort_requests", json={}).json() == {"aborted": 1}
        received = read_all(ended)
        assert b"what ran was ended, and the search with it" in received
        assert received.count(b'"parent":') < 45_000
        server.wait_until_idle()


@pytest.mark.parametrize("running", ["continue", "refeed", "finish", "abort", "drop"])
def test_weights_change_under_a_search(folders: Path, running: str) -> None:
    flags = (*SERVER_FLAGS, f"--weights-dir={folders}", f"--admin-port={free_port()}")
    asked: dict[str, Any] = {"prompt": "the cat", "ignore_eos": True}
    tree = asked | {"tree": LIKELIEST}
    beams = asked | {"use_beam_search": True, "n": 3, "max_tokens": 5}
    module, made = "tests.kit.processes.held_engine", "srm_engine_steps_total"
    with Server(folders / "0", *flags, engine_module=module) as server:
        prompt = server.http.post("/tokenize", json={"prompt": "the cat"}).json()["tokens"]
        old = grown(server, **tree)["nodes"]
        for folder, path, body in (("1", TREES, tree), ("0", COMPLETIONS, beams)):
            with ThreadPoolExecutor(2) as threads, held(folders / "0"):
                other = Asked(server)  # without a slot in use no engine is held
                before = server.metric(made)
                answer = threads.submit(server.http.post, path, json=body)
                wait_until(lambda: server.metric("srm_engine_waiting_sequences"))
                hold(folders / "0", steps=5)  # the first round takes 3, and all five more than 4
                wait_until(lambda: server.metric(made) == before + 4)  # noqa: B023
                change = {"path": str(folders / folder), "running": running}
                changing = threads.submit(server.admin.post, "/v1/admin/weights", json=change)
                if running == "finish":  # it waits for what runs, and for no more
                    wait_until(lambda: server.admin.get("/v1/admin/state").json()["changing"])
                    release(folders / "0")
                assert (reply := changing.result()).is_success, reply.text
                release(folders / "0")
                other.answer()
                if running in {"abort", "drop"}:
                    assert error_of(answer.result(), 503)["message"]
                    continue
            whole = answer.result().json()
            assert whole["weights_version"] == whole["first_weights_version"] + 1
            if path == COMPLETIONS:
                continue
            nodes = whole["nodes"]
            assert nodes[:6] == old[:6] and nodes[-18:] != old[-18:]
            for node, ids in list(zip(nodes, paths(nodes), strict=True))[-18:]:
                scored = {"prompt": [[*prompt, *ids]], "max_tokens": 0, "prompt_logprobs": 0}
                entry = complete(server, **scored)["choices"][0]["prompt_logprobs"][-1]
                assert entry[str(ids[-1])]["logprob"] == node["logprobs"][0]
        server.wait_until_idle()


def test_weights_without_numbers_end_a_search(text_model: Path, tmp_path: Path) -> None:
    shutil.copytree(text_model, folder := tmp_path / "nan")
    (folder / "seed").write_text("nan")
    with Server(folder, *SERVER_FLAGS) as server:
        whole: dict[str, Any] = {"prompt": "the cat", "tree": {"depth": 3}}
        beams = {"prompt": "the cat", "n": 2, "use_beam_search": True}
        likeliest = {**whole, "tree": LIKELIEST}
        for path, body in ((TREES, whole), (TREES, likeliest), (COMPLETIONS, beams)):
            error = error_of(server.http.post(path, json=body), 500)
            assert "not finite" in error["message"]
        reply = server.http.post(TREES, json={**whole, "stream": True})
        assert "not finite" in reply.text
        server.wait_until_idle()
