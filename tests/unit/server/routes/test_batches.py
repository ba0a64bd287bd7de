"""What becomes of requests for batches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from engine.errors import BatchesUnavailable, NotFound
from server.config import ServerConfig
from server.errors import status_of
from server.routes.batches import Batches, BatchQuery
from server.storage.store import Store
from tests.chaos.jobs import completion_line, submit


async def test_a_batch_is_refused_while_none_can_run(tmp_path: Path) -> None:
    why = tmp_path / "why"
    body = msgspec.json.encode(
        {
            "input_file_id": "file-" + "0" * 32,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
    )
    with ThreadPoolExecutor(1) as threads:
        batches = Batches(
            Store(tmp_path), threads, ServerConfig(why_no_jobs=str(why)), has_chats=False
        )
        why.write_text("jobs ended 6 times")
        with pytest.raises(BatchesUnavailable, match="not run now: jobs ended 6 times") as refused:
            await batches.create(body)
        assert status_of(refused.value) == 503
        why.unlink()
        with pytest.raises(NotFound, match="there is no file"):
            await batches.create(body)


async def test_a_batch_of_another_model_says_what_it_waits_for(tmp_path: Path) -> None:
    batch = submit(tmp_path, [completion_line(1)], model="theirs", model_id="a")
    with ThreadPoolExecutor(1) as threads:
        mine, theirs, named = (
            Batches(
                Store(tmp_path),
                threads,
                ServerConfig(served_model_name=name, model_id=id),
                has_chats=False,
            )
            for name, id in (("mine", "b"), ("renamed", "a"), ("theirs", "b"))
        )
        assert (await theirs.get(batch.id)).errors is None
        errors = (await mine.get(batch.id)).errors
        assert errors is not None
        assert [error.code for error in errors.data] == ["other_model"]
        assert (
            "'theirs', runs it, with this data_dir; this one has 'mine'" in errors.data[0].message
        )
        (listed,) = (await named.list(BatchQuery())).data
        assert listed.errors is not None
        assert listed.errors.data[0].message.endswith("of other weights or another tokenizer")
