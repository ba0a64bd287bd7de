"""What each key may ask for in a minute: requests, and tokens of prompts and completions.

A bucket holds a minute's worth and fills all the time. A request is admitted while both of its
key's hold something; its tokens are taken when they are known, so a bucket may be overdrawn and the
key then waits. Counted by one API process for itself. Knows no HTTP.
"""

from __future__ import annotations

import math
import time

from engine.errors import ConfigError, RateLimited
from server.config import ServerConfig
from server.keys import VARIABLE, Keys

LONGEST_S = 120
"""Most that a client is told to wait: it would not wait longer, and not come back."""


class Bucket:
    """Fills by `per_minute` a minute, up to that; 0 is without limit."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._per_minute = per_minute
        self._content = per_minute
        self._at = now

    def wait_s(self, least: float, now: float) -> float:
        """How long until it holds `least`, which must not be more than it can; 0 if it does."""
        if not self._per_minute:
            return 0.0
        full = self._content + (now - self._at) * self._per_minute / 60
        self._content, self._at = min(full, self._per_minute), now
        return max(min(least, self._per_minute) - self._content, 0) * 60 / self._per_minute

    def take(self, amount: float) -> None:
        self._content -= amount


class Account:
    """What one key has left."""

    def __init__(
        self, name: str, requests_per_minute: float, tokens_per_minute: float, now: float
    ) -> None:
        self.name = name
        self._tokens_per_minute = tokens_per_minute
        self._requests_per_minute = requests_per_minute
        self._requests = Bucket(requests_per_minute, now)
        self._tokens = Bucket(tokens_per_minute, now)

    def admit(self, now: float) -> None:
        """Count a request. Raises RateLimited, and counts nothing, if there is none left."""
        for bucket, per_minute, what in (
            (self._requests, self._requests_per_minute, "requests"),
            (self._tokens, self._tokens_per_minute, "tokens"),
        ):
            wait_s = bucket.wait_s(1, now)
            if wait_s > 0:
                retry_after_s = min(math.ceil(wait_s), LONGEST_S)
                raise RateLimited(
                    f"this key has used up its {per_minute:g} {what} a minute; "
                    f"try again in {retry_after_s} s",
                    retry_after_s,
                )
        self._requests.take(1)

    def admit_now(self) -> None:
        """The same, by this machine's clock."""
        self.admit(time.monotonic())

    def charge(self, tokens: int) -> None:
        """Tokens that a request of the key has had."""
        self._tokens.take(tokens)


class Limits:
    """The accounts of all keys, each made when it is first needed."""

    def __init__(self, requests_per_minute: float, tokens_per_minute: float) -> None:
        self._limits = requests_per_minute, tokens_per_minute
        self._accounts: dict[str, Account] = {}

    def account(self, name: str) -> Account:
        """Of the key of this name."""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(name, *self._limits, time.monotonic())
        return account


def check_limits(config: ServerConfig, keys: Keys) -> None:
    """Raises ConfigError for limits of keys where there are no keys."""
    for name in ("requests_per_minute", "tokens_per_minute"):
        if getattr(config, name) and not keys:
            raise ConfigError(
                f"{name} = {getattr(config, name):g} is a limit of API keys, and there are none: "
                f"set api_keys_file or {VARIABLE}"
            )
