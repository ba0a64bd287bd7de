"""Keys are read, found, never shown, and have so many requests and tokens a minute."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srm.errors import ConfigError
from srm.server.config import ServerConfig
from srm.server.errors import RateLimited
from srm.server.http.keys import Keys, check_limits, key_to_send, load_keys
from srm.server.http.limits import Limits
from tests.kit.serving import ROOT

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"


def test_keys_of_a_file_and_the_environment_add_up(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# who may\n\nalice in berlin {ALICE}\n")
    keys = load_keys(str(file), {"SRM_API_KEYS": BOB})
    names = [result.name for key in (ALICE, BOB) if (result := keys.find(key))]
    assert names == ["alice in berlin", "key-2"]
    assert not any(map(keys.find, ("", ALICE + "x", ALICE[:-1], "\udcff", "é")))
    assert ALICE not in repr(vars(keys))
    assert not load_keys("", {}).all
    assert Keys([]).find(ALICE) is None


def test_a_key_behind_a_byte_order_mark_never_worked(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(ALICE, encoding="utf-8-sig")
    assert load_keys(str(file), {}).find(ALICE)


def test_a_command_sends_the_key_of_its_name_or_else_the_first() -> None:
    a, b = f"alice {ALICE}, bob {BOB}", f"{ALICE},a {BOB}"
    for keys, name, sent in ((a, "bob", BOB), (a, "eve", ALICE), (b, "eve", ALICE)):
        assert key_to_send({"SRM_API_KEYS": keys}, name) == sent
    assert key_to_send({}, "bob") is None


BAD_FILES: dict[str, str | None] = {
    "has no key": "# nobody\n",
    "line 1: a key must have at least 16 characters": "a short-key\n",
    "line 2: the same key or name as that of 'a'": f"a {ALICE}\nb {ALICE}\n",
    "line 3: the same key or name as that of 'a'": f"a {ALICE}\n\na {BOB}\n",
    "cannot be read": None,
}


def test_a_bad_file_is_named_and_its_keys_are_not(tmp_path: Path) -> None:
    for message, content in BAD_FILES.items():
        file = tmp_path / "keys"
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_text(content)
        with pytest.raises(ConfigError) as caught:
            load_keys(str(file), {})
        assert message in caught.value.message
        assert not any(word in caught.value.message for word in (ALICE, BOB, "short-key"))
    os.mkfifo(tmp_path / "pipe")  # reading it would hold up all requests
    with pytest.raises(ConfigError, match="pipe': cannot be read: must be a regular file"):
        load_keys(str(tmp_path / "pipe"), {})
    with pytest.raises(ConfigError, match="SRM_API_KEYS has no key"):
        load_keys("", {"SRM_API_KEYS": " , "})


def test_keys_are_read_again_or_stay(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice {ALICE}\n")
    keys = load_keys(str(file), {})
    file.write_text(f"bob {BOB}\n")
    keys.reread(str(file), {})
    assert keys.find(BOB) and not keys.find(ALICE)
    file.write_text("bob short\n")
    with pytest.raises(ConfigError, match="line 1"):
        keys.reread(str(file), {})
    assert keys.find(BOB)


# Requests and tokens a minute, by a clock that the test turns, of all processes together


class Key:
    """One key of a server with these limits, at a time."""

    def __init__(self, requests_per_minute: float, tokens_per_minute: float, fd: int = -1) -> None:
        self.now = 0.0
        limits = Limits(requests_per_minute, tokens_per_minute, fd, lambda: self.now)
        self.account = limits.account("a")

    def wait_s(self, now: float) -> int:
        """What a request is told to wait; 0 if it is admitted."""
        self.now = now
        try:
            self.account.admit()
        except RateLimited as error:
            return error.retry_after_s
        return 0


def test_a_minutes_requests_may_come_at_once() -> None:
    key = Key(requests_per_minute=6, tokens_per_minute=0)
    assert [key.wait_s(0) for _ in range(8)] == [0] * 6 + [10] * 2
    assert [key.wait_s(now) for now in (9.5, 10, 10)] == [1, 0, 10]
    assert [key.wait_s(1_000) for _ in range(7)] == [0] * 6 + [10]
    for per_minute in (1, 7, 11, 61, 999):  # exactly
        key = Key(per_minute, 0)
        admitted = [key.wait_s(123_456.7) == 0 for _ in range(per_minute + 1)]
        assert admitted == [*([True] * per_minute), False]


def test_tokens_are_charged_afterwards_and_may_be_overdrawn() -> None:
    key = Key(requests_per_minute=0, tokens_per_minute=60)
    assert key.wait_s(0) == 0
    key.account.charge(100)
    assert [key.wait_s(now) for now in (0, 41)] == [41, 0]
    key.account.charge(1_000_000)
    assert key.wait_s(41) == 120
    key = Key(requests_per_minute=2, tokens_per_minute=60)
    key.account.charge(60)
    assert [key.wait_s(0) for _ in range(9)] == [1] * 9  # and counts nothing
    assert [key.wait_s(1) for _ in range(3)] == [0, 0, 30]


def test_each_key_has_its_own_account() -> None:
    limits = Limits(1, 0)
    limits.account("a").admit()
    with pytest.raises(RateLimited, match="1 requests a minute"):
        limits.account("a").admit()
    limits.account("b").admit()
    key = Key(0, 0)
    key.account.charge(10**9)
    assert key.wait_s(0) == 0


def elsewhere(fd: int, then: str) -> subprocess.Popen[str]:
    """Another process with the same memory, and 20 requests a minute."""
    code = f"""
from srm.server.http.limits import Limits, RateLimited
account = Limits(20, 0, {fd}, lambda: 0.0).account("a")
{then}
"""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, pass_fds=[fd], stdin=pipe, stdout=pipe, text=True
    )


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("limits")
    yield fd
    os.close(fd)


def test_limits_hold_over_all_processes_together(fd: int) -> None:
    asked = """
for _ in range(20):
    try:
        account.admit()
        print("admitted")
    except RateLimited:
        pass
"""
    both = [elsewhere(fd, asked) for _ in range(2)]
    assert "".join(item.communicate()[0] for item in both).count("admitted") == 20
    assert Key(20, 0, fd).wait_s(0) == 3


def test_a_process_that_is_killed_while_it_counts_stops_nobody(fd: int) -> None:
    killed = elsewhere(fd, "with account._full_at(): print('in', flush=True); input()")
    assert killed.stdout is not None and killed.stdout.readline() == "in\n"
    killed.kill()
    key = Key(20, 0, fd)
    assert [key.wait_s(0) for _ in range(21)] == [0] * 20 + [3]
    killed.communicate()


@given(st.floats(0.5, 1_000), st.lists(st.floats(0, 30), min_size=1, max_size=200))
def test_no_key_gets_more_than_its_rate(per_minute: float, pauses: list[float]) -> None:
    fd = os.memfd_create("limits")
    key = Key(per_minute, 0, fd)
    admitted = [key.wait_s(now) for now in accumulate(pauses)].count(0)
    os.close(fd)
    assert admitted <= max(per_minute, 1) + per_minute * sum(pauses) / 60 + 1e-3


def test_named_keys_come_first_in_their_order() -> None:
    limits = Limits(0, 0, first=("chat", "eval"))
    ranks = {name: limits.account(name).priority for name in ("chat", "eval", "other")}
    assert ranks == {"chat": 2, "eval": 1, "other": 0}


def test_a_key_that_is_to_come_first_and_is_not_there_is_named() -> None:
    keys = load_keys("", {"SRM_API_KEYS": f"chat {ALICE}"})
    check_limits(ServerConfig(priority_keys=("chat",)), keys)
    with pytest.raises(ConfigError, match=r"priority_keys names 'cat', .* the names are 'chat'"):
        check_limits(ServerConfig(priority_keys=("cat",)), keys)
    with pytest.raises(ValueError, match="priority_keys has a name twice: chat, chat"):
        ServerConfig(priority_keys=("chat", "chat"))
