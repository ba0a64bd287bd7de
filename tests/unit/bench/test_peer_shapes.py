"""What a token costs and a sequence keeps, held against figures worked out apart."""

from __future__ import annotations

import pytest

from bench.peers.catalog import PEERS
from bench.peers.shapes import KINDS, N_CTX, Shape, shape_of


@pytest.mark.parametrize(
    ("name", "mflop"),
    [
        ("srm-256", 14.7),
        ("srm-512", 50.3),
        ("srm-1024", 184.5),
        ("llama-512", 75.5),
    ],
)
def test_flops_of_a_token_are_those_of_the_matrices(name: str, mflop: float) -> None:
    assert shape_of(name).flops_per_token / 1e6 == pytest.approx(mflop, abs=0.05)


def test_an_srm_of_1024_costs_more_a_token_than_a_transformer_of_512() -> None:
    ratio = Shape("srm", 1024).flops_per_token / Shape("llama", 512).flops_per_token
    assert ratio == pytest.approx(2.44, abs=0.01)


def test_states_of_sequences() -> None:
    assert Shape("srm", 1024).state_bytes() == 32 * 1024
    assert Shape("llama", 512).state_bytes(2) == 8 * 1024 * 1024
    assert Shape("llama", 512).state_bytes() == 2 * 8 * N_CTX * 512 * 4
    assert Shape("rwkv7", 512).state_bytes() == 8 * (8 * 64 * 64 + 2 * 512) * 4  # 8 heads of 64²
    assert Shape("mamba2", 512).state_bytes() // 2**20 == 8


@pytest.mark.parametrize("kind", KINDS)
def test_a_wider_model_costs_and_keeps_more(kind: str) -> None:
    narrow, wide = Shape(kind, 256), Shape(kind, 512)
    assert narrow.flops_per_token < wide.flops_per_token
    assert narrow.state_bytes() < wide.state_bytes()


def test_a_shape_is_found_by_its_name() -> None:
    for peer in PEERS:
        assert shape_of(peer.model).name == peer.model
        assert shape_of(peer.model).kind in KINDS
