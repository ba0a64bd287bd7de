"""A process of its own for what others wrote and nobody can stop from outside: templates, grammars.

It gets little memory, no environment and no
secrets, and is ended when it takes too long; the next question starts another. Messages are JSON
behind their length, and each is answered. It leaves with its parent.

Where a question may take all time and memory, a child of that process answers it (`answer_each`):
whatever ends the child, nothing has to be started again, and nothing stays of what it did.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, NoReturn, cast

import msgspec

import srm

MAX_MEMORY = 1024**3
"""Most address space of a process, in bytes."""
FIRST_CPU_S, CPU_S = 0.1, 1.0
"""Seconds of processor time that a constraint may take: at first, and when it is tried again,
behind those that were not tried yet."""
NUM_AT_ONCE = 8
"""Most constraints that are compiled at a time, each of another share: the system divides the
processors among them. Half of these places are for those that were not tried yet."""
_MAX_MESSAGE = 256 * 1024 * 1024
"""Most bytes of a message: a chat of the most characters, every one of them escaped, and more."""
START_S = 600.0
"""Seconds a process may take to start, on a machine that is busy."""
_PR_SET_PDEATHSIG = 1
_ROOT = Path(srm.__file__).resolve().parents[1]
NICE, NICE_AGAIN = 5, 10
"""How far behind others those are who compile constraints, and how much more when they try again:
where others want all processors, they have a quarter of what the others have. With the least there
is, a constraint got nothing for minutes."""
_TURNS = 50
"""Tries to say so to a system that takes ten a second."""
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "TZ")
"""The environment variables that the process gets; others may hold API keys."""


class ProcessFailed(Exception):
    """The question has no answer, and why."""


class Died(ProcessFailed):
    """The process ended, or took too long. The next question may be answered."""

    def __init__(self, why: str, by_signal: int, is_late: bool = False) -> None:
        super().__init__(why)
        self.is_late = is_late
        """Whether it took too long."""
        self.is_out_of_time = by_signal == signal.SIGPROF
        """Whether it used the processor time that its question may take."""
        self.is_over_limit = by_signal in (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV)
        """Whether the question was too much for it, and will always be."""


class Effort(msgspec.Struct):
    """How much is done for an answer that `answer_each` gives."""

    cpu_s: float
    """Seconds of processor time that it may take."""
    is_again: bool = False
    """Whether others go before it: it was asked for with less time before."""


class Answer(msgspec.Struct):
    """What the process made of a message, or why it is nothing."""

    text: str = ""
    data: bytes = b""
    error: str | None = None
    ended_by: int | None = None
    """The signal that ended who was to answer; 0: it left."""


def _stream(connection: socket.socket) -> IO[bytes]:
    return cast(IO[bytes], connection.makefile("rwb"))


def send(stream: IO[bytes], message: object) -> None:
    body = msgspec.json.encode(message)
    stream.write(len(body).to_bytes(8, "little") + body)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """The next message as JSON; None if the other side is gone, or says what is none."""
    size = stream.read(8)
    if len(size) < 8:
        return None
    if (length := int.from_bytes(size, "little")) > _MAX_MESSAGE:
        return None
    body = stream.read(length)
    return body if len(body) == length else None


def limit_this_process(parent: int) -> bool:
    """End with the parent and take no more than MAX_MEMORY; false if the parent is gone already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return os.getppid() == parent


def yield_processors() -> None:
    """Have this thread and the processes that it begins take few processors from others (NICE)."""
    for _ in range(_TURNS):
        try:  # a system that groups threads by session
            Path("/proc/self/autogroup").write_text(str(NICE))
            break
        except BlockingIOError:  # others just did
            time.sleep(0.1)
        except OSError:
            break
    with contextlib.suppress(OSError):  # a sandbox
        os.nice(NICE)


def answer_each(control: int, answer: Callable[[bytes], Answer]) -> None:
    """Answer messages that come over sockets, which come over the socket `control`: each in a
    process of its own, which ends with it or once it has used its processor time."""
    with socket.socket(fileno=control) as asked:
        while (came := socket.recv_fds(asked, 1, 1))[0]:
            (connection,) = came[1]
            parent = os.getpid()
            if not os.fork():
                _run_and_exit(parent, partial(_answer_over, connection, answer))
            os.close(connection)
            with contextlib.suppress(ChildProcessError):  # none is left
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _answer_over(connection: int, answer: Callable[[bytes], Answer]) -> None:
    """In a child: have another one answer, and say so if it does not."""
    with socket.socket(fileno=connection) as peer, _stream(peer) as stream:
        effort, message = receive(stream), receive(stream)
        if effort is None or message is None:
            return
        reader, writer = os.pipe()
        parent = os.getpid()
        if not (child := os.fork()):
            _run_and_exit(parent, partial(_answer_into, writer, effort, message, answer))
        os.close(writer)
        with os.fdopen(reader, "rb") as made:
            body = receive(made)  # whole, or it counts as none
        by_signal = max(0, -os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        send(stream, Answer(ended_by=by_signal) if body is None else msgspec.Raw(body))


def _answer_into(
    writer: int, effort: bytes, message: bytes, answer: Callable[[bytes], Answer]
) -> None:
    limits = msgspec.json.decode(effort, type=Effort)
    if limits.is_again:
        with contextlib.suppress(OSError):
            os.nice(NICE_AGAIN)
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
    answered = answer(message)
    signal.setitimer(signal.ITIMER_PROF, 0)
    with os.fdopen(writer, "wb") as stream:
        send(stream, answered)


def _run_and_exit(parent: int, work: Callable[[], None]) -> NoReturn:
    """Call it in a process that was just forked, which is to do nothing else."""
    try:
        if limit_this_process(parent):
            work()
    finally:
        os._exit(0)


class _Process(subprocess.Popen[bytes]):
    control: socket.socket
    """Takes connections over which it answers."""


class LimitedProcess:
    """Runs a module that answers messages. One thread at a time may `ask`, any may `ask_beside`."""

    def __init__(self, module: str, first: object) -> None:
        """`first` is the message that each new process gets before any other."""
        self._module = module
        self._first = first
        self._process: _Process | None = None
        self._lock = threading.Lock()  # of those who start it to ask beside others
        self._is_closed = False

    def ask(self, message: object, within_s: float) -> Answer:
        """Return the answer; kill the process after `within_s` seconds. Raises ProcessFailed."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self.start()
        assert process.stdin is not None and process.stdout is not None
        return self._ask(process, process.stdin, process.stdout, message, within_s)

    def ask_beside(self, message: object, effort: Effort, within_s: float) -> Answer:
        """As `ask`, beside others, of a module that calls `answer_each`."""
        try:
            ours, theirs = socket.socketpair()
            with ours, _stream(ours) as stream:
                with theirs:
                    process = self._hand_over(theirs)
                send(stream, effort)
                return self._ask(process, stream, stream, message, within_s)
        except OSError as error:
            raise Died(f"it failed: {error}", 0) from None

    def _hand_over(self, connection: socket.socket) -> _Process:
        """Give the process a connection, and return it; start it if it is not there."""
        with self._lock:
            process = self._process
            if process is not None and process.poll() is None:
                try:
                    socket.send_fds(process.control, [b"?"], [connection.fileno()])
                    return process
                except BrokenPipeError:  # it is about to end
                    process.kill()
            process = self.start()
            socket.send_fds(process.control, [b"?"], [connection.fileno()])
            return process

    def start(self) -> _Process:
        """Start anew. Raises ProcessFailed with what is wrong with the first message."""
        self._kill()
        control, theirs = socket.socketpair()
        with theirs:
            process = _Process(
                # -P: a folder named as ours where we are started is not ours
                [sys.executable, "-P", "-m", self._module, str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's Ctrl-C is for us
                env={
                    "OPENBLAS_NUM_THREADS": "1",  # which each take 40 MiB of MAX_MEMORY
                    "PYTHONPATH": os.pathsep.join((str(_ROOT), *filter(None, sys.path))),
                    **{name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                },
            )
        process.control, self._process = control, process
        if self._is_closed:  # by a thread that may not have seen this process
            self._kill()
            raise Died("it is closed", 0)
        assert process.stdin is not None and process.stdout is not None
        self._ask(process, process.stdin, process.stdout, self._first, START_S)
        return process

    def _ask(
        self,
        process: _Process,
        inbox: IO[bytes],
        outbox: IO[bytes],
        message: object,
        within_s: float,
    ) -> Answer:
        took_too_long = threading.Event()

        def stop() -> None:
            took_too_long.set()
            process.kill()

        timer = threading.Timer(within_s, stop)
        timer.start()
        try:
            send(inbox, message)
            reply = receive(outbox)
        except (ConnectionError, ValueError):  # ended, or closed by another thread
            reply = None
        finally:
            timer.cancel()
        if reply is None:
            is_late = took_too_long.is_set()
            if is_late or inbox is process.stdin:
                process.kill()
                process.wait()
            why = f"it takes longer than {within_s:g} s" if is_late else "it failed"
            raise Died(why, -(process.poll() or 0), is_late)
        answer = msgspec.json.decode(reply, type=Answer)
        if answer.ended_by is not None:
            raise Died("it failed", answer.ended_by)
        if answer.error is not None:
            raise ProcessFailed(answer.error)
        return answer

    def close(self) -> None:
        """End the process, whatever it does; none is started any more. For any thread."""
        self._is_closed = True
        self._kill()

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.control):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # what it never read
                    stream.close()
