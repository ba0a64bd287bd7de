"""/v1/batches against a server, while the store is moved on as the process that runs them does."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai.types import Batch

from srm.server.batch.jobs import lock_name
from srm.server.model_identity import model_id
from srm.server.storage.records import FileRecord
from srm.server.storage.store import Store
from tests.kit.serving import SERVER_FLAGS, Server, error_of

KEYS = "alice sk-aaaaaaaaaaaaaaaa\nbob sk-bbbbbbbbbbbbbbbb\n"
MAX_BATCHES = 4


@pytest.fixture(scope="module")
def store(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """With the lock of whoever runs its batches: these tests do, and no server."""
    folder = tmp_path_factory.mktemp("kept") / "data"
    folder.mkdir()
    with (folder / lock_name(model_id(text_model))).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Store(folder)


@pytest.fixture(scope="module")
def server(text_model: Path, store: Store) -> Iterator[Server]:
    keys = store.folder.parent / "keys"
    keys.write_text(KEYS)
    flags = (f"--data-dir={store.folder}", f"--api-keys-file={keys}")
    with Server(text_model, *SERVER_FLAGS, *flags, f"--max-batches={MAX_BATCHES}") as running:
        running.http.headers["authorization"] = "Bearer sk-aaaaaaaaaaaaaaaa"
        yield running


@pytest.fixture
def client(server: Server, store: Store) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="sk-aaaaaaaaaaaaaaaa", max_retries=0
    ) as client:
        yield client
    for batch in store.runnable_batches():
        store.finish_batch(batch.id, "cancelled")


@pytest.fixture
def input_file_id(client: openai.OpenAI) -> str:
    return client.files.create(file=("in.jsonl", b"{}\n"), purpose="batch").id


def create(client: openai.OpenAI, input_file_id: str, **fields: Any) -> Batch:
    return client.batches.create(
        input_file_id=input_file_id, endpoint="/v1/completions", completion_window="24h", **fields
    )


def test_the_states_of_a_batch(client: openai.OpenAI, store: Store, input_file_id: str) -> None:
    expiry = {"anchor": "created_at", "seconds": 7200}
    made = create(client, input_file_id, metadata={"run": "1"}, output_expires_after=expiry)
    Batch.model_validate(made.model_dump(), strict=True)
    assert (made.status, made.metadata, made.errors) == ("validating", {"run": "1"}, None)
    assert made.expires_at == made.created_at + 24 * 3600
    (record,) = store.runnable_batches()
    assert (record.owner, record.output_expires_after) == ("alice", 7200)

    store.allocate_output_ids(record)
    store.change_batch(record.id, "validating", status="in_progress", total=2, model="tiny")
    store.change_batch(
        record.id, "in_progress", completed=1, input_tokens=5, output_tokens=7, cached_tokens=2
    )
    running = client.batches.retrieve(made.id)
    assert running.status == "in_progress" and running.in_progress_at is not None
    assert running.output_file_id is None, "it is not there yet"
    counts, usage = running.request_counts, running.usage
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (2, 1, 0)
    assert usage is not None and usage.total_tokens == 12
    assert usage.input_tokens_details.cached_tokens == 2
    assert usage.output_tokens_details.reasoning_tokens == 0

    store.change_batch(record.id, "in_progress", status="finalizing")
    with pytest.raises(openai.ConflictError, match="is finalizing"):
        client.batches.cancel(made.id)
    with pytest.raises(openai.ConflictError, match="needed by batch") as refused:
        client.files.delete(input_file_id)
    assert refused.value.response.headers["x-should-retry"] == "false"
    output_id = store.allocate_output_ids(record).output_file_id or ""
    store.path_of(output_id).write_bytes(b"result\n")
    named = {"id": output_id, "owner": "alice", "filename": "out.jsonl", "purpose": "batch_output"}
    file = msgspec.convert({**named, "num_bytes": 7, "created_at": made.created_at}, FileRecord)
    store.finish_batch(record.id, "completed", [file], completed=2)
    done = client.batches.retrieve(made.id)
    Batch.model_validate(done.model_dump(), strict=True)
    assert (done.status, done.error_file_id) == ("completed", None)
    assert done.output_file_id is not None
    assert client.files.content(done.output_file_id).text == "result\n"
    assert client.files.retrieve(done.output_file_id).purpose == "batch_output"
    assert client.files.delete(input_file_id).deleted


def test_a_batch_is_cancelled_once(client: openai.OpenAI, store: Store, input_file_id: str) -> None:
    made = create(client, input_file_id)
    first = client.batches.cancel(made.id)
    assert first.status == "cancelling" and first.cancelling_at is not None
    assert client.batches.cancel(made.id) == first
    assert store.change_batch(made.id, "validating", status="in_progress") is None
    store.finish_batch(made.id, "cancelled")
    assert client.batches.cancel(made.id).status == "cancelled"


def test_the_sdk_walks_batches(client: openai.OpenAI, store: Store, input_file_id: str) -> None:
    made = []
    for _ in range(5):
        made.append(create(client, input_file_id).id)
        store.finish_batch(made[-1], "completed")
    ids = [batch.id for batch in client.batches.list(limit=2)]
    assert ids[:5] == made[::-1]
    assert len(ids) == len(set(ids))
    assert [batch.id for batch in client.batches.list(after=made[3], limit=3).data] == made[2::-1]


def test_each_key_sees_its_own(server: Server, client: openai.OpenAI, input_file_id: str) -> None:
    made = create(client, input_file_id)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-bbbbbbbbbbbbbbbb") as bob:
        assert bob.batches.list().data == []
        for call in (bob.batches.retrieve, bob.batches.cancel):
            with pytest.raises(openai.NotFoundError, match="no batch"):
                call(made.id)
        with pytest.raises(openai.NotFoundError, match="no file"):
            create(bob, input_file_id)
        with pytest.raises(openai.BadRequestError, match="after"):
            bob.batches.list(after=made.id)
    assert client.batches.retrieve(made.id).status == "validating"


def test_so_many_batches_run(client: openai.OpenAI, input_file_id: str) -> None:
    for _ in range(MAX_BATCHES):
        create(client, input_file_id)
    with pytest.raises(openai.RateLimitError, match="max_batches = 4") as refused:
        create(client, input_file_id)
    assert refused.value.response.headers["retry-after"] == "60"


def test_fields_and_queries_are_refused_by_name(server: Server, input_file_id: str) -> None:
    body = {"input_file_id": input_file_id, "endpoint": "/v1/completions"}
    body["completion_window"] = "24h"
    wrong: dict[str, list[Any]] = {
        "input_file_id": [None],
        "endpoint": [None, "/v1/embeddings"],
        "completion_window": [None, "0h", "31d", "721h", "24h\n", 24],
        "metadata": [{str(i): "x" for i in range(17)}, {"x" * 65: ""}, {"x": "x" * 513}, {"x": 1}],
        "output_expires_after": [{"anchor": "created_at"}, {"anchor": "created_at", "seconds": 1}],
        "weight": [0, 1001, 5e-324],
        "priority": [1001, 0.5],
        "n": [1],
    }
    for param, values in wrong.items():
        for value in values:
            reply = server.http.post("/v1/batches", json={**body, param: value})
            assert error_of(reply)["param"] == param, value
    for param, text in (("limit", "0"), ("limit", "101"), ("order", "asc"), ("after", "x")):
        assert error_of(server.get(f"/v1/batches?{param}={text}"))["param"] == param


def test_windows_are_hours_or_days(client: openai.OpenAI, input_file_id: str) -> None:
    for window, hours in (("1h", 1), ("720h", 720), ("7d", 168), ("30d", 720)):
        made = client.batches.create(
            input_file_id=input_file_id,
            endpoint="/v1/chat/completions",
            completion_window=window,  # type: ignore[arg-type]  # longer than OpenAI's
            extra_body={"weight": 2.5, "priority": -3},
        )
        assert made.expires_at == made.created_at + hours * 3600
        asked = made.model_extra
        assert asked is not None and (asked["weight"], asked["priority"]) == (2.5, -3)


def test_metrics_count_files_and_batches(
    server: Server, client: openai.OpenAI, store: Store, input_file_id: str
) -> None:
    before = server.metric("srm_batches", "validating")
    create(client, input_file_id)
    assert server.metric("srm_batches", "validating") == before + 1
    assert server.metric("srm_files_bytes") == store.bytes_of() > 0
