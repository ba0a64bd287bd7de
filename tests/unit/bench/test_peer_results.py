"""From what is measured of peers to a result, a table and a picture."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from bench.peers.__main__ import peaks
from bench.peers.loading import http_point
from bench.peers.plot import draw
from bench.peers.result import Point, Result
from bench.peers.serving import free_port, server
from bench.peers.table import markdown
from bench.peers.timed import offline_point
from bench.peers.watching import Process, Sample, Watch, below, processes
from engine.errors import ConfigError


def point(concurrency: int, rate: float, **more: Any) -> Point:
    known: dict[str, Any] = {"seconds": [1.0], "rss_bytes": 2**30, "foreign_cpus": 0.0}
    return Point(concurrency=concurrency, tokens_per_s=rate, **(known | more))


def result(name: str, model: str, *points: Point, **more: Any) -> Result:
    known: dict[str, Any] = {
        "engine": name,
        "how": "http",
        "version": "this commit" if name.startswith("srm") else "1.0",
        "dtype": "float32",
        "flops_per_token": 10**8,
        "state_bytes": 2**20,
        "most": 0,
        "command": "serve",
        "settings": "",
    }
    return Result(name=name, model=model, points=points, **(known | more))


def test_useful_concurrency_is_fast_enough_and_fits() -> None:
    rows = [point(1, 50), point(16, 95), point(64, 100), point(256, 91), point(1024, 89)]
    found = result("a", "llama-512", *rows)
    assert found.useful(0.9, 8 * 2**30) == 256
    assert found.useful(0.9, 2**29) == 0
    large = result("a", "llama-512", *rows[:3], point(256, 99, rss_bytes=9 * 2**30))
    assert large.useful(0.9, 8 * 2**30) == 64
    assert result("a", "llama-512", *rows, most=1).useful(0.9, 8 * 2**30) == 1


def test_states_are_counted_into_memory_within_the_engines_limit() -> None:
    assert result("a", "llama-512").fitting(8 * 2**30) == 8192
    assert result("a", "llama-512", most=256).fitting(8 * 2**30) == 256


def watch_of(*samples: Sample) -> Watch:
    watch = Watch()
    watch.samples += samples
    return watch


def test_memory_and_strangers_are_those_of_the_time_that_is_asked_for() -> None:
    watch = watch_of(
        Sample(0.0, 10.0, 5.0, 900),
        Sample(1.0, 12.0, 6.0, 100),
        Sample(3.0, 16.0, 9.0, 300),  # 4 s of CPU in 2 s, 3 of them ours
        Sample(4.0, 30.0, 9.0, 700),
    )
    assert watch.peak_rss(0.5, 3.5) == 300
    assert watch.foreign_cpus(0.5, 3.5) == pytest.approx(0.5)
    assert watch.foreign_cpus(0.5, 1.5) is None, "one look tells nothing"


def test_a_tree_of_processes_is_all_that_descends() -> None:
    parents = {1: 0, 2: 1, 3: 2, 4: 1, 5: 3}
    table = {pid: Process(parent, 0.0, 0) for pid, parent in parents.items()}
    assert below(2, table) == {2, 3, 5}
    assert below(9, table) == set()


def test_the_table_of_processes_has_this_one() -> None:
    me = processes()[os.getpid()]
    assert me.parent == os.getppid()
    assert me.rss_bytes > 2**20


def test_a_point_over_http_is_what_the_harness_says_of_the_whole_run() -> None:
    quantiles = {"p50": 0.1, "p99": 0.2}
    summary = {
        "window": (0.0, 4.0),
        "output_tokens_per_s": 100.0,
        "ttft": quantiles,
        "itl": quantiles,
        "cpu_share": 0.3,
        "warnings": ["one"],
    }
    found = http_point(summary, 16, watch_of(), 0.0, 4.0)
    assert (found.tokens_per_s, found.ttft_p99, found.foreign_cpus) == (100.0, 0.2, None)
    with pytest.raises(ConfigError, match="no tokens"):
        http_point(summary | {"output_tokens_per_s": 0.0}, 16, watch_of(), 0.0, 4.0)


def test_a_point_of_a_program_is_its_median_repetition() -> None:
    line = {"concurrency": 4, "tokens": 100, "seconds": [5.0, 1.0, 2.0], "began": 0, "ended": 8}
    assert offline_point(line, watch_of()).tokens_per_s == 50.0


def test_the_peak_of_a_dtype_is_its_best_product() -> None:
    products = [("float32", 1.0), ("float32", 3.0), ("bfloat16", 2.0)]
    found = peaks([{"dtype": dtype, "gflops": gflops} for dtype, gflops in products])
    assert found == {"float32": 3.0, "bfloat16": 2.0}


def test_the_record_becomes_tables_and_a_picture(tmp_path: Path) -> None:
    ours = result("srm-1024-http", "srm-1024", point(64, 200, ttft_p50=0.1, ttft_p99=0.3))
    theirs = result(
        "vllm-http",
        "llama-512",
        point(64, 100, foreign_cpus=0.5, ttft_p50=0.2, ttft_p99=0.4),
        flops_per_token=5 * 10**7,
    )
    failed = result("max", "llama-512", failure="one\nthe server ended")
    record = {
        "settings": {"prompt_tokens": 32, "output_tokens": 128, "memory_gib": 8.0},
        "peak_gflops": {"float32": 100.0},
        "results": msgspec.to_builtins([ours, theirs, failed]),
    }
    text = markdown(record)
    assert "| vllm-http | llama-512 | 2.00 (4.00) |" in text
    assert "| 20% |" in text  # 200 tok/s of 100 MFLOP in 100 GFLOP/s
    assert "100†" in text
    assert "| vllm-http, http | llama-512 | 1,024 KiB | 64 | 8,192 | 1 | 32 |" in text
    assert "- `max`: the server ended" in text
    draw(record, tmp_path / "peers.svg")
    assert "<svg" in (tmp_path / "peers.svg").read_text()


ANSWERS_THE_SECOND = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    asked = 0
    def do_POST(self):
        Handler.asked += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(503 if Handler.asked < 2 else 200)
        self.end_headers()
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(Handler.asked).encode())
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_waited_for_and_gone_afterwards(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-c", ANSWERS_THE_SECOND, str(port)]
    ask = {"model": "one", "prompt": "a", "max_tokens": 1}
    with server(command, os.environ, port, ask, tmp_path / "server.log", 60) as process:
        assert process.poll() is None
        assert httpx.get(f"http://127.0.0.1:{port}/").text == "2"
    assert process.returncode is not None


def test_a_server_that_ends_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        pytest.raises(ConfigError, match="no such model"),
        server(command, os.environ, free_port(), {}, tmp_path / "server.log", 60),
    ):
        pass


def test_a_watch_sees_the_process_it_is_told_of() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process,
        Watch() as watch,
    ):
        watch.pid = process.pid
        while not watch.peak_rss(0, float("inf")):
            time.sleep(0.05)
        process.kill()
