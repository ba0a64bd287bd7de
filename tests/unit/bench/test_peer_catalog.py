"""The list of peers: names that tell them apart, commands that can be filled in, pinned lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.peers.catalog import PEERS, chosen
from bench.peers.config import PeersConfig
from bench.peers.installing import ENVIRONMENTS, LISTS
from bench.peers.loading import waves
from bench.peers.making import model_path
from bench.peers.peer import Peer
from bench.peers.running import placeholders
from engine.errors import ConfigError
from engine.records import ROOT


def test_names_tell_peers_apart() -> None:
    assert len({peer.name for peer in PEERS}) == len(PEERS)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peer_can_be_started(peer: Peer, tmp_path: Path) -> None:
    values = placeholders(peer, PeersConfig(peers_dir=tmp_path), tmp_path / "model")
    command = [part.format(**values) for part in peer.command]
    if peer.how == "http":
        assert values["port"] in command
        assert str(tmp_path / "model") in command
    else:
        (program,) = command
        assert (ROOT / "bench" / "peers" / "programs" / f"{program}.py").is_file()
    assert peer.environment in {"", *ENVIRONMENTS}
    assert list(peer.concurrency) == sorted(peer.concurrency)
    assert peer.most == 0 or peer.how == "http" or max(peer.concurrency) <= peer.most


def test_an_engine_without_narrow_matrices_is_given_wide_ones(tmp_path: Path) -> None:
    config = PeersConfig(peers_dir=tmp_path, dtype="bfloat16")
    for peer in PEERS:
        dtype = placeholders(peer, config, tmp_path)["dtype"]
        assert dtype == ("bfloat16" if peer.is_narrow else "float32")


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_the_package_whose_version_is_recorded_is_pinned(peer: Peer) -> None:
    if not peer.environment:
        return
    lines = (LISTS / f"{peer.environment}.txt").read_text().lower().replace("_", "-").splitlines()
    assert [line for line in lines if line.startswith(f"{peer.package}==")]


def test_every_line_of_a_list_is_a_version() -> None:
    for name in ENVIRONMENTS:
        for line in (LISTS / f"{name}.txt").read_text().splitlines():
            package, _, version = line.partition("==")
            assert package, line
            assert version, line
            assert "+" not in version, "a build that only some indexes have"


def test_models_that_differ_are_different_files(tmp_path: Path) -> None:
    paths = {model_path(peer, tmp_path): (peer.model, peer.suffix) for peer in PEERS}
    assert len(paths) == len({(peer.model, peer.suffix) for peer in PEERS})


def test_peers_are_chosen_by_the_beginning_of_their_names() -> None:
    assert chosen(()) == list(PEERS)
    assert {peer.name for peer in chosen(("srm-256-http", "vllm"))} == {"srm-256-http", "vllm-http"}
    with pytest.raises(ConfigError, match="'tgi' begins no name"):
        chosen(("tgi",))


def test_waves_fill_the_time_that_is_wanted() -> None:
    config = PeersConfig(seconds=8, output_tokens=128)
    assert waves(None, 64, config) == 1
    assert waves(1024.0, 16, config) == 4  # 16 * 128 tokens take 2 s
    assert waves(100.0, 256, config) == 1  # one takes far longer
