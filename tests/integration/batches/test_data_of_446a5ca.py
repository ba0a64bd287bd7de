"""A data_dir that commit 446a5ca wrote is opened: files, finished batches, those under way.

`data_of_446a5ca/tiny` is its model of `tests.kit.serving.write_text_model`, and `data` what its
`srm serve` on `tests.kit.processes.held_engine` left: a batch that was done, and one of two lines,
stopped behind the first and at a dozen tokens of the second, which are in the snapshot. Since then
`clock.json` was taken out and every `expires_at` set to the year 2100.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.serving import SERVER_FLAGS, Server, wait_until

WRITTEN = Path(__file__).with_name("data_of_446a5ca")


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Today's server on a copy, once the batch that was under way has ended."""
    copy = tmp_path_factory.mktemp("upgrade") / "446a5ca"
    shutil.copytree(WRITTEN, copy)
    with Server(copy / "tiny", *SERVER_FLAGS, f"--data-dir={copy / 'data'}") as server:
        wait_until(lambda: all(batch["status"] == "completed" for batch in listed(server).values()))
        yield server


def listed(server: Server, of: str = "batches", name: str = "id") -> dict[str, dict[str, Any]]:
    return {record[name]: record for record in server.get(f"/v1/{of}").json()["data"]}


def contents(server: Server, file: str) -> str:
    reply = server.get(f"/v1/files/{file}/content")
    assert reply.status_code == 200, reply.text
    return reply.text


def batch_of(server: Server, filename: str) -> dict[str, Any]:
    """The batch whose input was uploaded under this name."""
    file = listed(server, "files", "filename")[filename]["id"]
    (batch,) = (item for item in listed(server).values() if item["input_file_id"] == file)
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert batch["metadata"] == {"of": "446a5ca"}
    return batch


def test_files_are_what_they_were(upgraded: Server) -> None:
    files = listed(upgraded, "files")
    assert len(files) == 4  # two inputs, and the output of each
    for path in (WRITTEN / "data" / "files").glob("*.json"):
        record = json.loads(path.read_text())
        shown = files[record["id"]]
        assert shown["filename"] == record["filename"] and shown["purpose"] == record["purpose"]
        assert contents(upgraded, record["id"]) == path.with_suffix("").read_text()


def test_a_batch_that_was_done_is_done_and_has_its_output(upgraded: Server) -> None:
    batch = batch_of(upgraded, "done.jsonl")
    written = WRITTEN / "data" / "files" / batch["output_file_id"]
    assert contents(upgraded, batch["output_file_id"]) == written.read_text()


def test_a_batch_that_was_under_way_goes_on_at_its_tokens(upgraded: Server) -> None:
    batch = batch_of(upgraded, "open.jsonl")
    output = contents(upgraded, batch["output_file_id"])
    before = (WRITTEN / "data" / "files" / batch["output_file_id"]).read_text()
    assert before.count("\n") == 1 and output.startswith(before)
    first, second = map(json.loads, output.splitlines())
    assert [first["custom_id"], second["custom_id"]] == ["open-0", "open-1"]
    (choice,) = second["response"]["body"]["choices"]
    assert len(choice["token_ids"]) == 40 and choice["finish_reason"] == "length"
    assert upgraded.metric("srm_restored_sequences_total") == 1
    lines = contents(upgraded, batch["input_file_id"]).splitlines()
    assert upgraded.post(**json.loads(lines[1])["body"]).json()["choices"] == [choice]
