"""`python -m research.bench.peers COMMAND`: installs other engines, and measures all in one run.

`run` measures the peers one after the other, between two measurements of the machine's peaks. A
peer with a result in `results` is not run again, so an interrupted run can be resumed.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from research.bench.frame import Record, note, record_run
from research.bench.host.processes import Watch
from research.bench.peaks.rates import peaks
from research.bench.peaks.torch_side import torch_products
from research.bench.peers import states, trees
from research.bench.peers.catalog import chosen
from research.bench.peers.config import Peer, PeersConfig
from research.bench.peers.making import ENVIRONMENTS, install, make_model
from research.bench.peers.running import run_peer, settings
from research.bench.peers.table import PeerResult, markdown
from srm.errors import ConfigError, SRMError
from srm.settings import load

USAGE = """usage: python -m research.bench.peers COMMAND [options]

  setup     install other engines, and make the models of all
  run       measure all of them and ours, and write a record
  states    measure what is left of a conversation after its server died
  trees     measure trees of samples beside independent samples
  list      their names

`python -m research.bench.peers run --help` explains the options.
"""
_ROWS, _SHAPES = (256, 2048), ((512, 2048), (1024, 4096))
"""Rows, and pairs of inner and columns, of the products that measure the machine's peak."""


def main(argv: list[str]) -> int:
    """Run one command and return its exit code."""
    name, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in {"--help", "-h"}:
        sys.stdout.write(USAGE)
        return 0
    if name not in {"setup", "list", *_MEASURED}:
        known = ", ".join(["setup", *_MEASURED])
        raise ConfigError(f"python -m research.bench.peers knows {known} and list, got {name!r}")
    config = load(PeersConfig, rest, prog=f"python -m research.bench.peers {name}")
    peers = chosen(config.peers)
    if name == "list":
        sys.stdout.write("".join(f"{peer.name}\n" for peer in peers))
    elif name == "setup":
        _set_up(peers, config)
    else:
        kinds, stem, measure, tables = _MEASURED[name]
        if not (asked := [peer for peer in peers if peer.how in kinds]):
            raise ConfigError(f"peers: `{name}` measures none of {', '.join(config.peers)}")
        command = " ".join([f"python -m research.bench.peers {name}", *rest])
        record_run(command, config, stem, partial(measure, asked, config), tables)
    return 0


def _set_up(peers: list[Peer], config: PeersConfig) -> None:
    config.folder.mkdir(parents=True, exist_ok=True)
    wanted = {peer.environment for peer in peers} | {"torch"}  # which makes the tokenizer of all
    for name in ENVIRONMENTS:
        if name in wanted:
            _say(f"environment {name}")
            install(name, config.folder)
    for peer in sorted(peers, key=lambda peer: len(peer.suffix)):  # some are made from plain ones
        _say(f"model {make_model(peer, config.folder)}")


def _measure(peers: list[Peer], config: PeersConfig) -> Record:
    before = _gemm(config)
    results = msgspec.to_builtins([_result(peer, config) for peer in peers])
    after = _gemm(config)
    gemm = {"gemm_before": before, "gemm_after": after, "peak_gflops": peaks(before + after)}
    return gemm | {"results": results}


def _result(peer: Peer, config: PeersConfig) -> PeerResult:
    """Return the saved result of the same settings, or measure and save one.

    Raises ConfigError if the saved result is of other settings.
    """
    path = config.results / f"{peer.name}.json"
    if path.exists():
        known = msgspec.json.decode(path.read_bytes(), type=PeerResult)
        if known.settings != settings(config):
            raise ConfigError(
                f"{path} was measured with {known.settings}; remove it, or name another `results`"
            )
        return known
    _say(f"{peer.name} at {', '.join(map(str, peer.concurrency))} sequences")
    shutil.rmtree(config.results / peer.name, ignore_errors=True)
    result = run_peer(peer, config)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
    for point in result.points:
        foreign = "" if point.foreign_cpus is None else f", {point.foreign_cpus:.2f} foreign CPUs"
        _say(f"  {point.concurrency}: {point.tokens_per_s:,.0f} tok/s{foreign}")
    if result.failure:
        _say(f"  {result.failure}")
    return result


def _gemm(config: PeersConfig) -> list[dict[str, Any]]:
    """Return torch's rates of matrix products; report foreign CPU use."""
    dtypes = tuple(dict.fromkeys(("float32", config.dtype)))
    with Watch() as watch:
        products = torch_products("cpu", dtypes, _ROWS, _SHAPES, 3, config.cores)
    foreign = watch.foreign_cpus(0.0, float("inf"))
    _say(f"matrix products: {peaks(products)} GFLOP/s, {foreign or 0:.2f} foreign CPUs")
    return products


def _each(
    measure: Callable[[Peer, PeersConfig], Record], peers: list[Peer], config: PeersConfig
) -> Record:
    results = []
    for peer in peers:
        _say(peer.name)
        results.append(note(measure(peer, config)))
    return {"results": results}


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


_Measured = Callable[[list[Peer], PeersConfig], Record]
_MEASURED: dict[str, tuple[tuple[str, ...], str, _Measured, Callable[[Record], list[str]]]] = {
    "run": (("http", "offline"), "peers", _measure, markdown),
    "states": (("states",), "peers-states", partial(_each, states.measure), states.markdown),
    "trees": (("trees",), "peers-trees", partial(_each, trees.measure), trees.markdown),
}
"""For each command: kinds of peers, suffix of the record's name, and the functions that measure and
render."""


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except SRMError as error:
        _say(f"python -m research.bench.peers: {error.message}")
        raise SystemExit(error.exit_code) from None
