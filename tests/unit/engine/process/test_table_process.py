"""Tables made in a process are those made here, whatever becomes of the process."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import numpy as np
import psutil
import pytest

from srm.engine.constraints.automaton import TokenAutomaton, compile_automaton
from srm.engine.constraints.constraint import choice_constraint, json_constraint, regex_constraint
from srm.engine.process import table_process
from srm.engine.process.table_process import TableProcess
from srm.limited_process import NICE, Died, LimitedProcess, yield_processors

TOKENS = [b"", b"", *(bytes([byte]) for byte in range(32, 127)), b"abc", b"ab"]
ABOUT = TOKENS, len(TOKENS), 1
REGEX = regex_constraint("[a-c]{1,9}")
CHOICE = choice_constraint(["abc", "abd"])
SCHEMA = json_constraint(
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
)


@pytest.fixture
def tables() -> Iterator[TableProcess]:
    made = TableProcess()
    yield made
    made.close()


def worker() -> psutil.Process:
    (process,) = (
        child
        for child in psutil.Process().children()
        if "srm.engine.process.table_process" in child.cmdline()
    )
    return process


def is_made_here(made: TokenAutomaton | None, constraint: str) -> bool:
    own = compile_automaton(constraint, *ABOUT)
    assert made is not None and own is not None
    names = ("next_state", "class_of", "distance")
    return all(np.array_equal(getattr(made, name), getattr(own, name)) for name in names)


def test_they_are_those_made_here(tables: TableProcess) -> None:
    for constraint in (REGEX, CHOICE, SCHEMA):
        assert is_made_here(tables.make_table(constraint, *ABOUT), constraint)
    for without in (regex_constraint("(0|1)*1(0|1){30}"), json_constraint({}), "{", "€"):
        assert tables.make_table(without, *ABOUT) is None
    assert worker().nice() == os.getpriority(os.PRIO_PROCESS, 0) + NICE


def test_a_killed_process_is_replaced(tables: TableProcess) -> None:
    tables.make_table(REGEX, *ABOUT)
    worker().kill()
    assert is_made_here(tables.make_table(CHOICE, *ABOUT), CHOICE)


@pytest.mark.parametrize("fault", [Died("it failed", 9), Died("it failed: no memory", 0)])
def test_what_fails_twice_has_no_table_and_says_so(
    tables: TableProcess,
    fault: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> NoReturn:
        raise fault

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(LimitedProcess, "ask_beside", fail)
        assert tables.make_table(REGEX, *ABOUT) is None
    assert [record.message for record in caplog.records] == [
        f"a constraint's table was not made: {fault}"
    ] * 2
    assert is_made_here(tables.make_table(REGEX, *ABOUT), REGEX)


def test_an_exit_waits_for_no_table(tables: TableProcess) -> None:
    tables.make_table(REGEX, *ABOUT)
    stopped = worker()
    stopped.suspend()
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(tables.make_table, CHOICE, *ABOUT)
        while not asked.running():
            pass
        tables.close()
        assert asked.result() is None
    assert not stopped.is_running()
    assert tables.make_table(CHOICE, *ABOUT) is None, "it is closed"


def test_it_has_no_threads_of_libraries(tables: TableProcess) -> None:
    """OpenBLAS begins a thread for each processor: 24 of them would fill the process's memory."""
    tables.make_table(REGEX, *ABOUT)
    assert worker().num_threads() == 1
    assert worker().memory_info().vms < 2**28


def test_a_system_that_ranks_no_processes_has_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError("as a sandbox says")

    with monkeypatch.context() as patched:
        patched.setattr(os, "nice", refuse)
        patched.setattr(Path, "write_text", refuse)
        yield_processors()


def test_a_table_that_takes_too_long_is_not_begun_again(
    tables: TableProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tables.make_table(REGEX, *ABOUT)
    monkeypatch.setattr(table_process, "WITHIN_S", 0.01)
    worker().suspend()
    assert tables.make_table(CHOICE, *ABOUT) is None
    assert [record.message for record in caplog.records] == [
        "a constraint's table was not made: it takes longer than 0.01 s"
    ]
