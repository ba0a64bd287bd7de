"""`srm loadtest offline`: a server's throughput when nobody waits for single answers.

Sends either one request for very many samples of one prompt, or a file of requests through
/v1/batches. The result is how long the whole took and how many tokens that is a second.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
import numpy as np

from loadtest.recording import ERRORS, Recording
from loadtest.scenario import Scenario

FORMS: dict[str, tuple[bool, dict[str, Any]]] = {
    "stream": (True, {}),
    "whole": (False, {}),
    "stream_whole": (True, {"stream_whole": True}),
    "packed": (False, {"return_packed": True}),
}
"""By `form`: whether the reply is streamed, and further members of the body."""


class OfflineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm loadtest offline`, beside those of a scenario."""

    kind: Literal["samples", "batch"] = "samples"
    """One request for `samples` completions of one prompt, or a file of `lines` requests through
    /v1/files and /v1/batches. Arrivals, durations and `n` of the scenario are not used for the
    former, nor is `stream`; the latter also has no use for `retries` and `workers`."""
    samples: int = 100_000
    """Of kind samples: `n` of the request."""
    form: Literal["stream", "whole", "stream_whole", "packed"] = "stream"
    """How samples come back: token by token, or in one reply. The rest are fields of this server:
    each when it has ended, or all in one reply, as arrays in base64 without text."""
    lines: int = 1000
    """Of kind batch: requests in the file."""

    def __post_init__(self) -> None:
        for name in ("samples", "lines"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

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


class Offline(msgspec.Struct, frozen=True):
    """The result, saved as offline.json. Times are seconds since the first byte was sent."""

    kind: str
    form: str
    command: str
    url: str
    model: str
    server_version: str
    machine: str
    started_unix: float
    completed: int
    """Requests, or lines, that were answered."""
    failed: int
    samples: int
    prompt_tokens: int
    output_tokens: int
    """As the server says; -1: it does not."""
    num_bytes: int
    """Bytes received."""
    first_sample_s: float | None
    """When the first sample was whole. None: unknown, since the reply was not streamed."""
    upload_s: float | None
    """In a batch, seconds until the file was uploaded."""
    run_s: float | None
    """In a batch, seconds from the upload until the end, polled every quarter second."""
    download_s: float | None
    """In a batch, seconds that reading the results took."""
    seconds: float
    """Seconds until everything was received."""
    output_tokens_per_s: float | None
    samples_per_s: float
    first_error: str = ""


def of_recording(config: OfflineConfig, recording: Recording) -> Offline:
    """Return the result of a run of one request."""
    about = recording.about
    (request,) = recording.requests
    failed = request["error"] != 0
    told, counted = int(request["usage_output_tokens"]), int(request["output_tokens"])
    tokens = told if told >= 0 else counted
    seconds = float(request["ended"] - request["sent"])
    events = recording.events
    ends = np.full(int(events["choice"].max()) + 1 if len(events) else 0, -math.inf)
    np.maximum.at(ends, events["choice"], events["time"])
    came = ends[np.isfinite(ends)]
    is_stream = about.scenario.stream and len(came) > 0
    return Offline(
        kind=config.kind,
        form=config.form,
        command=about.command,
        url=about.scenario.url,
        model=about.scenario.served_model_name,
        server_version=about.versions.get("server", ""),
        machine=about.machine,
        started_unix=about.started_unix,
        completed=int(not failed),
        failed=int(failed),
        samples=len(came),
        prompt_tokens=int(request["usage_prompt_tokens"]),
        output_tokens=tokens,
        num_bytes=int(request["num_bytes"]),
        first_sample_s=float(came.min() - request["sent"]) if is_stream else None,
        upload_s=None,
        run_s=None,
        download_s=None,
        seconds=seconds,
        output_tokens_per_s=tokens / seconds if tokens >= 0 and seconds > 0 else None,
        samples_per_s=len(came) / seconds if seconds > 0 else 0.0,
        first_error=f"{ERRORS[request['error']]}, status {request['status']}" if failed else "",
    )
