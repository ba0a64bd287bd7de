"""Runs a scenario's requests as a batch, from the file to its results, and times each part."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ConfigError
from engine.records import new_record
from loadtest.commands.offline import Offline
from loadtest.scenario import Scenario
from loadtest.workload.batch_file import BatchClient, Output, write_lines
from loadtest.workload.workload import Workload


def run_batch(
    scenario: Scenario,
    lines: int,
    route: str,
    client: BatchClient,
    command: str,
    say: Callable[[str], None],
) -> Offline:
    """Run the batch. Raises ConfigError if the server has no batches, or answers none of the lines.

    Ctrl-C cancels the batch. The files on the server are deleted in any case.
    """
    with tempfile.TemporaryDirectory(prefix="srm-loadtest-") as folder:
        path = Path(folder) / "lines.jsonl"
        write_lines(path, route, _bodies(scenario, lines))
        say(f"{lines:,} lines, {path.stat().st_size:,} bytes")
        started_unix, begun = time.time(), time.monotonic()
        source = client.upload(path)
    uploaded = time.monotonic()
    files = [source]
    try:
        batch = _until_ended(client, client.start(source, route), say)
        ended = time.monotonic()
        output = Output()
        for name in ("output_file_id", "error_file_id"):
            if batch.get(name):
                files.append(batch[name])
                client.read(batch[name], output)
        done = time.monotonic()
    finally:
        for file in files:
            _delete(client, file, say)
    if not output.lines:
        said = output.first_error or f"{batch['status']}: {batch.get('errors')}"
        raise ConfigError(f"no line of the batch was answered: {said}")
    known = output.output_tokens if not output.without_usage else -1
    return Offline(
        kind="batch",
        form="",
        command=command,
        url=scenario.url,
        model=scenario.served_model_name,
        server_version="",
        machine=new_record(command)["machine"],
        started_unix=started_unix,
        completed=output.lines,
        failed=lines - output.lines,
        samples=output.choices,
        prompt_tokens=output.prompt_tokens if not output.without_usage else -1,
        output_tokens=known,
        num_bytes=output.num_bytes,
        first_sample_s=None,
        upload_s=uploaded - begun,
        run_s=ended - uploaded,
        download_s=done - ended,
        seconds=done - begun,
        output_tokens_per_s=known / (done - begun) if known >= 0 else None,
        samples_per_s=output.choices / (done - begun),
        first_error=output.first_error,
    )


def _bodies(scenario: Scenario, lines: int) -> Iterator[dict[str, Any]]:
    workload = Workload(msgspec.structs.replace(scenario, stream=False))
    for index in range(lines):
        yield msgspec.json.decode(workload.request(index).body)


def _until_ended(client: BatchClient, id: str, say: Callable[[str], None]) -> dict[str, Any]:
    told = ""

    def tell(batch: dict[str, Any]) -> None:
        nonlocal told
        counts = batch.get("request_counts") or {}
        done, total = counts.get("completed", 0), counts.get("total", 0)
        failed = counts.get("failed", 0)
        line = f"{batch['status']}: {done:,} of {total:,} lines, {failed:,} failed"
        if line != told:
            say(line)
        told = line

    try:
        return client.wait(id, tell)
    except KeyboardInterrupt:
        client.cancel(id)
        client.wait(id, tell)
        raise


def _delete(client: BatchClient, file_id: str, say: Callable[[str], None]) -> None:
    """Delete a file on the server; if that fails, say so and go on."""
    try:
        client.delete(file_id)
    except ConfigError as error:
        say(f"{file_id} is left on the server: {error.message}")
