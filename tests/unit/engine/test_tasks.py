"""Tasks end with their block, and their errors are those of the block."""

from __future__ import annotations

import asyncio
import logging

import pytest

from srm import tasks
from srm.tasks import beside, dispensable, task_group, vital
from tests.kit.serving import run_python


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("beside")


async def test_what_runs_beside_a_block_ends_with_it() -> None:
    ended: list[str] = []
    async with beside(forever(ended)):
        await asyncio.sleep(0)
        assert not ended
    assert ended == ["beside"]


async def test_what_fails_beside_a_block_ends_it() -> None:
    async def fail() -> None:
        raise KeyError("a")

    ended: list[str] = []
    with pytest.raises(KeyError):
        async with beside(fail(), forever(ended)):
            await asyncio.Event().wait()
    assert ended == ["beside"]


async def test_the_error_of_a_block_is_raised_as_it_is() -> None:
    ended: list[str] = []
    with pytest.raises(OSError, match="disk"):
        async with beside(forever(ended)), task_group() as group:
            group.create_task(forever(ended))
            await asyncio.sleep(0)
            raise OSError("disk")
    assert ended == ["beside", "beside"]


ENDS = {
    # Whatever else the process has, and would wait for: a thread that never ends, other tasks.
    "KeyError('bug')": (1, "what matters failed, which nothing here works without", "KeyError"),
    "ConfigError('model is no folder')": (2, "what matters failed: model is no folder", ""),
}


@pytest.mark.parametrize("error", ENDS)
def test_what_a_process_cannot_live_without_ends_it(error: str) -> None:
    code, message, traceback = ENDS[error]
    program = f"""
import asyncio, threading
from srm.errors import ConfigError
from srm.tasks import vital

async def fail():
    await asyncio.sleep(0)
    raise {error}

async def main():
    threading.Thread(target=threading.Event().wait).start()
    task = asyncio.create_task(vital(fail, "what matters"))
    await asyncio.Event().wait()

asyncio.run(main())
"""
    ended = run_python(program)
    assert ended.returncode == code
    assert message in ended.stderr
    assert ("Traceback" in ended.stderr) == bool(traceback) and traceback in ended.stderr


async def test_whoever_embeds_it_is_told_instead() -> None:
    results: list[tuple[str, Exception]] = []

    async def fail() -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        await vital(fail, "what matters", lambda *what: results.append(what))
    assert [(name, type(error)) for name, error in results] == [("what matters", KeyError)]


async def test_what_a_process_can_live_without_is_begun_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "AGAIN_AFTER_S", 0.0)
    begun = 0

    async def begin() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise OSError("disk")

    with caplog.at_level(logging.ERROR):
        await dispensable(begin, "the watch")
    assert begun == 3
    assert caplog.text.count("the watch failed: begun again in 0 s") == 2
    assert caplog.text.count("OSError: disk") == 2


async def test_what_can_be_lived_without_ends_with_its_block() -> None:
    ended: list[str] = []
    async with beside(dispensable(lambda: forever(ended), "the watch")):
        await asyncio.sleep(0)
    assert ended == ["beside"]


async def test_what_fails_while_it_ends_is_not_begun_again() -> None:
    """Its block waited for it for ever."""

    async def fail_at_the_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("disk")

    async with asyncio.timeout(120), beside(dispensable(fail_at_the_end, "the bar")):
        await asyncio.sleep(0)
