"""Rewards completions in a process of its own, which is ended where a function never returns.

Reward functions are the user's: they raise, hang or end their process. Each of these is a
ConfigError for the run that asked. Functions see its modules, variables and standard output.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from srm.errors import ConfigError
from srm.training.questions.questions import Question
from srm.training.questions.rewards import load_reward, rewarded

START_S = 300.0
"""Seconds that importing the functions may take, on a machine that is busy."""
_PR_SET_PDEATHSIG = 1


class RewardProcess:
    """Calls reward functions by name. One thread at a time may ask, and none after an error."""

    def __init__(self, names: Sequence[str], weights: Sequence[float], limit_s: float) -> None:
        """Import the functions, whose rewards count `weights` times; together they may take
        `limit_s` seconds for a completion. Raises ConfigError where there is no such function."""
        self._weights, self._limit_s = np.array(weights), limit_s
        self._connection, theirs = Pipe()
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)  # noqa: PTH109
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(os.getpid()), *names],
            pass_fds=(theirs.fileno(),),
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # a terminal's Ctrl-C is for the run
        )
        theirs.close()
        self._answer(START_S, "its import")

    def rewards(self, texts: Sequence[str], question: Question) -> NDArray[np.float64]:
        """Return f64[texts, functions]. Raises ConfigError if a function fails, returns no number
        of at most MOST_REWARD, takes too long or ends its process."""
        with suppress(BrokenPipeError):  # the answer, which does not come, says why
            self._connection.send((texts, question))
        return np.array([self._answer(self._limit_s, repr(text)[:200]) for text in texts])

    def sum(self, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return f64[…], the weighted sums of f64[…, functions]."""
        summed: NDArray[np.float64] = (rewards * self._weights).sum(axis=-1)
        return summed

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _answer(self, limit_s: float, what: str) -> list[float]:
        if not self._connection.poll(limit_s):
            self.close()
            raise ConfigError(f"reward takes longer than reward_limit_s = {limit_s:g} for {what}")
        try:
            reply: list[float] | str = self._connection.recv()
        except (EOFError, ConnectionResetError):
            code = self._process.wait()
            reply = f"reward ended its process, with code {code}, for {what}"
        if isinstance(reply, str):
            self.close()
            raise ConfigError(reply)
        return reply


def _serve(connection: Connection, names: Sequence[str]) -> None:
    """Answer each text with its rewards or with an error, which is the last answer."""
    try:
        functions = [load_reward(name) for name in names]
        connection.send([])
        while True:
            texts, question = connection.recv()
            for text in texts:
                connection.send([rewarded(function, text, question) for function in functions])
    except ConfigError as error:
        connection.send(error.message)
    except (EOFError, BrokenPipeError):
        return  # the run has ended


if __name__ == "__main__":
    number, parent, *given_names = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == int(parent):
        with closing(Connection(int(number))) as ours:
            _serve(ours, given_names)
