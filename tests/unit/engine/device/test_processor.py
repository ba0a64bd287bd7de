"""What the log says of a processor."""

from __future__ import annotations

import pytest

from srm.engine.device import processor


@pytest.mark.parametrize(
    ("level", "device", "dtype", "lines"),
    [
        ("x86-64-v4", "cpu", "bfloat16", 1),
        ("", "cpu", "bfloat16", 1),
        ("cooperlake", "cpu", "bfloat16", 0),
        ("x86-64-v3", "cpu", "float32", 0),
        ("x86-64-v3", "gpu", "bfloat16", 0),
    ],
)
def test_emulated_bfloat16_was_slow_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    level: str, device: str, dtype: str, lines: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(processor, "level", lambda: level)
    processor.warn_of_emulation(device, dtype)
    assert len(caplog.messages) == lines
    assert all("5 to 6 times as long as in float32" in message for message in caplog.messages)
