"""Which cards the engine opens, and what it says of those that it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kit.fake_driver.driver import FakeDriver, calls_of, read_log

MIB = 2**20
HELD_MIB = 600
"""Of every card, by whom nobody knows."""
SHARE = 0.97
"""Of what is free, which MAX's memory manager takes."""
PAGE = 256 * MIB
"""What it takes at once."""
HEALTHY = ("MODULAR_DEVICE_CONTEXT_DISABLE_HEALTHCHECK", "true")


@pytest.mark.parametrize(
    ("card", "name", "architecture", "mib"),
    [
        ("H100", "NVIDIA H100 80GB HBM3", "sm_90a", 81_559),
        ("H200", "NVIDIA H200", "sm_90a", 143_771),
        ("A100", "NVIDIA A100-SXM4-80GB", "sm_80", 81_920),
        ("L4", "NVIDIA L4", "sm_89", 23_034),
        ("B200", "NVIDIA B200", "sm_100a", 183_359),
    ],
)
def test_a_card_opens_with_nearly_all_of_its_free_memory(
    fake: FakeDriver, card: str, name: str, architecture: str, mib: int
) -> None:
    ran = fake.run("open_gpu", card=card)
    assert (ran["name"], ran["architecture"]) == (name, architecture)
    assert ran["free"] == pytest.approx(SHARE * (mib - HELD_MIB) * MIB, abs=PAGE)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"card": "T4"}, "architecture sm_75"),
        ({"version": 12_080}, "driver is too old; update it to 580"),
        ({"ecc": 1}, "its memory has had 1 uncorrectable ECC error"),
        ({"throttle": 0x8}, "it is throttled at this moment (HW Slowdown)"),
        ({"throttle": 0x40}, "it is throttled at this moment (HW Thermal Slowdown)"),
        ({"throttle": 0x80}, "it is throttled at this moment (HW Power Brake)"),
        ({"held_mib": 76_000}, "only 5.5 of its 79.6 GiB of memory are free; end the processes"),
        ({"fail": "cuInit#1+=100"}, "cuInit failed with 100"),
        ({"fail": "cuDevicePrimaryCtxRetain#1+=2"}, "its memory is in use"),
    ],
    ids=lambda one: one if isinstance(one, str) else None,
)
def test_a_card_that_cannot_serve_is_refused_with_its_reason(
    fake: FakeDriver, settings: dict[str, Any], reason: str
) -> None:
    refused = fake.run("open_gpu", **settings)["refused"]
    assert refused.startswith("device = gpu: ") and reason in refused


def test_a_card_at_its_power_cap_or_warm_opens(fake: FakeDriver) -> None:
    """Software's power cap and thermal slowdown: nothing is wrong with such a card."""
    assert "free" in fake.run("open_gpu", throttle=0x4 | 0x20)


def test_memory_that_others_hold_is_said(fake: FakeDriver) -> None:
    with fake.start("open_gpu", held_mib=40_000) as process:
        out, err = process.communicate()
    assert '"free"' in out and "only 39.5 of its 79.6 GiB of memory are free" in err


def test_a_throttled_card_opens_without_the_health_check(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*HEALTHY)
    assert "free" in fake.run("open_gpu", throttle=0x8, ecc=1)


def test_of_two_cards_the_second_is_opened_alone(fake: FakeDriver, tmp_path: Path) -> None:
    assert "free" in fake.run("open_gpu", 1, devices=2, log=tmp_path / "log")
    (retained,) = calls_of(read_log(tmp_path / "log"), "cuDevicePrimaryCtxRetain")
    assert retained["device"] == 1
    assert "there are the GPUs 0 … 1 here" in fake.run("open_gpu", 2, devices=2)["refused"]


def test_of_two_cards_that_are_visible_the_second_is_meant(
    fake: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2")
    assert "free" in fake.run("open_gpu", 1, devices=4, log=tmp_path / "log")
    (retained,) = calls_of(read_log(tmp_path / "log"), "cuDevicePrimaryCtxRetain")
    assert retained["device"] == 2


@pytest.mark.parametrize("lost", [0, 1])
def test_each_card_is_opened_whichever_other_one_is_lost(
    fake: FakeDriver, tmp_path: Path, lost: int
) -> None:
    """The first one was opened whatever the number, as MAX had the driver begin before."""
    (tmp_path / f"lost-{lost}").touch()
    for number in range(3):
        log = tmp_path / f"log-{number}"
        ran = fake.run("open_gpu", number, devices=3, lost=tmp_path, log=log)
        retained = {line["device"] for line in calls_of(read_log(log), "cuDevicePrimaryCtxRetain")}
        if number == lost:
            assert "MAX finds no GPU here" in ran["refused"]
        else:
            assert ran["address"] == f"0000:{0x45 + number:02x}:00.0" and retained == {number}


def test_errors_of_one_cards_memory_refuse_that_one_alone(fake: FakeDriver) -> None:
    ran = [fake.run("open_gpu", number, devices=3, ecc=1, ecc_card=2) for number in range(3)]
    assert [number for number, each in enumerate(ran) if "refused" in each] == [2]
    assert "uncorrectable ECC error" in ran[2]["refused"]


@pytest.mark.parametrize(("devices", "visible"), [(0, None), (1, "")])
def test_a_driver_that_shows_no_card_kills_nothing(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, devices: int, visible: str | None
) -> None:
    """MAX ends its process with a segmentation fault."""
    why = "the driver shows none" if visible is None else "CUDA_VISIBLE_DEVICES = ''"
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    refused = fake.run("open_gpu", devices=devices)["refused"]
    assert refused == f"device = gpu, but there is no GPU here ({why}); use device = cpu"


def test_a_mistake_in_what_the_driver_is_to_do_is_noticed(fake: FakeDriver) -> None:
    with fake.start("open_gpu", fail="cuInit=100") as process:
        assert "FAKE_CUDA_FAIL = cuInit=100 is not understood" in process.communicate()[1]
    assert process.returncode
