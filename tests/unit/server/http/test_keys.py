"""Keys are read, found, and never shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.errors import ConfigError
from server.http.keys import Keys, key_to_send, load_keys

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"


def test_a_file_and_the_environment_add_up(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# who may\n\nalice in berlin {ALICE}\n")
    keys = load_keys(str(file), {"SRM_API_KEYS": f"{BOB}"})
    alice, bob = keys.find(ALICE), keys.find(BOB)
    assert alice and alice.name == "alice in berlin"
    assert bob and bob.name == "key-2"
    assert all(keys.find(other) is None for other in ("", ALICE + "x", ALICE[:-1], "\udcff", "é"))


def test_without_keys_there_are_none_and_nothing_of_a_key_is_kept() -> None:
    assert not load_keys("", {})
    assert Keys([]).find(ALICE) is None
    keys = load_keys("", {"SRM_API_KEYS": f"alice {ALICE}"})
    assert keys and ALICE not in repr(vars(keys))
    environ = {"SRM_API_KEYS": f"alice {ALICE}, bob {BOB}"}
    assert [key_to_send(environ, name) for name in ("bob", "eve")] == [BOB, ALICE]
    assert key_to_send({}, "bob") is None


def test_a_bad_file_is_named_and_its_keys_are_not(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    for content, message in (
        ("", "has no key"),
        ("# nobody\n", "has no key"),
        ("a short-key\n", "line 1: a key must have at least 16 characters"),
        (f"a {ALICE}\nb {ALICE}\n", "line 2: the same key or name as that of 'a'"),
        (f"a {ALICE}\na {BOB}\n", "line 2: the same key or name as that of 'a'"),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError) as caught:
            load_keys(str(file), {})
        assert message in caught.value.message
        assert not any(word in caught.value.message for word in (ALICE, BOB, "short-key"))
    os.mkfifo(tmp_path / "pipe")  # reading it would hold up all requests
    for name, message in (("pipe", "pipe': must be a file"), ("none", "cannot be read")):
        with pytest.raises(ConfigError, match=message):
            load_keys(str(tmp_path / name), {})
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
