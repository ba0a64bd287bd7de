"""`srm loadtest offline`: a server's throughput when nobody waits for single answers.

Sends either one request for very many samples of one prompt, or a file of requests through
/v1/batches. The result is how long the whole took and how many tokens that is a second.
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from srm.errors import ConfigError
from srm.loadtest.client.target import PATHS, api_key, base_url, resolve
from srm.loadtest.commands import run_command
from srm.loadtest.recording import ERRORS, Recording
from srm.loadtest.records import new_record
from srm.loadtest.report.report_files import write_reports
from srm.loadtest.scenario import Scenario, command_of, must
from srm.loadtest.workload.batch_file import BatchClient, BatchOutput, write_lines
from srm.loadtest.workload.workload import Workload
from srm.settings import build, read_settings

FORMS: dict[str, tuple[bool, dict[str, Any]]] = {
    "stream": (True, {}),
    "whole": (False, {}),
    "stream_whole": (True, {"stream_whole": True}),
    "packed": (False, {"return_packed": True}),
}
"""For each `form`, whether the reply is streamed, and further members of the request's body."""


class OfflineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm loadtest offline`, beside those of a scenario."""

    kind: Literal["samples", "batch"] = "samples"
    """One request for `samples` completions of one prompt, or a file of `lines` requests through
    /v1/files and /v1/batches. Arrivals, durations and `n` of the scenario are not used for the
    former, nor is `stream`; the latter also has no use for `retries` and `workers`."""
    samples: int = 100_000
    """Value of `n` in the request; for kind samples."""
    form: Literal["stream", "whole", "stream_whole", "packed"] = "stream"
    """How samples come back: token by token, or in one reply. The rest are fields of this server:
    each when it has ended, or all in one reply, as arrays in base64 without text."""
    lines: int = 1000
    """Number of requests in the file; for kind batch."""

    def __post_init__(self) -> None:
        for name in ("samples", "lines"):
            must(self, getattr(self, name) >= 1, name, "at least 1")

    def one_request(self, scenario: Scenario) -> Scenario:
        """Return a scenario of one request, for all samples."""
        stream, members = FORMS[self.form]
        extra = msgspec.json.decode(scenario.extra_body, type=dict[str, Any])
        return msgspec.structs.replace(
            scenario,
            arrivals="synchronous",
            requests=1,
            **{"duration_s": 0.0, "warmup_s": 0.0, "cooldown_s": 0.0, "rate_end": 0.0},
            trace=None,
            workers=1,
            grace_s=scenario.timeout_s,
            n=str(self.samples),
            stream=stream,
            extra_body=msgspec.json.encode(extra | members).decode(),
        )


class Offline(msgspec.Struct, frozen=True, kw_only=True):
    """The result, saved as offline.json. Times are seconds since the first byte was sent."""

    kind: str
    form: str = ""
    command: str
    url: str
    model: str
    server_version: str = ""
    machine: str
    started_unix: float
    completed: int
    """Requests, or lines, that were answered."""
    failed: int
    samples: int
    prompt_tokens: int
    output_tokens: int
    """Number of output tokens that the server reports; -1: it reports none."""
    num_bytes: int
    """Bytes received."""
    first_sample_s: float | None = None
    """Time at which the first sample was whole; None: unknown, since the reply was not streamed."""
    upload_s: float | None = None
    """Seconds until the file was uploaded; None but for a batch."""
    run_s: float | None = None
    """Seconds from the upload until the batch's end, polled every quarter second; None but for a
    batch."""
    download_s: float | None = None
    """Seconds that reading the results took; None but for a batch."""
    seconds: float
    """Seconds until everything was received."""
    output_tokens_per_s: float | None
    samples_per_s: float
    first_error: str = ""


def _of_recording(config: OfflineConfig, recording: Recording) -> Offline:
    """Return the result of a run of one request."""
    about = recording.about
    (request,) = recording.requests
    failed = request["error"] != 0
    reported, counted = int(request["usage_output_tokens"]), int(request["output_tokens"])
    events = recording.events
    ends = np.full(int(events["choice"].max()) + 1 if len(events) else 0, -math.inf)
    np.maximum.at(ends, events["choice"], events["time"])
    came = ends[np.isfinite(ends)]
    is_stream = about.scenario.stream and len(came) > 0
    return _offline(
        about.scenario,
        float(request["ended"] - request["sent"]),
        len(came),
        reported if reported >= 0 else counted,
        kind=config.kind,
        form=config.form,
        command=about.command,
        server_version=about.versions.get("server", ""),
        machine=about.machine,
        started_unix=about.started_unix,
        completed=int(not failed),
        failed=int(failed),
        prompt_tokens=int(request["usage_prompt_tokens"]),
        num_bytes=int(request["num_bytes"]),
        first_sample_s=float(came.min() - request["sent"]) if is_stream else None,
        first_error="; ".join(f"{kind}: {why}" for kind, why in about.reasons.items())
        or (f"{ERRORS[request['error']]}, status {request['status']}" if failed else ""),
    )


def _offline(
    scenario: Scenario, seconds: float, samples: int, output_tokens: int, **rest: Any
) -> Offline:
    """Return the result with its rates; -1 tokens are unknown."""
    is_counted = output_tokens >= 0 and seconds > 0
    return Offline(
        url=scenario.url,
        model=scenario.served_model_name,
        seconds=seconds,
        samples=samples,
        samples_per_s=samples / seconds if seconds > 0 else 0.0,
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / seconds if is_counted else None,
        **rest,
    )


def _table(measured: Offline) -> str:
    """Return a table in Markdown, which offline.md has as well."""
    rows = {
        "answered": f"{measured.completed:,} of {measured.completed + measured.failed:,}",
        "samples": f"{measured.samples:,}",
        "prompt tokens": f"{measured.prompt_tokens:,}",
        "output tokens": f"{measured.output_tokens:,}",
        "received": f"{measured.num_bytes:,} bytes",
        "upload": _seconds(measured.upload_s),
        "run": _seconds(measured.run_s),
        "download": _seconds(measured.download_s),
        "until the first sample was whole": _seconds(measured.first_sample_s),
        "until the last was there": _seconds(measured.seconds),
        "samples a second": f"{measured.samples_per_s:,.1f}",
        "output tokens a second": "" if measured.output_tokens_per_s is None
        else f"{measured.output_tokens_per_s:,.0f}",
        "first error": measured.first_error,
    }  # fmt: skip
    lines = [f"| {name} | {value} |" for name, value in rows.items() if value not in {"", "-1"}]
    return "\n".join([f"| {measured.kind} {measured.form} | |", "|---|---|", *lines]) + "\n"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.3f} s"


def offline(argv: list[str], command: str) -> int:
    """Measure, print and report; return the exit code."""
    settings = (Scenario, OfflineConfig)
    about = "Time one request for very many samples, or a file of requests as a batch."
    way = command_of("offline", about, "--samples 100000")
    given = read_settings(settings, argv, way)
    scenario, config = build(Scenario, given), build(OfflineConfig, given)
    run_command.check(scenario)
    scenario, command = run_command.seeded(scenario, command)
    if config.kind == "batch":
        return _batch(scenario, config, command)
    recording = run_command.record(config.one_request(scenario), command, scenario.output)
    measured = _of_recording(config, recording)
    _write(scenario.output, measured)
    if recording.about.stopped_by == "interrupt":
        return run_command.INTERRUPTED
    run = run_command.summed_up(recording, f"{config.samples:,} samples, {config.form}")
    write_reports(scenario.output, [run])
    sys.stdout.write(run_command.where(scenario.output))
    return run_command.exit_code([run])


def _batch(scenario: Scenario, config: OfflineConfig, command: str) -> int:
    target = asyncio.run(resolve(scenario))
    scenario = msgspec.structs.replace(scenario, served_model_name=target.model)
    try:
        with BatchClient(base_url(scenario), api_key(scenario)) as client:
            measured = run_batch(scenario, config.lines, client, command)
    except KeyboardInterrupt:
        run_command.say("interrupted: the batch was cancelled, nothing is reported")
        return run_command.INTERRUPTED
    _write(scenario.output, measured)
    return int(measured.failed > 0)


def _write(folder: Path, measured: Offline) -> None:
    table = _table(measured)
    sys.stdout.write(table)
    folder.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(measured), indent=1)
    (folder / "offline.json").write_bytes(content + b"\n")
    heading = f"# Offline throughput\n\n`{measured.command}` on {measured.machine}.\n\n"
    (folder / "offline.md").write_text(heading + table)
    run_command.say(f"{folder / 'offline.md'}")


def run_batch(scenario: Scenario, lines: int, client: BatchClient, command: str) -> Offline:
    """Run a scenario's requests as a batch, from the file to its results, and time each part.

    Raises ConfigError if the server has no batches, or answers none of the lines. Ctrl-C
    cancels the batch. The files on the server are deleted in any case.
    """
    route = PATHS[scenario.api]
    with tempfile.TemporaryDirectory(prefix="srm-loadtest-") as folder:
        path = Path(folder) / "lines.jsonl"
        workload = Workload(msgspec.structs.replace(scenario, stream=False))
        requests = (workload.request(index) for index in range(lines))
        write_lines(path, route, (msgspec.json.decode(request.body) for request in requests))
        run_command.say(f"{lines:,} lines, {path.stat().st_size:,} bytes")
        started_unix, begun = time.time(), time.monotonic()
        source = client.upload(path)
    uploaded = time.monotonic()
    files = [source]
    try:
        batch = _until_ended(client, client.start(source, route))
        ended = time.monotonic()
        output = BatchOutput()
        for name in ("output_file_id", "error_file_id"):
            if batch.get(name):
                files.append(batch[name])
                client.read(batch[name], output)
        done = time.monotonic()
    finally:
        _delete(client, files)
    if not output.lines:
        message = output.first_error or f"{batch['status']}: {batch.get('errors')}"
        raise ConfigError(f"no line of the batch was answered: {message}")
    return _offline(
        scenario,
        done - begun,
        output.choices,
        -1 if output.without_usage else output.output_tokens,
        kind="batch",
        command=command,
        machine=new_record(command)["machine"],
        started_unix=started_unix,
        completed=output.lines,
        failed=lines - output.lines,
        prompt_tokens=-1 if output.without_usage else output.prompt_tokens,
        num_bytes=output.num_bytes,
        upload_s=uploaded - begun,
        run_s=ended - uploaded,
        download_s=done - ended,
        first_error=output.first_error,
    )


def _delete(client: BatchClient, files: list[str]) -> None:
    for file in files:
        try:
            client.delete(file)
        except ConfigError as error:
            run_command.say(f"{file} is left on the server: {error.message}")


def _until_ended(client: BatchClient, id: str) -> dict[str, Any]:
    reported = ""

    def tell(batch: dict[str, Any]) -> None:
        nonlocal reported
        counts = batch.get("request_counts") or {}
        done, total, failed = (counts.get(name, 0) for name in ("completed", "total", "failed"))
        line = f"{batch['status']}: {done:,} of {total:,} lines, {failed:,} failed"
        if line != reported:
            run_command.say(line)
        reported = line

    try:
        return client.wait(id, tell)
    except KeyboardInterrupt:
        client.cancel(id)
        client.wait(id, tell)
        raise
