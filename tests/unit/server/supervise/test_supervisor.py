"""What the supervisor makes of children that crash, freeze, come to work, or never do."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import psutil
import pytest

from srm import tasks
from srm.engine.config import EngineConfig
from srm.errors import EngineUnavailable
from srm.memory import read_text
from srm.server.supervise import embedded_engine, ends, supervisor
from srm.server.supervise.embedded_engine import MAX_CRASHES, with_engine
from srm.server.supervise.ends import describe_exit, passing_cause
from srm.server.supervise.launch import new_heartbeat
from srm.server.supervise.supervisor import Child, Supervisor
from tests.kit.engines.served_engine import until
from tests.kit.serving import ROOT

BEAT = "import os, struct, sys, time; os.pwrite(int(sys.argv[1]), struct.pack('dd', 1, 0), 0)\n"
BEATING = """
import os, struct, sys, time
fd, steps = map(int, sys.argv[1:])
while True:
    os.pwrite(fd, struct.pack("dd", time.monotonic(), steps), 0)
    time.sleep(0.02)
"""
MakeChild = Callable[..., Child]


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeChild:
    """child(program, *arguments, …): not yet started, and restarted without a pause."""
    monkeypatch.setattr(supervisor, "_LONGEST_PAUSE_S", 0.0)
    monkeypatch.setattr(supervisor, "_TICK_S", 0.05)

    def make(program: str, *arguments: str, beats: bool = True, silence_s: float = 0.0) -> Child:
        heartbeat = new_heartbeat() if beats else -1
        return Child(
            "child",
            [sys.executable, "-ISc", program, *([f"{heartbeat}"] if beats else []), *arguments],
            dict(os.environ),
            heartbeat_fd=heartbeat,
            silence_s=silence_s,
        )

    return make


async def started(child: Child, other_than: int = 0) -> int:
    """The process id of a child that beats, once it does."""
    await until(lambda: child.process is not None and child.process.pid != other_than)
    await until(lambda: child._look() is not None)
    assert child.process is not None
    return child.process.pid


async def ended(keeper: asyncio.Task[int], child: Child) -> None:
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
    await child.stop(5)


HOPELESS = {
    "never comes to work": ("raise SystemExit(7)", 1),
    "crashes in its first step": (BEAT + "raise SystemExit(7)", 1),
    "is killed before it serves": ("import os; os.kill(os.getpid(), 9)", 1),
    "has wrong settings": ("raise SystemExit(2)", 2),
    "has wrong files": ("raise SystemExit(3)", 3),
}


@pytest.mark.parametrize("what", HOPELESS)
async def test_gives_up_where_a_restart_has_no_point(child: MakeChild, what: str) -> None:
    program, code = HOPELESS[what]
    assert await child(program).keep_running() == code


async def test_one_without_a_heartbeat_is_given_up_too(child: MakeChild, tmp_path: Path) -> None:
    assert await child("raise SystemExit(7)", beats=False).keep_running() == 1
    missing = child("", beats=False)
    missing.command = [str(tmp_path / "nowhere")]  # it cannot be started
    assert await missing.keep_running() == 1


@pytest.mark.parametrize(("steps", "signum"), [("0", signal.SIGKILL), ("1", signal.SIGSEGV)])
async def test_restarts_what_worked_or_was_killed(
    child: MakeChild, steps: str, signum: int
) -> None:
    beating = child(BEATING, steps)
    keeper = asyncio.create_task(beating.keep_running())
    pid = 0
    for _ in range(supervisor.MAX_FAILURES + 2):
        pid = await started(beating, other_than=pid)
        if steps != "0":
            await until(lambda: bool((beat := beating._look()) and beat.steps))
        os.kill(pid, signum)
    await started(beating, other_than=pid)
    assert not keeper.done()
    await ended(keeper, beating)


async def test_restarts_a_frozen_child(child: MakeChild, caplog: pytest.LogCaptureFixture) -> None:
    beating = child(BEATING, "1", silence_s=1000)
    keeper = asyncio.create_task(beating.keep_running())
    pid = await started(beating)
    with caplog.at_level(logging.WARNING):
        beating.stall_s = 0.5
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: f"child (process {pid}, state T) is stalled: no sign" in caplog.text)
        os.kill(pid, signal.SIGCONT)
        await until(lambda: "child goes on" in caplog.text)
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        beating.silence_s = 0.1
        await started(beating, other_than=pid)
    assert f"child (process {pid}, state T) has given no sign of life for" in caplog.text
    await ended(keeper, beating)


WEDGED = """
import asyncio, sys
from srm import logs
from srm.server.loop_turns import show_turns

def one_long_piece_of_work():
    open(sys.argv[2], "w").close()
    while True:
        pass

async def main():
    turns = asyncio.create_task(show_turns(int(sys.argv[1])))
    asyncio.get_running_loop().call_later(0.3, one_long_piece_of_work)
    await turns

logs.configure("info", "text")
asyncio.run(main())
"""


async def test_logs_the_stack_of_a_held_up_loop(
    child: MakeChild,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    wedged = child(WEDGED, str(tmp_path / "wedged"), silence_s=1000)
    wedged.command[1] = "-c"  # with our modules
    wedged.environment["PYTHONPATH"] = str(ROOT)
    keeper = asyncio.create_task(wedged.keep_running())
    pid = await started(wedged)
    await until((tmp_path / "wedged").exists)
    wedged.silence_s = 0.1
    await started(wedged, other_than=pid)
    wedged.silence_s = 1000
    assert f"child (process {pid}, state R) has given no sign of life for" in caplog.text
    assert "in one_long_piece_of_work" in capfd.readouterr().err
    await ended(keeper, wedged)


async def test_restarts_a_frozen_start(child: MakeChild, caplog: pytest.LogCaptureFixture) -> None:
    starting = child("import time; time.sleep(1000)", silence_s=0.1)
    keeper = asyncio.create_task(starting.keep_running())
    await until(lambda: starting.process is not None)
    assert starting.process is not None
    pid = starting.process.pid
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: starting.process is not None and starting.process.pid != pid)
    assert f"child (process {pid}, state T) has given no sign of life for" in caplog.text
    await ended(keeper, starting)


async def test_a_watch_that_fails_goes_on_watching(
    child: MakeChild, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "AGAIN_AFTER_S", 0.0)
    beating = child(BEATING, "1", silence_s=1000)
    keeper = asyncio.create_task(beating.keep_running())
    pid = await started(beating)
    look = beating._look
    monkeypatch.setattr(beating, "_look", Mock(side_effect=[RuntimeError("a bug"), *[look()] * 9]))
    await until(lambda: "the watch over child failed" in caplog.text)
    monkeypatch.setattr(beating, "_look", look)
    beating.silence_s = 0.1
    os.kill(pid, signal.SIGSTOP)
    await started(beating, other_than=pid)
    await ended(keeper, beating)


async def test_works_in_time_without_steps(
    child: MakeChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_STEADY_S", 0.0)
    crashing = child("raise SystemExit(7)")
    crashing.works_in_time = True
    keeper = asyncio.create_task(crashing.keep_running())
    pids = set()
    for _ in range(supervisor.MAX_FAILURES + 2):
        await until(lambda: crashing.process is not None and crashing.process.pid not in pids)
        assert crashing.process is not None
        pids.add(crashing.process.pid)
    assert not keeper.done()
    await ended(keeper, crashing)


async def test_retries_for_ever_what_others_do_without(
    child: MakeChild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it runs steadily."""
    why, ends, healed = os.memfd_create("why"), tmp_path / "ends", tmp_path / "healed"
    program = (
        f"import os, time; open({str(ends)!r}, 'a').write('+')\n"
        f"while os.path.exists({str(healed)!r}): time.sleep(0.01)\n"
        "raise SystemExit(2)"
    )
    crashing = child(program, beats=False)
    crashing.why_away_fd = why
    keeper = asyncio.create_task(crashing.keep_running())
    enough = supervisor.MAX_FAILURES + 2
    await until(lambda: ends.exists() and ends.stat().st_size >= enough)
    assert not keeper.done()
    assert "times (exit code 2); the server's log says why" in read_text(why)
    healed.touch()
    monkeypatch.setattr(supervisor, "_STEADY_S", 0.0)
    await until(lambda: not read_text(why))
    await ended(keeper, crashing)


async def test_retries_for_ever_beside_a_substitute(child: MakeChild, tmp_path: Path) -> None:
    ends = tmp_path / "ends"
    fails = f"open({str(ends)!r}, 'a').write('+'); raise SystemExit(3)"
    substitute, failing = child(BEATING, "1"), child(BEAT + fails)
    never_served = child(fails, beats=False)
    failing.substitutes = never_served.substitutes = [substitute]
    keeper = asyncio.create_task(substitute.keep_running())
    await started(substitute)
    assert await never_served.keep_running() == 3
    failing_keeper = asyncio.create_task(failing.keep_running())
    enough = supervisor.MAX_FAILURES + 2
    await until(lambda: ends.stat().st_size >= enough)
    assert not failing_keeper.done()
    await ended(keeper, substitute)
    substitute.is_hopeless = True
    assert await failing_keeper == 3


async def test_one_whose_device_is_refused_leaves_the_work_to_others(
    child: MakeChild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight GPUs one with errors of its memory ended the server at its start."""
    ends = tmp_path / "ends"
    refused = child(f"open({str(ends)!r}, 'a').write('+'); raise SystemExit(4)")
    other = child("raise SystemExit(4)")  # not started yet
    refused.substitutes, other.substitutes = [other], [refused]
    keeper = asyncio.create_task(refused.keep_running())
    await until(lambda: ends.exists() and ends.stat().st_size >= 3)
    assert not keeper.done()
    assert await other.keep_running() == 4, "none is left"
    assert await keeper == 4


def test_a_restarted_substitute_still_counts(child: MakeChild) -> None:
    substitute = child("")
    assert substitute.may_serve
    substitute.is_hopeless = True
    assert not substitute.may_serve


async def test_stops_a_child_whose_keeper_is_gone(child: MakeChild) -> None:
    starting = child("import time; time.sleep(600)", beats=False)
    keeper = asyncio.create_task(starting.keep_running())
    for _ in range(2):  # the keeper, then the start
        await asyncio.sleep(0)
    assert starting.process is None
    await ended(keeper, starting)
    assert starting.process is not None
    assert starting.process.returncode is not None


async def test_one_that_takes_its_time_to_start_is_not_silent(child: MakeChild) -> None:
    slow = child("import time; time.sleep(1); raise SystemExit(2)", silence_s=0.1)
    assert await slow.keep_running() == 2


async def test_waits_for_room_on_a_full_disk(
    child: MakeChild,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """ "api 0 ended 6 times (exit code -7): giving up", and the disk was named nowhere."""
    free, real = [0], os.statvfs
    own = {"f_frsize": 4096, "f_files": 0, "f_favail": 0}
    monkeypatch.setattr(
        "srm.server.supervise.ends.os.statvfs",
        lambda path: SimpleNamespace(f_bavail=free[0], f_flag=real(path).f_flag, **own),
    )
    ends = tmp_path / "ends"
    failing = child(
        f"import os; open({str(ends)!r}, 'a').write('+'); os.kill(os.getpid(), 7)", beats=False
    )
    failing.folders = (tmp_path / "not" / "there yet",)
    keeper = asyncio.create_task(failing.keep_running())
    await until(lambda: ends.exists() and ends.stat().st_size > supervisor.MAX_FAILURES + 2)
    assert not keeper.done() and not failing.is_hopeless
    assert (
        "child ended (SIGBUS: a full disk or temp folder, or a file that was cut short while it "
        f"was read; the disk of {tmp_path} is full, with 0 bytes left): restart in"
    ) in caplog.text
    free[0] = 2**20  # and it crashes all the same
    assert await keeper == 1
    assert "times (SIGBUS: " in caplog.text and "giving up" in caplog.text


async def test_retries_without_processes(child: MakeChild, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = [BlockingIOError(errno.EAGAIN, "no more")] * (supervisor.MAX_FAILURES + 2)
    one = child("")
    monkeypatch.setattr(one, "run_once", AsyncMock(side_effect=[*refused, 2]))
    assert await one.keep_running() == 2


async def test_pauses_grow_to_a_minute(child: MakeChild, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was started every 10 s, for ever."""
    monkeypatch.undo()
    one = child("", beats=False)
    one.why_away_fd = os.memfd_create("why")
    monkeypatch.setattr(one, "run_once", AsyncMock(side_effect=[-11] * 30 + [KeyError()]))
    monkeypatch.setattr(asyncio, "sleep", sleep := AsyncMock())
    monkeypatch.setattr(supervisor, "passing_cause", AsyncMock(return_value=""))
    with pytest.raises(KeyError):
        await one.keep_running()
    pauses = [call.args[0] for call in sleep.await_args_list]
    assert pauses == sorted(pauses) and len(pauses) == 30
    assert pauses[supervisor.MAX_FAILURES - 2] < 10 < pauses[-1] == 60
    assert "30 times (SIGSEGV: a fault of native code)" in read_text(one.why_away_fd)


def test_ends_are_told_by_the_signals_name() -> None:
    for code, message in (
        *((1, "exit code 1"), (-29, "SIGIO"), (-40, "signal 40")),
        (-7, "SIGBUS: a full disk or temp folder, or "),
        (-9, "SIGKILL: out of memory, "),
        (-11, "SIGSEGV: a fault of native code"),
    ):
        assert describe_exit(code).startswith(message)


async def test_a_mute_disk_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, disk = threading.Event(), os.statvfs(tmp_path)
    monkeypatch.setattr(ends, "_LOOK_S", 0.0)
    monkeypatch.setattr("srm.server.supervise.ends.os.statvfs", lambda _: answers.wait() and disk)
    try:
        assert await passing_cause([tmp_path]) == f"one of these does not answer: {tmp_path}"
    finally:
        answers.set()


async def test_a_look_at_the_disk_that_fails_ends_nobody(
    child: MakeChild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only says why a process ended ended the supervisor, and with it all others."""
    written: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", written.append)
    monkeypatch.setattr("srm.server.supervise.ends.os.statvfs", Mock(side_effect=KeyError("a bug")))
    failing = child("raise SystemExit(7)", beats=False)
    failing.folders = (tmp_path,)
    assert await failing.keep_running() == 1
    assert {args.exc_type for args in written} == {KeyError}


async def test_a_bug_in_what_keeps_a_child_running_ends_all_in_order(
    child: MakeChild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = tmp_path / "said"
    leaving = (
        "import signal, sys, time\n"
        f"name, said = sys.argv[1], open({str(message)!r}, 'a')\n"
        "def leave(*_): print(name, 'leaves', file=said, flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "print(name, 'is there', file=said, flush=True)\ntime.sleep(1000)"
    )
    engine, api = (child(leaving, name, beats=False) for name in ("engine", "api"))
    jobs = child("", beats=False)
    has_both = until(lambda: message.exists() and message.read_text().count("is there") == 2)

    async def fail() -> int:
        await has_both
        raise KeyError("a bug")

    monkeypatch.setattr(jobs, "run_once", fail)
    supervisor = Supervisor([engine], [api], drain_s=1000, others=[jobs])
    async with asyncio.timeout(120):
        with pytest.raises(KeyError, match="a bug"):
            await supervisor.run(lambda: asyncio.sleep(1000))
    assert message.read_text().splitlines()[2:] == ["api leaves", "engine leaves"]


# An engine of a command's own: how often it is started again


async def end_of(
    monkeypatch: pytest.MonkeyPatch, codes: list[int], progress: Callable[[], int] | None = None
) -> EngineUnavailable:
    """What a command is told whose engine is never ready, and ends with these exit codes."""
    client = AsyncMock(wait_until_ready=lambda _: asyncio.Event().wait())
    monkeypatch.setattr(embedded_engine, "EngineClient", lambda *_, **__: client)
    monkeypatch.setattr(Child, "run_once", AsyncMock(side_effect=codes))
    with pytest.raises(EngineUnavailable) as raised:
        await with_engine(EngineConfig(), "engine", AsyncMock(), progress)
    return raised.value


ENDED = f"the engine process ended, {describe_exit(-9)}"


@pytest.mark.parametrize(
    ("codes", "progress", "num_pauses", "longest_s", "exit_code", "message"),
    [
        ([-9] * 100, lambda: 7, MAX_CRASHES - 1, 5, 1, ENDED),
        # Something was done each time; a checkpoint that is none is so the next time, too.
        ([-9] * 50 + [3], count().__next__, 50, 0.2, 3, ""),
    ],
)
async def test_crashes_with_nothing_done_between_them_end_it(
    monkeypatch: pytest.MonkeyPatch,
    codes: list[int],
    progress: Callable[[], int],
    num_pauses: int,
    longest_s: float,
    exit_code: int,
    message: str,
) -> None:
    sleep = AsyncMock()
    monkeypatch.setattr(asyncio, "sleep", sleep)
    error = await end_of(monkeypatch, codes, progress)
    assert error.exit_code == exit_code and error.message == message
    pauses = [call.args[0] for call in sleep.await_args_list]
    assert len(pauses) == num_pauses and pauses == sorted(pauses)
    assert pauses[-1] == longest_s


async def test_a_bug_in_a_keeper_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Child, "run_once", AsyncMock(side_effect=KeyError("a bug")))
    async with asyncio.timeout(120):
        with pytest.raises(KeyError, match="a bug"):
            await with_engine(EngineConfig(), "engine", AsyncMock(), lambda: 0)


async def test_an_engines_own_words_are_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind "num_slots = … does not fit" came "the engine process ended, exit code 2"."""
    for code, is_reported in ((-9, True), (1, True), (2, False), (3, False)):
        error = await end_of(monkeypatch, [code])
        assert (bool(error.message), error.exit_code) == (is_reported, max(code, 1))
