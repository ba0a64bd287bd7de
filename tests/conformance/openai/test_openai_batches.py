"""OpenAI's SDK and a batch: uploaded, run, watched, read, cancelled."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.kit.serving import CHATS, Server, choice_of, tries
from tests.kit.serving import COMPLETIONS as URL


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def line(custom_id: str, url: str = URL, **body: Any) -> dict[str, Any]:
    given = {"model": "tiny", **({"prompt": "the cat"} if url == URL else {}), **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": given}


def started(client: openai.OpenAI, lines: list[Any], endpoint: Any = URL, **fields: Any) -> Batch:
    data = "".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in lines)
    source = client.files.create(file=("in.jsonl", io.BytesIO(data.encode())), purpose="batch")
    return client.batches.create(
        input_file_id=source.id, endpoint=endpoint, completion_window="24h", **fields
    )


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    for _ in tries():
        batch = client.batches.retrieve(batch.id)
        if batch.status not in {"validating", "in_progress", "finalizing", "cancelling"}:
            break
        time.sleep(0.05)
    return batch


def records(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    if file_id is None:
        return {}
    result = map(json.loads, client.files.content(file_id).text.splitlines())
    return {record["custom_id"]: record for record in result}


def test_upload_run_poll_download(server: Server, client: openai.OpenAI) -> None:
    lines = [line(f"good {seed}", seed=seed, max_tokens=9) for seed in range(20)]
    lines.append(line("bad", top_p=2))
    batch = started(client, lines, metadata={"what": "a test"})
    assert batch.status == "validating"
    batch = ended(client, batch)
    assert batch.status == "completed"
    assert batch.metadata == {"what": "a test"}
    assert batch.request_counts is not None and batch.usage is not None
    assert (batch.request_counts.total, batch.request_counts.completed) == (21, 20)
    assert batch.request_counts.failed == 1
    output, errors = records(client, batch.output_file_id), records(client, batch.error_file_id)
    bodies = [output[f"good {seed}"]["response"]["body"] for seed in range(20)]
    # The same request asked over HTTP has the same answer: a seed is a seed.
    alone = choice_of(server, prompt="the cat", seed=3, max_tokens=9)
    assert bodies[3]["choices"][0]["text"] == alone["text"]
    assert batch.usage.output_tokens == sum(body["usage"]["completion_tokens"] for body in bodies)
    assert batch.usage.input_tokens == sum(body["usage"]["prompt_tokens"] for body in bodies)
    assert {body["created"] for body in bodies} == {batch.created_at}
    assert list(errors) == ["bad"]
    assert errors["bad"]["response"]["status_code"] == 400
    assert errors["bad"]["response"]["body"]["error"]["param"] == "top_p"
    assert server.metric("srm_batch_lines_total", "completed") >= 20
    assert server.metric("srm_batch_lines_total", "failed") >= 1


def test_responses_run_in_batches(server: Server, client: openai.OpenAI) -> None:
    url, asked = "/v1/responses", {"input": "the cat", "max_output_tokens": 9, "seed": 3}
    lines = [line("a", url, **asked), line("b", url, input=[]), line("c", url, **asked, n=2)]
    batch = ended(client, started(client, lines, url))
    assert batch.status == "completed" and batch.usage is not None
    response = records(client, batch.output_file_id)["a"]["response"]["body"]
    alone = server.http.post(url, json=asked).json()
    texts = [body["output"][0]["content"][0]["text"] for body in (response, alone)]
    assert texts[0] == texts[1] and response["created_at"] == batch.created_at
    assert batch.usage.output_tokens == response["usage"]["output_tokens"] > 0
    faults = records(client, batch.error_file_id)
    params = {id: fault["response"]["body"]["error"]["param"] for id, fault in faults.items()}
    assert params == {"b": "input", "c": "n"}


def test_chats(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "the cat"}]
    batch = started(client, [line("a", CHATS, messages=messages, max_tokens=5)], CHATS)
    batch = ended(client, batch)
    assert batch.error_file_id is None
    body = records(client, batch.output_file_id)["a"]["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["role"] == "assistant"


def test_a_file_at_fault_fails_as_a_whole(client: openai.OpenAI) -> None:
    batch = ended(client, started(client, [line("a"), "{", line("b", CHATS)]))
    assert batch.status == "failed"
    assert batch.errors is not None and batch.errors.data is not None
    results = [(error.code, error.line) for error in batch.errors.data]
    assert results == [("invalid_json_line", 2), ("url_mismatch", 3)]
    assert (batch.output_file_id, batch.error_file_id) == (None, None)


def test_cancel(server: Server, client: openai.OpenAI) -> None:
    lines = [line(f"short {n}", max_tokens=1) for n in range(5)]
    lines += [line(f"long {n}", n=64, max_tokens=100, ignore_eos=True) for n in range(30)]
    batch = started(client, lines)
    while batch.request_counts is None or not batch.request_counts.completed:
        batch = client.batches.retrieve(batch.id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    assert batch.status == "cancelled"
    output, errors = records(client, batch.output_file_id), records(client, batch.error_file_id)
    assert sorted([*output, *errors]) == sorted(item["custom_id"] for item in lines)
    assert len(output) >= 1
    assert {record["error"]["code"] for record in errors.values()} == {"batch_cancelled"}
    server.wait_until_idle()
