"""How long MAX's threads look for work."""

from __future__ import annotations

import os

import pytest

from srm.engine.device.libc import BUSY_WAIT, BUSY_WAIT_US, wait_busily_for_less
from tests.kit.serving import run_python


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, str(BUSY_WAIT_US)), ({BUSY_WAIT[0]: "7"}, "7"), ({BUSY_WAIT[1]: "0"}, "0")],
)
def test_both_variables_say_the_same(
    given: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not the real one: MAX aborts this process if its libraries read different values.
    monkeypatch.setattr(os, "environ", dict(given))
    wait_busily_for_less()
    assert [os.environ[name] for name in BUSY_WAIT] == [expected, expected]


def test_max_opens_a_device_with_them() -> None:
    """It aborts the process where its libraries read different values."""
    script = (
        "from srm.engine.device.libc import wait_busily_for_less; wait_busily_for_less(); "
        "from max.driver import CPU; from max.engine import InferenceSession; "
        "from srm.engine.device.runner import open_device; "
        "InferenceSession(devices=[open_device('cpu')]); print('open')"
    )
    environment = {name: value for name, value in os.environ.items() if name not in BUSY_WAIT}
    done = run_python(script, env=environment)
    assert done.stdout == "open\n", done.stderr
