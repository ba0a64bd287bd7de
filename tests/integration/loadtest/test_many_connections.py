"""20,000 connections at once, from two client processes to two servers that share a port."""

from __future__ import annotations

import resource
import subprocess
import sys
from contextlib import ExitStack

import numpy as np
import pytest

from tests.kit.loads.run_loadtest import loaded
from tests.kit.serving import ROOT, free_port

CONNECTIONS = 20_000


@pytest.mark.slow
def test_twenty_thousand_connections_at_once() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < CONNECTIONS // 2 + 2_000:
        pytest.skip("the system allows too few open files")
    port = free_port()
    command = (sys.executable, "-m", "tests.kit.loads.canned", f"--port={port}", "--seconds=60")
    with ExitStack() as stack:
        for _ in range(2):
            server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            stack.enter_context(server)
            stack.callback(server.terminate)
            assert server.stdout is not None and server.stdout.readline().startswith("Serving")
        url, limits = f"http://127.0.0.1:{port}", {"duration_s": 0.0, "grace_s": 300.0}
        load = {"concurrency": CONNECTIONS, "requests": CONNECTIONS, "workers": 2}
        run = loaded(url, **load, **limits, served_model_name="canned")
    requests, clients = run.recording.requests, run.recording.clients
    assert run.summary.errors == {}
    connected, first_end = np.nanmax(requests["first_byte"]), requests["ended"].min()
    print(
        f"connected within {connected:.2f} s; ended in {requests['ended'].max() - first_end:.2f} s;"
        f" CPU of clients {clients['cpu_s'].sum():.2f} s; worst lag {clients['lag_s'].max():.3f} s"
    )
    assert np.count_nonzero(requests["first_byte"] <= first_end) == CONNECTIONS
    assert (requests["usage_output_tokens"] == requests["output_tokens"]).all()
