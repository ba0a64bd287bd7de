"""`python -m tests.deploy.try_router --python PATH`: replicas behind a router, and what it loses.

Three real servers and a fourth that is added, with the bundled model, behind a router with the
arguments that deploy/kubernetes gives it. Under many requests at once one server is killed, one
drained, one added. Each answer must be that of a server alone with the same seed. Then two servers
with a short queue are asked more than they take, and what passes through the router is looked at.
Writes a record; the exit code is 1 if an answer was wrong or a circuit stayed open.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx
import msgspec
import psutil

from srm.engine.config import DEMO_MODEL
from srm.loadtest.records import RECORDS, new_record, settings_of, write_record
from srm.settings import load
from tests.chaos.jobs import table
from tests.deploy.routers import Router
from tests.kit.serving import CHATS, COMPLETIONS, Server, children, processes

COMPUTED = "srm_engine_decode_tokens_total"
Events = dict[int, Callable[[], Coroutine[Any, Any, None]]]
"""What happens when so many requests have ended."""
QUEUE = ("--num-slots=16", "--max-step-rows=16", "--max-waiting=32")
"""A server that is full of 48 sequences."""


class TrialConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the trial."""

    python: Path
    """Python that has the router's package."""
    router: Literal["vllm", "sglang"] = "vllm"
    """Which router."""
    policy: str = "cache_aware"
    """How it chooses a server."""
    requests: int = 1_000
    """Of the run with losses."""
    concurrency: int = 200
    """Requests at once."""
    max_tokens: int = 64
    """Most tokens of an answer; the shortest have half as many."""
    prefixes: int = 24
    """Different beginnings of prompts."""
    output: Path = RECORDS
    """Folder for the record."""


class Case(NamedTuple):
    """A request: every other one streams, and every other pair are chats."""

    number: int
    body: dict[str, Any]
    path: str


def cases(config: TrialConfig) -> Iterator[Case]:
    """Yield the requests; a prompt begins as those of its prefix's other requests do."""
    for number in range(config.requests):
        people = number % config.prefixes
        text = (
            f"Ava {people} has {people} boxes with {people + 3} pears each. " * 4 + f"And {number}?"
        )
        body: dict[str, Any] = {"model": DEMO_MODEL.name, "seed": number}
        body |= {"stream": number % 2 == 0, "ignore_eos": True}
        body |= {"max_tokens": config.max_tokens // 2 + number % (config.max_tokens // 2) + 1}
        if number % 4 < 2:
            yield Case(number, {**body, "prompt": f"Question: {text}\nAnswer:"}, COMPLETIONS)
        else:
            yield Case(number, {**body, "messages": [{"role": "user", "content": text}]}, CHATS)


async def ask(client: httpx.AsyncClient, case: Case) -> tuple[str, str]:
    """Return what became of a request, "answered" if all is well, and the text that came."""
    pieces: list[str] = []
    is_begun = False
    try:
        async with client.stream("POST", case.path, json=case.body) as reply:
            if reply.status_code != httpx.codes.OK:
                return f"status {reply.status_code}", (await reply.aread()).decode()
            is_begun = case.body["stream"]
            if not is_begun:
                return "answered", _text(json.loads(await reply.aread()))
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    return "answered", "".join(pieces)
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        return "stream ended by an error event", ""
                    pieces.append(_text(event))
    except httpx.TransportError as error:
        return ("stream cut" if is_begun else f"broken: {type(error).__name__}"), ""
    return "stream cut", ""


def _text(reply: dict[str, Any]) -> str:
    (choice,) = reply["choices"]
    message = choice.get("text") or choice.get("message", choice.get("delta", {})).get("content")
    return message or ""


async def load_all(
    url: str, config: TrialConfig, events: Events | None = None
) -> list[tuple[str, str]]:
    """Send all requests, `concurrency` at once; `events` happen when so many have ended."""
    results: list[tuple[str, str]] = [("", "")] * config.requests
    waiting, ended = iter(list(cases(config))), 0
    happening: list[asyncio.Task[None]] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=config.concurrency)

    async def work(client: httpx.AsyncClient) -> None:
        nonlocal ended
        for case in waiting:
            results[case.number] = await ask(client, case)
            ended += 1
            if event := (events or {}).get(ended):
                happening.append(asyncio.create_task(event()))

    async with httpx.AsyncClient(
        base_url=url, timeout=300, limits=limits, trust_env=False
    ) as client:
        await asyncio.gather(*(work(client) for _ in range(config.concurrency)))
    await asyncio.gather(*happening)
    return results


def kill(server: Server) -> float:
    """Kill all processes of a server, as the loss of its machine does; return its tokens."""
    computed = server.metric(COMPUTED)
    while server.metric(COMPUTED) == computed:  # until it is amid answers
        time.sleep(0.01)
    psutil.Process(children(server)["engine"]).suspend()  # what it computed stays as it is read
    computed = server.metric(COMPUTED)
    pids = [pid for _, pid in processes(server)]
    for pid in (server.process.pid, *pids):  # the supervisor first: it would start others again
        psutil.Process(pid).kill()
    server.wait()
    return computed


def drain(server: Server) -> tuple[float, int]:
    """Stop a server in order; return the tokens of its answers, by its log, and its exit code."""
    code = server.stop()
    entries = [json.loads(line) for line in server.lines if line.startswith("{")]
    return sum(entry.get("completion_tokens", 0) for entry in entries), code


def start_servers(stack: ExitStack, count: int, *flags: str) -> list[Server]:
    """Start real servers together; they end with the stack."""

    def start(_: int) -> Server:
        return Server(DEMO_MODEL, *flags, engine_module="srm.engine", start_s=600)

    with ThreadPoolExecutor(count) as threads:
        return [stack.enter_context(item) for item in threads.map(start, range(count))]


def lose_some(config: TrialConfig) -> dict[str, Any]:
    """Run the requests while a server is killed, one added and one drained."""
    with ExitStack() as stack:
        flags = ("--num-slots=256", "--log-format=json", "--log-level=info")
        servers = start_servers(stack, 4, *flags)
        *first, added = servers
        alone = asyncio.run(load_all(added.url, config))
        before = {server.url: server.metric(COMPUTED) for server in servers}
        cached = {server.url: _prefilled(server) for server in servers}
        router = stack.enter_context(
            Router(
                config.router,
                config.python,
                [item.url for item in first],
                f"--policy={config.policy}",
            )
        )
        computed: dict[str, float] = {}
        codes: list[int] = []

        async def killed() -> None:
            computed["killed"] = await asyncio.to_thread(kill, first[0])

        async def is_added() -> None:
            await asyncio.to_thread(router.add, added.url)

        async def drained() -> None:
            computed["drained"], code = await asyncio.to_thread(drain, first[1])
            codes.append(code)

        part = config.requests // 4
        events = {part: killed, 2 * part: is_added, 3 * part: drained}
        started = time.monotonic()
        ran = asyncio.run(load_all(router.url, config, events))
        seconds = time.monotonic() - started
        for name, item in (("left alone", first[2]), ("added", added)):
            item.wait_until_idle()
            computed[name] = item.metric(COMPUTED) - before[item.url]
        retained, all_prompts = (
            sum(_prefilled(item)[i] - cached[item.url][i] for item in (first[2], added))
            for i in (0, 1)
        )
        outcomes = Counter(outcome for outcome, _ in ran)
        differing = sum(
            array[0] == other[0] == "answered" and array[1] != other[1]
            for array, other in zip(ran, alone, strict=True)
        )
        wanted = sum(
            case.body["max_tokens"]
            for case, (outcome, _) in zip(cases(config), ran, strict=True)
            if outcome == "answered"
        )
        return {
            "requests": config.requests,
            "outcomes": dict(outcomes),
            "alone": dict(Counter(outcome for outcome, _ in alone)),
            "differing": differing,
            "retries": router.metrics("_retries_total"),
            "retries_exhausted": router.metrics("_retries_exhausted_total"),
            "computed_tokens": computed,
            "answered_tokens": wanted,
            "tokens_in_no_answer": sum(computed.values()) - wanted,
            "exit_code_of_drained": codes,
            "prompt_tokens_kept": retained / all_prompts,
            "seconds": seconds,
        }


def _prefilled(server: Server) -> tuple[float, float]:
    """Return the prompt tokens that were kept from others, and all."""
    names = ("srm_engine_cached_tokens_total", "srm_engine_prompt_tokens_total")
    retained, all_of_them = map(server.metric, names)
    return retained, all_of_them


def fill(config: TrialConfig) -> dict[str, Any]:
    """Ask two servers for more than their queues take; then one request after the other."""
    with ExitStack() as stack:
        servers = start_servers(stack, 2, *QUEUE)
        router = stack.enter_context(
            Router(config.router, config.python, [server.url for server in servers])
        )
        burst = msgspec.structs.replace(config, requests=config.concurrency)
        during = Counter(outcome for outcome, _ in asyncio.run(load_all(router.url, burst)))
        later = msgspec.structs.replace(config, requests=20, concurrency=1)
        after = Counter(outcome for outcome, _ in asyncio.run(load_all(router.url, later)))
        refused = sum(server.metric("http_requests_total", "503") for server in servers)
        return {
            "during": dict(during),
            "after": dict(after),
            "refused_by_servers": refused,
            "retries": router.metrics("_retries_total"),
            "features": features(router, servers[0].url),
        }


def features(router: Router, worker: str) -> dict[str, bool]:
    """Return which things of srm work through the router as they do without it."""
    name = router.http.get(f"{worker}/v1/models").json()["data"][0]["id"]
    chat = {"model": name, "messages": [{"role": "user", "content": "Ava has 6 boxes."}]}
    prompt = {"model": name, "prompt": "Question: Ava has 6 boxes"}
    counts = {"n": 4, "max_tokens": 2, "return": "counts"}
    until = {"n": 4, "max_tokens": 2, "until": {"match": ".", "count": 1}}
    bodies: dict[str, tuple[str, dict[str, Any], str]] = {
        "token ids as prompt": (COMPLETIONS, {**prompt, "prompt": [5, 6]}, "choices"),
        "several prompts": (COMPLETIONS, {**prompt, "prompt": ["a", "b"]}, "choices"),
        "a request without `model`": (COMPLETIONS, {"prompt": "Ava"}, "choices"),
        "`until` in completions": (COMPLETIONS, {**prompt, **until}, "samples"),
        "`until` in chats": (CHATS, {**chat, **until}, "samples"),
        "`return: counts` in chats": (CHATS, {**chat, **counts}, "samples"),
        "`/tokenize`": ("/tokenize", {"prompt": "Ava"}, "tokens"),
    }
    entries = {}
    for name, (path, body, field) in bodies.items():
        replies = [router.http.post(url + path, json=body) for url in (worker, router.url)]
        assert field in replies[0].json(), replies[0].text
        entries[name] = replies[1].is_success and field in replies[1].json()
    paths = {"files": "/v1/files", "batches": "/v1/batches", "`/v1/models`": "/v1/models"}
    for name, path in paths.items():
        entries[name] = router.http.get(path).is_success
    wrong = router.http.post(COMPLETIONS, json={**prompt, "top_q": 1})
    entries["a 400 of srm, with its error"] = wrong.status_code == 400 and "top_q" in wrong.text
    named = router.http.post(
        COMPLETIONS, json={**prompt, "max_tokens": 1}, headers={"x-request-id": "mine"}
    )
    entries["`x-request-id`"] = named.headers.get("x-request-id") == "mine"
    return entries


def markdown(record: dict[str, Any]) -> str:
    """Return the tables of the record."""
    lost, full = record["losses"], record["full"]
    entries = {name: f"{count:,}" for name, count in sorted(lost["outcomes"].items())}
    rows = {
        "requests": f"{lost['requests']:,}, {record['settings']['concurrency']} at once",
        **entries,
        "answers unlike those of a server alone": lost["differing"],
        "retries by the router": f"{lost['retries']:,.0f}",
        "tokens of answers": f"{lost['answered_tokens']:,}",
        "tokens computed that are in no answer": f"{lost['tokens_in_no_answer']:,.0f}",
        "prompt tokens found kept": f"{lost['prompt_tokens_kept']:.0%}",
        "exit code of the drained server": lost["exit_code_of_drained"],
        "seconds": f"{lost['seconds']:.1f}",
    }
    queue = {
        "during the burst": ", ".join(f"{n} {what}" for what, n in sorted(full["during"].items())),
        "503 by the servers": f"{full['refused_by_servers']:,.0f}",
        "retries by the router": f"{full['retries']:,.0f}",
        "20 requests after it": ", ".join(
            f"{n} {what}" for what, n in sorted(full["after"].items())
        ),
    }
    passes = {
        name: "passes" if is_passed else "does not" for name, is_passed in full["features"].items()
    }
    heads = ("One killed, one added, one drained", "More than the queues take", "What passes")
    parts = zip(heads, (rows, queue, passes), strict=True)
    return "\n".join(f"## {head}\n\n{table(part)}" for head, part in parts)


def main(argv: list[str]) -> int:
    """Try it, write a record, print its tables."""
    config = load(TrialConfig, argv, prog="python -m tests.deploy.try_router")
    shown = [argument for argument in argv if argument not in {"--python", str(config.python)}]
    record = new_record(" ".join(["python -m tests.deploy.try_router", *shown])) | {
        "settings": settings_of(config) | {"python": "", "output": ""},
        "losses": lose_some(config),
        "full": fill(config),
    }
    write_record(record, f"router-{config.router}", markdown(record), config.output)
    losses, after = record["losses"], record["full"]["after"]
    is_right = not losses["differing"] and losses["exit_code_of_drained"] == [0]
    return 0 if is_right and after == {"answered": 20} else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
