"""20,000 connections at once, from two client processes to two servers that share a port."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys

import numpy as np
import pytest

from loadtest.client.workers import run
from loadtest.recording import ERRORS
from loadtest.scenario import Scenario
from tests.serving import ROOT

CONNECTIONS = 20_000


@pytest.mark.slow
async def test_twenty_thousand_connections_at_once() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < CONNECTIONS // 2 + 2_000:
        pytest.skip("the system allows too few open files")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = (sys.executable, "-m", "tests.loads.canned", f"--port={port}", "--seconds=60")
    servers = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        for server in servers:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("Serving")
        scenario = Scenario(
            url=f"http://127.0.0.1:{port}",
            concurrency=CONNECTIONS,
            requests=CONNECTIONS,
            duration_s=0.0,
            grace_s=300.0,
            workers=2,
            served_model_name="canned",
        )
        recording = await run(scenario, print, "a test")
    finally:
        for server in servers:
            server.terminate()
            server.wait()
            assert server.stdout is not None
            server.stdout.close()
    requests = recording.requests
    found = {ERRORS[error] for error in requests["error"]}
    assert found == {"none"}
    last_sent, first_end = np.nanmax(requests["first_byte"]), requests["ended"].min()
    at_once = np.count_nonzero(requests["first_byte"] <= first_end)
    print(
        f"{at_once} at once; connected within {last_sent:.2f} s; ended in "
        f"{requests['ended'].max() - first_end:.2f} s; CPU of clients "
        f"{recording.clients['cpu_s'].sum():.2f} s; "
        f"worst lag {recording.clients['lag_s'].max():.3f} s"
    )
    assert at_once == CONNECTIONS
    assert (requests["usage_output_tokens"] == requests["output_tokens"]).all()
