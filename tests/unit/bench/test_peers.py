"""Other engines beside ours: their list, what is counted, and what becomes of what is measured."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from research.bench.host.processes import Process, ProcessSample, Watch, below, processes
from research.bench.host.serving import free_port, server
from research.bench.peers.__main__ import main
from research.bench.peers.catalog import PEERS, chosen
from research.bench.peers.config import Peer, PeersConfig
from research.bench.peers.making import ENVIRONMENTS, LISTS, model_path
from research.bench.peers.running import http_point, offline_point, placeholders, waves
from research.bench.peers.shapes import KINDS, N_CTX, shape_of
from research.bench.peers.table import PeerPoint, PeerResult, markdown
from research.bench.server.load import send
from srm.errors import ConfigError
from srm.loadtest.commands.run_command import summed_up
from srm.loadtest.records import ROOT
from tests.kit.loads.toy_server import ToyConfig, ToyServer


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peer_can_be_started_with_the_package_that_is_pinned(peer: Peer, tmp_path: Path) -> None:
    config = PeersConfig(peers_dir=tmp_path, dtype="bfloat16")
    values = placeholders(peer, config, tmp_path / "model")
    command = [part.format(**values) for part in peer.command]
    if peer.how in {"http", "states"}:
        assert values["port"] in command
        assert str(tmp_path / "model") in command
    else:
        (program,) = command
        assert (ROOT / "research" / "bench" / "peers" / "programs" / f"{program}.py").is_file()
    assert list(peer.concurrency) == sorted(peer.concurrency)
    assert peer.most == 0 or peer.how == "http" or max(peer.concurrency) <= peer.most
    assert values["dtype"] == ("bfloat16" if peer.is_narrow else "float32")
    assert shape_of(peer.model).name == peer.model and shape_of(peer.model).kind in KINDS
    if peer.environment:
        lines = (LISTS / f"{peer.environment}.txt").read_text().lower().replace("_", "-")
        assert [line for line in lines.splitlines() if line.startswith(f"{peer.package}==")]


def test_every_line_of_a_list_is_a_version() -> None:
    for name in ENVIRONMENTS:
        for line in (LISTS / f"{name}.txt").read_text().splitlines():
            package, _, version = line.partition("==")
            assert package and version, line
            assert "+" not in version, "a build that only some indexes have"


def test_peers_are_told_apart_and_chosen_by_the_beginning_of_their_names(tmp_path: Path) -> None:
    assert len({peer.name for peer in PEERS}) == len(PEERS)
    paths = {model_path(peer, tmp_path) for peer in PEERS}
    assert len(paths) == len({(peer.model, peer.suffix) for peer in PEERS})
    assert chosen(()) == list(PEERS)
    assert {peer.name for peer in chosen(("srm-512-http", "vllm"))} == {"srm-512-http", "vllm-http"}
    with pytest.raises(ConfigError, match="'tgi' begins no name"):
        chosen(("tgi",))


def test_the_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--peers=vllm,srm-512-http"]) == 0
    assert capsys.readouterr().out == "srm-512-http\nvllm-http\n"
    assert main([]) == 0
    assert "measure all of them and ours" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="knows setup, run, states, trees and list, got 'walk'"):
        main(["walk"])
    with pytest.raises(ConfigError, match="peers: `trees` measures none of vllm-http"):
        main(["trees", "--peers=vllm-http"])


def test_waves_fill_the_time_that_is_wanted() -> None:
    config = PeersConfig(seconds=8, output_tokens=128)
    assert waves(1024.0, 16, config) == 4  # 16 * 128 tokens take 2 s
    assert waves(100.0, 256, config) == 1  # one takes far longer


@pytest.mark.parametrize(
    ("name", "mflop", "width", "kib"),
    [
        ("srm-256", 14.7, 4, 8),
        ("srm-512", 50.3, 4, 16),
        ("srm-1024", 184.5, 4, 32),
        ("llama-512", 75.5, 2, 8 * 1024),
        ("llama-512", 75.5, 4, 2 * 8 * N_CTX * 512 * 4 / 1024),
        ("llama-512-20480", 75.5, 2, 2 * 8 * 20_480),
        ("mamba2-512-20480", 49.5, 4, 12 * (1024 * 128 + 3 * 1280) * 4 / 1024),
    ],
)
def test_what_a_token_costs_and_a_sequence_keeps(
    name: str, mflop: float, width: int, kib: float
) -> None:
    assert shape_of(name).flops_per_token / 1e6 == pytest.approx(mflop, abs=0.05)
    assert shape_of(name).state_bytes(width) == kib * 1024


def point(concurrency: int, rate: float, **more: Any) -> PeerPoint:
    known: dict[str, Any] = {"seconds": [1.0], "rss_bytes": 2**30, "foreign_cpus": 0.0}
    return PeerPoint(concurrency=concurrency, tokens_per_s=rate, **(known | more))


def result(name: str, model: str, *points: PeerPoint, **more: Any) -> PeerResult:
    known: dict[str, Any] = {
        "engine": name,
        "how": "http",
        "version": "this commit" if name.startswith("srm") else "1.0",
        "dtype": "float32",
        **{"flops_per_token": 10**8, "state_bytes": 2**20, "most": 0},
        **{"command": "serve", "settings": ""},
    }
    return PeerResult(name=name, model=model, points=points, **(known | more))


def test_useful_concurrency_is_fast_enough_and_fits() -> None:
    rows = [point(1, 50), point(16, 95), point(64, 100), point(256, 91), point(1024, 89)]
    results = result("a", "llama-512", *rows)
    assert results.useful(0.9, 8 * 2**30) == 256
    assert results.useful(0.9, 2**29) == 0
    large = result("a", "llama-512", *rows[:3], point(256, 99, rss_bytes=9 * 2**30))
    assert large.useful(0.9, 8 * 2**30) == 64
    assert result("a", "llama-512", *rows, most=1).useful(0.9, 8 * 2**30) == 1
    assert results.fitting(8 * 2**30) == 8192
    assert result("a", "llama-512", most=256).fitting(8 * 2**30) == 256


def watch_of(*samples: ProcessSample) -> Watch:
    watch = Watch()
    watch.samples += samples
    return watch


def test_memory_and_strangers_are_those_of_the_time_that_is_asked_for() -> None:
    watch = watch_of(
        ProcessSample(0.0, 10.0, 5.0, 900),
        ProcessSample(1.0, 12.0, 6.0, 100),
        ProcessSample(3.0, 16.0, 9.0, 300),  # 4 s of CPU in 2 s, 3 of them ours
        ProcessSample(4.0, 30.0, 9.0, 700),
    )
    assert watch.peak_rss(0.5, 3.5) == 300
    assert watch.foreign_cpus(0.5, 3.5) == pytest.approx(0.5)
    assert watch.foreign_cpus(0.5, 1.5) is None, "one look tells nothing"
    line = {"concurrency": 4, "tokens": 100, "seconds": [5.0, 1.0, 2.0], "began": 0, "ended": 8}
    assert offline_point(line, watch).tokens_per_s == 50.0
    assert offline_point(line, watch).rss_bytes == 900


def test_a_point_over_http_is_what_the_load_test_says_of_the_whole_run() -> None:
    with ToyServer(ToyConfig(ttft_s=0.01, itl_s=0.001)) as toy:
        results = send(toy.url, requests=3, n="1", output_tokens="4")
        assert results.requests["usage_output_tokens"].tolist() == [4, 4, 4]
        whole = send(toy.url, requests=2, n="2", output_tokens="4", stream=False)
    run = summed_up(results)
    made = http_point(run, 3, watch_of(), 0.0, 4.0)
    assert made.tokens_per_s == run.summary.output_tokens_per_s > 0
    assert made.ttft_p99 is not None and made.ttft_p99 >= 0.01
    assert made.foreign_cpus is None
    assert http_point(summed_up(whole), 2, watch_of(), 0.0, 4.0).ttft_p50 is None
    silent = dataclasses.replace(run, summary=replace(run.summary, output_tokens_per_s=0.0))
    with pytest.raises(ConfigError, match="no tokens"):
        http_point(silent, 3, watch_of(), 0.0, 4.0)


def test_a_load_that_is_not_all_answered_is_an_error() -> None:
    with (
        ToyServer(fault=lambda number: "500" if number == 2 else None) as toy,
        pytest.raises(ConfigError, match=r"2 of 3 requests: \{.*: 1\}"),
    ):
        send(toy.url, requests=3, n="1", output_tokens="4")


def test_a_tree_of_processes_is_all_that_descends() -> None:
    parents = {1: 0, 2: 1, 3: 2, 4: 1, 5: 3}
    table = {pid: Process(parent, 0.0, 0) for pid, parent in parents.items()}
    assert below(2, table) == {2, 3, 5}
    assert below(9, table) == set()


def test_the_table_of_processes_has_this_one_and_what_it_watches() -> None:
    me = processes()[os.getpid()]
    assert me.parent == os.getppid()
    assert me.rss_bytes > 2**20
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process, Watch() as watch:
        watch.pid = process.pid
        while not watch.peak_rss(0, float("inf")):
            time.sleep(0.05)
        process.kill()


def test_the_record_becomes_tables() -> None:
    ours = result("srm-1024-http", "srm-1024", point(64, 200, ttft_p50=0.1, ttft_p99=0.3))
    late = point(64, 100, foreign_cpus=0.5, ttft_p50=0.2, ttft_p99=0.4)
    theirs = result("vllm-http", "llama-512", late, flops_per_token=5 * 10**7)
    failed = result("max", "llama-512", failure="one\nthe server ended")
    record = {
        "settings": {"prompt_tokens": 32, "output_tokens": 128},
        "peak_gflops": {"float32": 100.0},
        "results": msgspec.to_builtins([ours, theirs, failed]),
    }
    text = "\n".join(markdown(record))
    assert "| vllm-http | llama-512 | 2.00 (4.00) |" in text
    assert "| 20% |" in text  # 200 tok/s of 100 MFLOP in 100 GFLOP/s
    assert "100†" in text
    assert "| vllm-http, http | llama-512 | 1,024 KiB | 64 | 8,192 | 1 | 32 |" in text
    assert "- `max`: the server ended" in text


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
