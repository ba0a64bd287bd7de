"""States and trees of other engines beside ours: what is asked, read and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from research.bench.peers import states, trees
from research.bench.peers.programs.timing import measure_tree
from research.bench.peers.states import Keeper, fed
from srm.errors import ConfigError


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        ({"usage": {"prompt_tokens": 20, "prompt_tokens_details": {"cached_tokens": 16}}}, 4),
        ({"usage": {"prompt_tokens": 20, "prompt_tokens_details": {"cached_tokens": None}}}, 20),
        ({"usage": {"prompt_tokens": 20, "prompt_tokens_details": None}}, 20),
        ({"usage": {"prompt_tokens": 20}, "timings": {"prompt_n": 9, "cache_n": 11}}, 9),
    ],
)
def test_fed_tokens_are_those_that_were_in_no_cache(answer: dict[str, Any], tokens: int) -> None:
    assert fed(answer) == tokens


class Asked:
    """What a keeper asked of a server that answers all alike."""

    def __init__(self, kind: str, folder: Path, status: int = 200) -> None:
        self.status = status
        self.requests: list[tuple[str, str, Any]] = []
        transport = httpx.MockTransport(self._answer)
        http = httpx.Client(base_url="http://server", transport=transport)
        self.keeper = Keeper(kind, http, folder, [5, 6])

    def _answer(self, request: httpx.Request) -> httpx.Response:
        is_json = request.headers.get("content-type") == "application/json"
        body = json.loads(request.content) if is_json else request.content
        self.requests.append((request.method, str(request.url.raw_path, "ascii"), body))
        return httpx.Response(self.status, json={"id": "state_1"})

    def body(self, turn: list[int], is_new: bool = False) -> dict[str, Any]:
        """The body of the completion that is asked for."""
        self.keeper.ask(turn, is_new)
        method, path, body = self.requests.pop()
        assert (method, path) == ("POST", "/v1/completions")
        assert (body.pop("max_tokens"), body.pop("temperature")) == (1, 0)
        return dict(body)


def test_a_state_goes_as_a_file_from_server_to_server(tmp_path: Path) -> None:
    asked, other = Asked("srm", tmp_path), Asked("srm", tmp_path)
    asked.keeper.read()
    file = b'{"id":"state_1"}'
    assert asked.keeper.save() == len(file)
    assert asked.requests == [
        ("POST", "/v1/states", {"prompt": [5, 6]}),
        ("GET", "/v1/states/state_1/content", b""),
    ]
    assert asked.body([7]) == {"prompt": [7], "state": "state_1"}
    assert asked.body([])["prompt"] == "", "a list of no ids is refused"
    other.keeper.restore()
    other.keeper.restore()
    (_, first, body), (method, second, _) = other.requests
    assert (method, body) == ("PUT", file)
    assert first != second, "the same again would change nothing"
    assert second == f"/v1/states/{other.body([7])['state']}/content"
    salts = {other.body([7], is_new=True)["cache_salt"] for _ in range(2)}
    assert len(salts) == 2 and "state" not in other.body([7], is_new=True)


def test_a_slot_is_a_file_that_the_server_writes_and_reads(tmp_path: Path) -> None:
    asked = Asked("mamba2", tmp_path)
    (tmp_path / "kept").write_bytes(b"12345")
    assert asked.keeper.save() == 5
    asked.keeper.restore()
    actions = ("/slots/0?action=save", "/slots/0?action=restore")
    assert asked.requests == [("POST", action, {"filename": "kept"}) for action in actions]
    assert asked.body([7]) == {"prompt": [5, 6, 7]}
    assert asked.body([7], is_new=True) == {"prompt": [5, 6, 7], "cache_prompt": False}


def test_an_answer_that_is_an_error_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"POST /v1/completions: 400: .*state_1"):
        Asked("llama", tmp_path, 400).keeper.read()


PEER = {"version": "1.0", "dtype": "float32", "flops_per_token": 5 * 10**7}


def test_states_become_a_table() -> None:
    seconds = {
        "save": [0.002],
        "again": [0.1],
        "restore": [0.003],
        "alive": [0.01],
        "all": [4.0, 5.0, 9.0],
    }
    tokens = {"alive": [8], "resumed": [8, 9, 9], "again": [1], "all": [20_008] * 3}
    ours: dict[str, Any] = PEER | {"engine": "ours", "model": "srm-512", "state_bytes": 2**14}
    ours |= {"file_bytes": 96_000, "seconds": seconds | {"resumed": [0.1, 0.2, 0.3]}, "same": 2}
    ours |= {"fed": tokens, "foreign_cpus": [None, 0.25]}
    few = {kind: ours["seconds"][kind] for kind in ("resumed", "all", "alive")}
    lost = ours | {"engine": "theirs", "file_bytes": 0, "seconds": few}
    lost |= {"fed": {kind: tokens[kind] for kind in few}}
    settings = {"state_tokens": 20_000, "repetitions": 3}
    text = "\n".join(states.markdown({"settings": settings, "results": [ours, lost]}))
    assert "ours, 1.0 | srm-512, float32 | 50.0 | 16,384 | 96,000 | 0.002 s | 0.003 s |" in text
    assert "| 0.2 s, 9 fed | 0.1 s, 1 fed | 5 s, 20,008 fed | 0.01 s, 8 fed | 2 of 3 |" in text
    assert "| 0 | – | – | 0.2 s, 9 fed | – |" in text and "at most 0.25 CPUs" in text


def test_trees_become_a_table() -> None:
    def line(way: str, ended: float) -> dict[str, Any]:
        return {"way": way, "tokens": 800, "began": 1.0, "ended": ended, "foreign_cpus": 0.5}

    lines = [line("tree", 2.0), line("samples", 1.5), line("tree", 3.0), line("samples", 2.0)]
    peer = PEER | {"engine": "ours", "model": "srm-512", "timed": lines}
    settings = {"depth": 2, "node_tokens": 8, "prompt_tokens": 32, "repetitions": 2}
    text = "\n".join(trees.markdown({"settings": settings, "results": [peer]}))
    assert "A tree of 6 nodes of 8 tokens" in text
    assert "| ours, 1.0 | srm-512, float32 | tree | 600 | 75 | 1.00 |" in text
    assert "| samples | 1,200 | 150 | 0.50 |" in text and "at most 0.50 CPUs" in text


def test_a_tree_takes_turns_with_samples(capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def sample(count: int, tokens: int) -> int:
        asked.append((count, tokens))
        return count * tokens

    task = {"depth": 3, "node_tokens": 8, "concurrency": [64], "repetitions": 2}
    measure_tree(task, lambda: 112, sample)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    node, path = "samples of a node", "samples of a path"
    assert [line["way"] for line in lines] == ["tree", node, path, node, path, "tree"]
    assert [line["tokens"] for line in lines] == [112, 112, 96, 112, 96, 112]
    assert asked == [(64, 8), (14, 8), (4, 24), (14, 8), (4, 24)]
