"""Random programs on states of two servers, which are killed meanwhile: nothing is lost or leaked.

Create, go on, sample, save, fetch, put elsewhere, delete, let expire, change weights, kill a
process or all of them while requests are under way, in any order, of two keys:

1. Tokens and log-probabilities, and the bytes of each state, are those of an engine in this process
   that read all tokens at once and was never disturbed.
2. A state is there until it is deleted or expires, whatever was killed; a key sees its own alone.
3. What is refused is refused by the quota, or for other weights, and only then.
4. What is asked of a process that is killed is answered, or refused and then not there; only what
   was made for a reply that its process could no longer send is there, and listed.
5. Afterwards no slot is held, no byte counted, and the database as small as before.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from srm.engine.messages import Output, Request, SamplingParams
from srm.engine.state_file import ROW_BYTES
from srm.server.storage.states import StateStore
from tests.kit.engines.making import engine_of
from tests.kit.engines.numpy_runner import tiny_weights
from tests.kit.processes.run_engine import alone, run
from tests.kit.serving import (
    COMPLETIONS,
    SERVER_FLAGS,
    TEXT_MODEL,
    Server,
    free_port,
    is_ready,
    processes,
    wait_until,
    write_text_model,
)

STATES = "/v1/states"
KEYS = ("a", "b", "admin")
MAX_BYTES = 12_000
MOST_GROWN = 100 * 1024**2
WEIGHTS = [tiny_weights(seed, TEXT_MODEL) for seed in range(2)]


@cache
def undisturbed(ids: tuple[int, ...], weights: int, **params: Any) -> dict[int, Output]:
    """What an engine says that does nothing else."""
    own = SamplingParams(ignore_eos=True, logprobs=0, **params)
    return alone(Request("a", np.array(ids, "<i4").tobytes(), own), WEIGHTS[weights])


@cache
def undisturbed_state(ids: tuple[int, ...], weights: int) -> bytes:
    engine = engine_of(WEIGHTS[weights])
    own, prompt = SamplingParams(max_tokens=0), np.array(ids, "<i4").tobytes()
    engine.add(Request("a", prompt, own, returns_state=True))
    return run(engine)[0].state  # of the prompt, and then an end


@dataclass
class State:
    """What is to be known of a state."""

    ids: list[int]
    weights: int
    is_short: bool = False
    """Whether it may expire at any time."""

    @property
    def num_bytes(self) -> int:
        width = TEXT_MODEL.state_width if len(self.ids) > 1 else 0
        return 4 * len(self.ids) + 4 * width + ROW_BYTES + len("{}")


@dataclass
class Place:
    """A server, which may be started again, and the states it has of each key."""

    folders: list[Path]
    flags: tuple[str, ...]
    data: Path
    weights: int = 0
    grown_from: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        port = f"--admin-port={free_port()}"
        self.server = Server(self.folders[0], *self.flags, port, f"--data-dir={self.data}")
        self.weights = 0

    def ask(self, method: str, path: str, key: str, **how: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key * 16}"}
        return self.server.http.request(method, path, headers=headers, **how)

    def change_weights(self, weights: int) -> None:
        body = {"path": str(self.folders[weights])}
        headers = {"authorization": f"Bearer {'admin' * 16}"}
        reply = self.server.admin.post("/v1/admin/weights", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        self.weights = weights

    def kill(self, who: str) -> None:
        """A process with SIGKILL, or all of them; returns when everything is served again."""
        if who == "all":
            before = processes(self.server)
            self.server.process.kill()
            self.server.wait()
            wait_until(lambda: not any(psutil.pid_exists(pid) for _, pid in before))
            self.start()
            return
        before = sorted(processes(self.server))
        victim = next(pid for name, pid in before if name == who)
        os.kill(victim, signal.SIGKILL)
        names = [name for name, _ in before]

        def is_replaced() -> bool:
            now = processes(self.server)
            return victim not in dict(now).values() and sorted(name for name, _ in now) == names

        if who == "engine":
            wait_until(lambda: not is_ready(self.server))
        wait_until(is_replaced)
        wait_until(lambda: is_ready(self.server))

    def pages(self) -> int:
        path = self.data / "states.sqlite3"
        if not path.exists():
            return 0
        with closing(StateStore(self.data)) as store:
            store.expire()  # as the process of jobs does each minute
        with closing(sqlite3.connect(path)) as connection:
            (pages,) = connection.execute("PRAGMA page_count").fetchone()
            (used,) = connection.execute("SELECT count(*) FROM used").fetchone()
        assert used == 0, "bytes are counted of no state"
        return int(pages)

    def memory(self) -> dict[str, int]:
        """Bytes of the largest process of each kind."""
        largest: dict[str, int] = {}
        for name, pid in processes(self.server):
            with suppress(psutil.NoSuchProcess):
                held = psutil.Process(pid).memory_full_info().uss
                largest[name] = max(held, largest.get(name, 0))
        return largest


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Place]]:
    """Two servers of the same weights."""
    root = tmp_path_factory.mktemp("programs")
    write_text_model(root / "0")
    shutil.copytree(root / "0", root / "1")
    (root / "1" / "seed").write_text("1")
    (root / "keys").write_text("".join(f"{name} {name * 16}\n" for name in KEYS))
    flags = (
        *(*SERVER_FLAGS, f"--api-keys-file={root / 'keys'}", f"--max-state-bytes={MAX_BYTES}"),
        f"--weights-dir={root}",
    )
    folders = [root / "0", root / "1"]
    both = [Place(folders, flags, root / name) for name in ("first", "second")]
    yield both
    for place in both:
        grown = place.memory()
        for name, before in place.grown_from.items():
            print(f"{name}: {before:,} bytes, then {grown[name]:,}")
            assert grown[name] < before + MOST_GROWN, name
        assert place.server.stop() == 0


KINDS = (
    *("create", "create", "go on", "go on", "sample", "sample", "save", "save", "fetch", "move"),
    *("move", "delete", "look", "of short life", "expire", "fill"),
)
DISTURBANCES = ("engine", "api", "jobs", "all", *("weights",) * 6)
tokens = st.lists(st.integers(3, 300), min_size=1, max_size=8)
steps = st.tuples(
    st.sampled_from(KINDS * 6 + DISTURBANCES), st.integers(0, 1), st.sampled_from("aab"),
    st.integers(0, 99), tokens,
)  # fmt: skip
programs = st.lists(steps, min_size=5, max_size=12)


class Program:
    """What is known of the states of both servers, and what may be done with them."""

    def __init__(self, places: list[Place]) -> None:
        self.places = places
        self.known: dict[tuple[int, str], dict[str, State]] = {
            (number, key): {} for number in range(2) for key in "ab"
        }

    def step(self, kind: str, number: int, key: str, pick: int, more: list[int]) -> None:
        at, own = (number, key), self.known[number, key]
        id = [*own][pick % len(own)] if own else None
        if kind in DISTURBANCES:
            self.disturb(kind, at, id, more)
        elif kind == "fill":
            while self.create(at, None, more):
                pass
        elif kind == "expire":
            for gone in [id for id, state in own.items() if state.is_short]:
                path = f"{STATES}/{gone}"
                wait_until(partial(self.is_404, number, path, key))
                del own[gone]
        elif kind == "of short life":
            self.create(at, None, more, ttl_s=1)
        elif kind == "create" or id is None:
            self.create(at, None, more)
        elif kind == "go on":
            self.create(at, id, more, **({"refeed": True} if pick % 2 else {}))
        elif kind in {"sample", "save"}:
            self.sample(at, id, more, pick, kind == "save")
        else:
            self.look(kind, at, id, pick)

    def is_404(self, number: int, path: str, key: str) -> bool:
        return self.places[number].ask("GET", path, key).status_code == 404

    def is_done(
        self,
        reply: httpx.Response,
        at: tuple[int, str],
        begun: State | None,
        new: Sequence[State] = (),
        refeed: bool = False,
    ) -> bool:
        """Whether it is; else a state of short life has expired, or other weights or the quota
        refuse it, which they must, and then only."""
        states = self.known[at].values()
        if reply.status_code == 404:
            assert begun is not None and begun.is_short, reply.text
            self.known[at] = {
                id: state for id, state in self.known[at].items() if state is not begun
            }
            return False
        is_other = begun is not None and begun.weights != self.places[at[0]].weights
        assert (reply.status_code == 409) == (is_other and not refeed), reply.text
        added = sum(state.num_bytes for state in new)
        most = added + sum(state.num_bytes for state in states)
        least = most - sum(state.num_bytes for state in states if state.is_short)
        if reply.status_code == 403:
            assert most > MAX_BYTES, reply.text
        elif reply.status_code != 409:
            assert reply.status_code == 200, reply.text
            assert least <= MAX_BYTES or not new, f"{least} bytes are over the quota"
        return reply.status_code == 200

    def create(self, at: tuple[int, str], id: str | None, more: list[int], **fields: Any) -> bool:
        """Whether it was made."""
        place, own = self.places[at[0]], self.known[at]
        begun = own[id] if id else None
        new = State((begun.ids if begun else []) + more, place.weights, "ttl_s" in fields)
        if len(new.ids) > TEXT_MODEL.n_ctx:
            return False
        body = {"prompt": more, **({"state": id} if id else {}), **fields}
        reply = place.ask("POST", STATES, at[1], json=body)
        if not self.is_done(reply, at, begun, [new], "refeed" in fields):
            return False
        made = reply.json()
        assert (made["tokens"], made["bytes"]) == (len(new.ids), new.num_bytes)
        assert made["fingerprint"] == WEIGHTS[new.weights].fingerprint
        own[made["id"]] = new
        return True

    def sample(self, at: tuple[int, str], id: str, more: list[int], seed: int, saves: bool) -> None:
        """Two samples, equal to those of the whole prompt; their states are known, if saved."""
        place, own = self.places[at[0]], self.known[at]
        params = {"n": 2, "max_tokens": 5, "seed": seed}
        ids = own[id].ids + more
        if len(ids) + params["max_tokens"] > TEXT_MODEL.n_ctx:
            return
        body = {"state": id, "prompt": [more], "logprobs": 0, "return_token_ids": True, **params}
        body |= {"ignore_eos": True, "save_state": saves, **({"refeed": True} if seed % 2 else {})}
        reply = place.ask("POST", COMPLETIONS, at[1], json=body)
        expected = undisturbed(tuple(ids), place.weights, **params)
        sampled = [np.frombuffer(expected[index].token_ids, "<i4").tolist() for index in range(2)]
        new = [State(ids + added, place.weights) for added in sampled]
        if not self.is_done(reply, at, own[id], new if saves else (), bool(seed % 2)):
            return
        for index, choice in enumerate(reply.json()["choices"]):
            assert choice["token_ids"] == sampled[index]
            logprobs = np.array(choice["logprobs"]["token_logprobs"], "<f4").tobytes()
            assert logprobs == expected[index].logprobs
            if saves:
                own[choice["state"]] = new[index]

    def look(self, kind: str, at: tuple[int, str], id: str, pick: int) -> None:
        """Fetch a state's content, put it elsewhere, delete it, or ask for it with another key."""
        (number, key), own = at, self.known[at]
        place, path, other = self.places[number], f"{STATES}/{id}", (number, "ba"["ab".index(key)])
        method, end = ("DELETE", "") if kind == "delete" else ("GET", "/content")
        reply = place.ask(method, path + end, key)
        if kind == "delete" or reply.status_code == 404:
            assert own.pop(id).is_short or reply.status_code == 200
            return
        self.check(own[id], reply.content)
        if kind == "look" and id not in self.known[other]:
            for method, end in (("GET", ""), ("DELETE", ""), ("GET", "/content")):
                assert place.ask(method, path + end, other[1]).status_code == 404
        if kind == "move":
            there = (1 - number, key) if pick % 3 else other
            moved, known = State(own[id].ids, own[id].weights), self.known[there]
            asked = self.places[there[0]].ask
            put = asked("PUT", f"{path}/content", there[1], content=reply.content)
            new = [] if id in known and put.status_code == 200 else [moved]  # the same again
            if self.is_done(put, there, moved, new):
                lives_s = put.json()["expires_at"] - put.json()["created_at"]
                known[id] = State(moved.ids, moved.weights, lives_s < 9)

    def check(self, state: State, file: bytes) -> None:
        """A file has the bits that the undisturbed engine gives."""
        arrays = load(file)
        assert arrays["token_ids"].tolist() == state.ids
        assert arrays["state"].tobytes() == undisturbed_state(tuple(state.ids), state.weights)

    def disturb(self, who: str, at: tuple[int, str], id: str | None, more: list[int]) -> None:
        """Kill, or change weights, while states are made, and learn which are there."""
        (number, key), own = at, self.known[at]
        place, begun = self.places[number], own[id].ids if id else []
        body: dict[str, Any] = {"prompt": [more], "n": 3, "max_tokens": 4, "seed": 1}
        body |= {"save_state": True, "return_token_ids": True, "ignore_eos": True}
        goes_on = {"state": id, "refeed": True} if id else {}
        asked: list[tuple[str, dict[str, Any]]] = [
            *((STATES, {"prompt": more}), (STATES, {"prompt": more, **goes_on})),
            *((COMPLETIONS, body), (COMPLETIONS, body | goes_on)),
        ]

        def ask(path: str, body: dict[str, Any]) -> httpx.Response | None:
            try:
                return place.ask("POST", path, key, json=body)
            except (httpx.TransportError, RuntimeError):  # of a client closed with its server
                return None

        with ThreadPoolExecutor(4) as threads:
            replies = [threads.submit(ask, *request) for request in asked]
            if who == "weights":
                place.change_weights(1 - place.weights)
            else:
                place.kill(who)
        answered: set[str] = set()
        for reply in (future.result() for future in replies):
            if reply is None:
                assert who in {"api", "all"}
                continue
            # Too long, the quota, expired, of other weights by now, or the engine that has gone.
            assert reply.status_code in {200, 400, 403, 404, 409, 503}, reply.text
            if reply.status_code == 200:
                made = reply.json()
                choices = [item["state"] for item in made.get("choices", ())]
                answered |= {id for id in choices or [made["id"]] if id}  # none: it is full
        listed = {state["id"]: state for state in self.listed(at)}
        assert answered <= listed.keys(), "a state that was answered is not there"
        for gone in own.keys() - listed.keys():
            assert own.pop(gone).is_short
        new = listed.keys() - own.keys()
        assert new == answered or who in {"api", "all"}, "a state is there that nobody was told of"
        for made_id in new:
            file = place.ask("GET", f"{STATES}/{made_id}/content", key).content
            ids = load(file)["token_ids"].tolist()
            assert ids[: len(more)] == more or ids[: len(begun + more)] == begun + more
            prints = [weights.fingerprint for weights in WEIGHTS]
            own[made_id] = State(ids, prints.index(listed[made_id]["fingerprint"]))
            self.check(own[made_id], file)

    def listed(self, at: tuple[int, str]) -> list[dict[str, Any]]:
        reply = self.places[at[0]].ask("GET", f"{STATES}?limit=1000", at[1])
        states: list[dict[str, Any]] = reply.json()["data"]
        return states

    def check_all(self) -> None:
        """All that is to be there is, and nothing else."""
        for at, own in self.known.items():
            there = {state["id"] for state in self.listed(at)}
            assert there <= own.keys()
            assert all(own[id].is_short for id in own.keys() - there)

    def clear(self) -> None:
        for number, key in self.known:
            for state in self.listed((number, key)):
                self.places[number].ask("DELETE", f"{STATES}/{state['id']}", key)
        for place in self.places:
            if place.weights:
                place.change_weights(0)
            place.server.wait_until_idle()


CREATED = ("create", 0, "a", 0, [5, 6, 7])


@settings(
    max_examples=100 if settings.get_current_profile_name() == "fuzz" else 8,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],  # to shrink takes minutes: servers start in programs
)
@example([CREATED, ("weights", 0, "a", 0, [3]), ("engine", 0, "a", 0, [8]), CREATED])
@example([CREATED, ("api", 0, "a", 0, [8]), ("jobs", 0, "a", 0, [8]), ("all", 0, "a", 0, [8])])
@given(programs)
def test_what_goes_on_from_states_was_never_disturbed(
    places: list[Place], program: list[tuple[str, int, str, int, list[int]]]
) -> None:
    running = Program(places)
    try:
        for step in program:
            running.step(*step)
        running.check_all()
    finally:
        running.clear()
    for place in places:
        assert place.pages() <= 16, "the database keeps what was deleted"
        place.grown_from = place.grown_from or place.memory()
