"""API keys: who may ask. Kept as digests, so nothing here can show one.

Each line of the file, and each part between commas of SRM_API_KEYS, is a key, or a name, a space
and a key. Names are for logs and metrics; a key without one is called by its place.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from srm.errors import ConfigError
from srm.files import read_file
from srm.server.config import ServerConfig

VARIABLE = "SRM_API_KEYS"
MIN_LENGTH = 16
"""Characters of a key. Shorter ones can be guessed."""


@dataclass(frozen=True)
class ApiKey:
    """An API key: its name, and the SHA-256 digest that identifies it."""

    name: str
    digest: bytes


class Keys:
    """The keys that may ask. Without any, everybody may."""

    def __init__(self, keys: list[ApiKey]) -> None:
        self.all = keys

    @property
    def names(self) -> list[str]:
        """Names of the keys."""
        return [key.name for key in self.all]

    def reread(self, file: str, environ: Mapping[str, str]) -> None:
        """Replace the keys by those there are now. Raises ConfigError, and then changes nothing."""
        self.all = load_keys(file, environ).all

    def find(self, given: str) -> ApiKey | None:
        """Return the key that was given, if it is one of ours. Takes equally long for every key."""
        digest = sha256(given.encode("utf-8", "surrogateescape")).digest()
        match = None
        for key in self.all:
            if hmac.compare_digest(key.digest, digest):
                match = key
        return match


def load_keys(file: str, environ: Mapping[str, str]) -> Keys:
    """Return the keys of the file, if any is named, and of the environment.

    Raises ConfigError for a file that cannot be read or has none, and for keys that are too short
    or given twice; names the line and never what is in it.
    """
    entries = [*_of_file(file), *_of_variable(environ.get(VARIABLE, ""))]
    if (file or environ.get(VARIABLE) is not None) and not entries:
        raise ConfigError(f"{f'api_keys_file = {file!r}' if file else VARIABLE} has no key")
    keys: list[ApiKey] = []
    for place, entry in entries:
        *name, key = entry.split()
        if len(key) < MIN_LENGTH:
            raise ConfigError(f"{place}: a key must have at least {MIN_LENGTH} characters")
        api_key = ApiKey(" ".join(name) or f"key-{len(keys) + 1}", sha256(key.encode()).digest())
        for other in keys:
            if api_key.name == other.name or api_key.digest == other.digest:
                raise ConfigError(f"{place}: the same key or name as that of {other.name!r}")
        keys.append(api_key)
    return Keys(keys)


def key_to_send(environ: Mapping[str, str], name: str) -> str | None:
    """Return the environment's key of that name, or else its first one; None without any."""
    entries = [entry.split() for _, entry in _of_variable(environ.get(VARIABLE, ""))]
    of_name = [entry[-1] for entry in entries if " ".join(entry[:-1]) == name]
    return next(iter([*of_name, *(entry[-1] for entry in entries)]), None)


def _of_file(file: str) -> Iterator[tuple[str, str]]:
    if not file:
        return
    path = Path(file).expanduser()
    try:
        text = read_file(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"api_keys_file = {file!r}: cannot be read: {reason}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield f"api_keys_file = {file!r}, line {number}", line


def _of_variable(value: str) -> Iterator[tuple[str, str]]:
    for number, entry in enumerate(value.replace("\n", ",").split(","), 1):
        if entry.strip():
            yield f"{VARIABLE}, entry {number}", entry


def check_limits(config: ServerConfig, keys: Keys) -> None:
    """Raises ConfigError for limits of keys where there are none, and for names that none has."""
    for name in ("requests_per_minute", "tokens_per_minute"):
        if getattr(config, name) and not keys.all:
            raise ConfigError(
                f"{name} = {getattr(config, name):g} is a limit of API keys, and there are none: "
                f"set api_keys_file or {VARIABLE}"
            )
    for name in config.priority_keys:
        if name not in keys.names:
            raise ConfigError(
                f"priority_keys names {name!r}, and there is no such key: the names are "
                f"{', '.join(map(repr, keys.names)) or 'none'}"
            )
