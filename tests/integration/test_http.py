"""Requests over HTTP through both processes: what comes back, and what leaving early leaves."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving import MAX_BODY_BYTES, MAX_WAITING, TEXT_MODEL, Server


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    reply = server.post(**fields)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def stream(server: Server, **fields: Any) -> list[dict[str, Any]]:
    """The events, without the closing [DONE], which must be there."""
    reply = server.post(stream=True, **fields)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = reply.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return [item for items in lists for item in items]


def test_choices_are_in_the_order_of_prompts_and_samples(server: Server) -> None:
    answer = complete(
        server, prompt=["the cat", "sat"], n=3, max_tokens=5, seed=3, return_token_ids=True
    )
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert [choice["prompt_token_ids"] for choice in choices[:3]] == 3 * [
        choices[0]["prompt_token_ids"]
    ]
    alone = complete(server, prompt="sat", n=3, max_tokens=5, seed=3, return_token_ids=True)
    assert [c["token_ids"] for c in choices[3:]] == [c["token_ids"] for c in alone["choices"]]
    assert len({tuple(c["token_ids"]) for c in choices}) == 6


def test_usage_counts_prompts_once_and_all_choices(server: Server) -> None:
    answer = complete(server, prompt=[[7, 5], [7, 5, 6]], n=4, max_tokens=7, ignore_eos=True)
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 56,
        "total_tokens": 61,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


def test_a_prompt_that_begins_like_an_earlier_one_is_fed_from_there_on(server: Server) -> None:
    names = ("cached_tokens", "prefix_hits", "prefill_tokens")
    before = {name: server.metric(f"srm_engine_{name}_total") for name in names}
    header = [8, *range(2, 22)]
    sampling = {"n": 3, "max_tokens": 5, "ignore_eos": True, "seed": 2, "return_token_ids": True}
    prompts = [[*header, 5, 6], [*header, 5, 6], [*header, 9, 9], [*header, 6, 5, 4]]
    answers = [complete(server, prompt=prompt, **sampling) for prompt in prompts]
    answers.append(complete(server, prompt=prompts[0], echo=True, logprobs=0, **sampling))
    assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers] == [
        0, 22, 0, 21, 0,
    ]  # fmt: skip
    samples = [[one["token_ids"] for one in answer["choices"]] for answer in answers]
    assert samples[0] == samples[1] == samples[4] != samples[2]
    grown = {name: server.metric(f"srm_engine_{name}_total") - before[name] for name in names}
    assert grown == {"cached_tokens": 43, "prefix_hits": 2, "prefill_tokens": 22 + 22 + 2 + 22}
    assert server.metric("srm_engine_prefixes") >= 4


def test_text_and_token_prompts_are_the_same_request(server: Server) -> None:
    by_text = complete(server, max_tokens=9, seed=1, return_token_ids=True)
    ids = by_text["choices"][0]["prompt_token_ids"]
    by_ids = complete(server, prompt=ids, max_tokens=9, seed=1, return_token_ids=True)
    assert by_ids["choices"] == by_text["choices"]


def test_without_a_seed_equal_prompts_differ(server: Server) -> None:
    answer = complete(server, prompt=["the cat"] * 4, max_tokens=12)
    assert len({choice["text"] for choice in answer["choices"]}) > 1


@pytest.mark.parametrize("temperature", [0, 1e-9])
def test_temperature_zero_is_greedy(server: Server, temperature: float) -> None:
    answer = complete(server, n=3, temperature=temperature, max_tokens=10)
    assert len({choice["text"] for choice in answer["choices"]}) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 4, "logprobs": 0, "return_token_ids": True},
        {"prompt": ["the cat", "sat on"], "n": 2, "logprobs": 0},
        {"stop": ["e", "at"], "n": 5, "return_token_ids": True},
        {"logprobs": 0, "return_tokens_as_token_ids": True},
        {"stop": ["e", "at"], "n": 5, "logprobs": 3, "echo": True, "return_token_ids": True},
        {"prompt": ["the cat", "sat on", "the mat"], "n": 3},
        {"n": 30, "stop_token_ids": list(range(60, 80)), "temperature": 2},
        {"prompt": ["the cat", "sat on"], "n": 20, "stop": ["e", "at", "xy"]},
        {"echo": True, "n": 2},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
        {"stop": ["e", "at"], "n": 5, "include_stop_str_in_output": True, "logprobs": 0},
        {"echo": True, "logprobs": 1, "skip_special_tokens": False, "n": 3},
        {"stream_interval": 7, "n": 3, "logprobs": 0, "return_token_ids": True},
    ],
)
def test_a_stream_adds_up_to_the_whole(server: Server, fields: dict[str, Any]) -> None:
    fields = {"seed": 7, "max_tokens": 30, **fields}
    whole = complete(server, **{k: v for k, v in fields.items() if k != "stream_interval"})
    events = stream(server, stream_options={"include_usage": True}, **fields)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"].pop("prompt_tokens_details")["cached_tokens"] >= 0
    assert whole["usage"].pop("prompt_tokens_details")["cached_tokens"] >= 0
    assert events[-1]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events[:-1])
    assert len({event["id"] for event in events}) == 1
    for choice in whole["choices"]:
        parts = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        if "token_ids" in choice:
            assert flat(part["token_ids"] for part in parts) == choice["token_ids"]
            assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
            assert not any("prompt_token_ids" in part for part in parts[1:])
        for name in choice["logprobs"] or ():
            joined = flat(part["logprobs"][name] for part in parts)
            assert joined == choice["logprobs"][name]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 16},
        {"prompt": ["the cat", "sat on"], "n": 8},
        {"n": 16, "logprobs": 0, "return_token_ids": True},
        {"n": 16, "stop": ["e"]},
        {"n": 16, "stream_whole": True},
    ],
)
def test_an_event_of_a_request_of_few_choices_has_one(
    server: Server, fields: dict[str, Any]
) -> None:
    fields = {"max_tokens": 9, "ignore_eos": True, **fields}
    events = stream(server, **fields)
    assert [len(event["choices"]) for event in events] == [1] * len(events)
    assert {event["choices"][0]["index"] for event in events} == set(range(16))
    more = stream(server, **{**fields, "n": 17})
    assert max(len(event["choices"]) for event in more) > 1


def test_continuous_usage_grows(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream(server, max_tokens=8, ignore_eos=True, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 8


def test_logprobs_are_of_the_chosen_tokens(server: Server) -> None:
    answer = complete(server, logprobs=0, max_tokens=6, seed=2, return_token_ids=True)
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {len(choice["token_ids"])}
    assert all(value <= 0 for value in logprobs["token_logprobs"])
    assert logprobs["top_logprobs"] == [
        {token: value}
        for token, value in zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    ]
    as_ids = complete(server, logprobs=0, max_tokens=6, seed=2, return_tokens_as_token_ids=True)[
        "choices"
    ][0]["logprobs"]
    assert as_ids["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]


def test_a_stop_token_is_counted_and_not_read(server: Server) -> None:
    free = complete(server, max_tokens=20, seed=5, ignore_eos=True, return_token_ids=True)
    ids = free["choices"][0]["token_ids"]
    stop = ids[4]
    answer = complete(
        server, max_tokens=20, seed=5, ignore_eos=True, return_token_ids=True, stop_token_ids=[stop]
    )
    choice = answer["choices"][0]
    assert choice["token_ids"] == ids[: ids.index(stop) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])


def test_when_all_samples_stopped_the_engine_is_told(server: Server) -> None:
    names = ("requests_total", "finished"), ("sequences_total", "stop"), ("decode_tokens_total", "")
    before = [server.metric(f"srm_engine_{name}", label) for name, label in names]
    every_letter = [chr(code) for code in range(128)]
    answer = complete(server, n=40, max_tokens=120, stop=every_letter, ignore_eos=True)
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    server.wait_until_idle()
    after = [server.metric(f"srm_engine_{name}", label) for name, label in names]
    finished, stopped, decoded = (a - b for a, b in zip(after, before, strict=True))
    assert (finished, stopped) == (1, 40)
    assert decoded < 40 * 120


def test_many_samples_come_in_one_reply(server: Server) -> None:
    answer = complete(server, n=2_000, max_tokens=2, ignore_eos=True)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2_000))
    assert answer["usage"]["completion_tokens"] == 4_000


def test_the_longest_prompt_gives_one_token_and_a_longer_one_is_refused(server: Server) -> None:
    n_ctx = TEXT_MODEL.n_ctx
    answer = complete(server, prompt=[5] * n_ctx, max_tokens=10, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 1
    for prompt in ([5] * (n_ctx + 1), [[5], [5] * (n_ctx + 1)]):
        for is_stream in (False, True):
            reply = server.post(prompt=prompt, stream=is_stream)
            assert reply.status_code == 400
            error = reply.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "129 tokens" in error["message"]
            assert "128" in error["message"]
    reply = server.post(prompt="the cat " * 100_000)
    assert reply.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/else/where", 404, "model_not_found"),
        ("POST", "/v1/completions", 400, "invalid_request"),
    ],
)
def test_every_error_has_the_openai_shape(
    server: Server, method: str, path: str, status: int, code: str
) -> None:
    reply = server.http.request(method, path)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert reply.headers["x-should-retry"] == "false"
    assert reply.headers["x-request-id"]


def test_an_unknown_model_is_refused_and_the_right_one_is_taken(server: Server) -> None:
    reply = server.post(model="other")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert complete(server, model="tiny", max_tokens=1)["model"] == "tiny"


def test_models_are_listed(server: Server) -> None:
    listed = server.get("/v1/models").json()
    (card,) = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 128)
    assert server.get("/v1/models/tiny").json() == card


@pytest.mark.parametrize(
    ("sent", "is_kept"), [("abc-1.2_3:4", True), ("a b", False), ("x" * 129, False), ("", False)]
)
def test_a_sane_request_id_is_kept(server: Server, sent: str, is_kept: bool) -> None:
    reply = server.http.get("/health", headers={"x-request-id": sent})
    assert (reply.headers["x-request-id"] == sent) == is_kept


def test_a_body_too_large_is_refused_while_it_is_read(server: Server) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(3):
            yield b" " * (MAX_BODY_BYTES // 2)

    for content in (b" " * (MAX_BODY_BYTES + 1), endless()):
        reply = server.http.post("/v1/completions", content=content)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
    reply = server.http.post("/v1/completions", content=b" " * MAX_BODY_BYTES)
    assert reply.status_code == 400


@pytest.mark.parametrize("is_stream", [False, True])
def test_overload_is_503_with_retry_after_before_any_body(server: Server, is_stream: bool) -> None:
    with server.http.stream(
        "POST",
        "/v1/completions",
        json={"prompt": "x", "n": 2_500, "max_tokens": 100, "ignore_eos": True, "stream": True},
    ) as busy:
        assert busy.status_code == 200
        reply = server.post(n=2_500, stream=is_stream)
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) >= 1
        assert "x-should-retry" not in reply.headers
        assert reply.json()["error"]["type"] == "server_overloaded"
    server.wait_until_idle()


@pytest.mark.parametrize("fields", [{"n": MAX_WAITING + 1}, {"prompt": ["x"] * 2, "n": 2_000}])
def test_more_completions_than_may_ever_wait_are_not_to_be_retried(
    server: Server, fields: dict[str, Any]
) -> None:
    reply = server.post(max_tokens=1, **fields)
    assert reply.status_code == 400
    assert reply.headers["x-should-retry"] == "false"
    assert reply.json()["error"]["param"] == "n"
    assert f"max_waiting = {MAX_WAITING}" in reply.json()["error"]["message"]


def test_probes_and_metrics_answer(server: Server) -> None:
    assert server.get("/health").status_code == 200
    assert server.get("/ready").status_code == 200
    text = server.get("/metrics").text
    assert "srm_engine_steps_total" in text  # of the other process
    assert "srm_time_to_first_token_seconds_bucket" in text


def test_routes_nobody_has_are_one_label(server: Server) -> None:
    for path in ("/a", "/b", "/v1/completions/../../c"):
        server.get(path)
    server.http.request("BREW", "/a")
    labels = [
        line.split("}")[0]
        for line in server.get("/metrics").text.splitlines()
        if line.startswith("http_requests_total{") and 'status="404"' in line
    ]
    assert 'http_requests_total{handler="other",method="GET",status="404"' in labels
    assert not any("BREW" in label or '"/a"' in label for label in labels)


LONG = {"prompt": "the cat", "n": 200, "max_tokens": 120, "ignore_eos": True}


async def test_clients_that_leave_free_their_slots_and_the_others_finish(server: Server) -> None:
    async def read(client: httpx.AsyncClient, num_events: int | None) -> str:
        """Read so many events and leave, or read all; what came last."""
        last = ""
        request = {**LONG, "n": 5 if num_events is None else 700, "stream": True}
        url = f"{server.url}/v1/completions"
        async with client.stream("POST", url, json=request) as reply:
            async for line in reply.aiter_lines():
                last = line or last
                if line and num_events is not None:
                    num_events -= 1
                    if not num_events:
                        break
        return last

    aborted = server.metric("srm_engine_requests_total", "aborted")
    async with httpx.AsyncClient(timeout=120) as client:
        last = await asyncio.gather(*(read(client, [None, 1, None, 3][i % 4]) for i in range(8)))
    assert last[0::2] == ["data: [DONE]"] * 4
    await asyncio.to_thread(server.wait_until_idle)
    assert server.metric("srm_engine_requests_total", "aborted") == aborted + 4


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_at_any_time_leaves_nothing_behind(
    server: Server, is_stream: bool
) -> None:
    async with httpx.AsyncClient() as client:
        for wait_s in (0.0005, 0.002, 0.005, 0.01, 0.03, 0.1):
            with pytest.raises((httpx.TimeoutException, asyncio.TimeoutError)):
                async with asyncio.timeout(wait_s):
                    await client.post(
                        f"{server.url}/v1/completions", json={**LONG, "stream": is_stream}
                    )
            await asyncio.to_thread(server.wait_until_idle)
    assert server.metric("http_requests_in_flight") == 1  # the one that asks


FIELDS = [
    "prompt", "model", "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "stop_token_ids", "ignore_eos", "stream", "stream_options", "logprobs", "return_token_ids",
    "prompt_logprobs", "user", "echo", "suffix", "best_of", "logit_bias", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "allowed_token_ids", "bad_words", "min_tokens",
    "include_stop_str_in_output", "skip_special_tokens", "add_special_tokens",
    "truncate_prompt_tokens", "priority", "request_id", "metadata", "stream_interval",
    "return_packed", "nonsense",
]  # fmt: skip
scalars = (
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 1, 2, 2**31, 2**63, 2**64, 10**30, 0.5, 1e-300, 1e300, -0.0])
    | st.text(max_size=5)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values).map(
    lambda body: json.dumps({"prompt": "x", "max_tokens": 2, **body}).encode()
) | st.binary(max_size=50)


@settings(max_examples=300, deadline=None)
@given(bodies)
def test_no_body_is_a_fault_of_the_server(server: Server, body: bytes) -> None:
    reply = server.http.post("/v1/completions", content=body)
    assert reply.status_code in {200, 400, 404}, reply.text
    if reply.status_code != 200:
        assert reply.json()["error"]["message"]


def test_after_all_this_it_still_serves(server: Server) -> None:
    server.wait_until_idle()
    assert complete(server, max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


@pytest.mark.slow
def test_an_idle_connection_is_kept_longer_than_clients_keep_it(server: Server) -> None:
    """Or a request may cross with our closing of it; aiohttp keeps one for 15 s, httpx for 5 s."""
    with closing(HTTPConnection(urlsplit(server.url).netloc)) as connection:
        connection.connect()
        socket = connection.sock
        for pause_s in (0, 16):
            time.sleep(pause_s)
            connection.request("GET", "/health")
            assert connection.getresponse().read()
            assert connection.sock is socket
