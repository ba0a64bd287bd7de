"""What becomes of requests for batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from srm.errors import NotFound
from srm.memory import write_text
from srm.server.errors import BatchesUnavailable, status_of
from srm.server.routes.batches import Batches, BatchQuery
from srm.server.storage.store import Store
from srm.server.wiring import ServerWiring
from tests.chaos.jobs import completion_line, submit

Make = Callable[..., Batches]


@pytest.fixture
def batches(tmp_path: Path) -> Iterator[Make]:
    """batches(**settings): of a server with these, over one store."""
    with ThreadPoolExecutor(1) as threads:
        yield lambda **settings: Batches(
            Store(tmp_path), threads, ServerWiring(**settings), has_chats=False
        )


async def test_a_batch_is_refused_while_none_can_run(tmp_path: Path, batches: Make) -> None:
    why = os.memfd_create("why")
    new = {"endpoint": "/v1/completions", "completion_window": "24h"}
    body = msgspec.json.encode({"input_file_id": "file-" + "0" * 32, **new})
    write_text(why, "jobs ended 6 times")
    with pytest.raises(BatchesUnavailable, match="not run now: jobs ended 6 times") as refused:
        await batches(why_no_jobs_fd=why).create(body)
    assert status_of(refused.value) == 503
    write_text(why, "")
    with pytest.raises(NotFound, match="there is no file"):
        await batches(why_no_jobs_fd=why).create(body)


async def test_a_batch_of_another_model_says_so(tmp_path: Path, batches: Make) -> None:
    batch = submit(tmp_path, [completion_line(1)], model="theirs", model_id="a")
    assert (await batches(served_model_name="renamed", model_id="a").get(batch.id)).errors is None
    errors = (await batches(served_model_name="mine", model_id="b").get(batch.id)).errors
    assert errors is not None
    assert [error.code for error in errors.data] == ["other_model"]
    assert "'theirs', runs it, with this data_dir; this one has 'mine'" in errors.data[0].message
    named = batches(served_model_name="theirs", model_id="b")
    (listed,) = (await named.list(BatchQuery())).data
    assert listed.errors is not None
    assert listed.errors.data[0].message.endswith("of other weights or another tokenizer")
