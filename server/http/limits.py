"""Rate limits and ranks of API keys: requests, and prompt and completion tokens, per minute.

A bucket holds a minute's worth and fills all the time. A request is admitted while both buckets of
its key hold something; its tokens are taken when they are known, so a bucket may be overdrawn and
the key then waits. All API processes share the buckets: shared memory holds, for each, the time at
which it is full again, changed under a lock that ends with its process.
"""

from __future__ import annotations

import fcntl
import math
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256

from srm.server.errors import RateLimited

LONGEST_S = 120
"""Most seconds that a client is told to wait: it would not wait longer, and not come back."""
_ROUNDING_S = 1e-6
_FULL_AT = struct.Struct("=dd")
"""Times at which a key's two buckets are full again, by the monotonic clock that all processes
share."""


class Limits:
    """The accounts of all keys, each made when it is first needed."""

    def __init__(
        self,
        requests_per_minute: float,
        tokens_per_minute: float,
        fd: int = -1,
        clock: Callable[[], float] = time.monotonic,
        first: tuple[str, ...] = (),
        shares_prompts: bool = False,
    ) -> None:
        """Share the memory behind `fd` with whoever else has it; -1 creates memory of its own.
        `first`: names of the keys that come before the others, in this order; `shares_prompts`:
        whether keys may begin from each other's kept prompts."""
        self.shares_prompts = shares_prompts
        self.per_minute = requests_per_minute, tokens_per_minute
        self.clock = clock
        self.fd = os.memfd_create("srm-limits") if fd < 0 and any(self.per_minute) else fd
        self._accounts: dict[str, Account] = {}
        self._ranks = {name: rank for rank, name in enumerate(reversed(first), 1)}

    def account(self, name: str) -> Account:
        """Return the account of the key of this name."""
        if name not in self._accounts:
            self._accounts[name] = Account(name, self, self._ranks.get(name, 0))
        return self._accounts[name]


class Account:
    """The requests and tokens that one key has left."""

    def __init__(self, name: str, limits: Limits, priority: int) -> None:
        self.name = name
        self.priority = priority
        """Rank of its requests in the engine: higher is first."""
        self.prompts_of = "" if limits.shares_prompts else name
        """Whose kept prompts it may begin from; empty: everybody's."""
        self._limits = limits
        # Names hardly ever collide here, and memory that nobody writes takes no room.
        digest = sha256(name.encode("utf-8", "surrogateescape")).digest()
        self._place = int.from_bytes(digest[:5], "little") * _FULL_AT.size

    def admit(self) -> None:
        """Count a request. Raises RateLimited, and counts nothing, if there is none left."""
        now = self._limits.clock()
        with self._full_at() as full_at:
            for full, per_minute, what in zip(
                full_at, self._limits.per_minute, ("requests", "tokens"), strict=True
            ):
                one_s = 60 / max(per_minute, 1)
                wait_s = full - now - 60 + one_s if per_minute else 0
                if wait_s > _ROUNDING_S:
                    retry_after_s = min(math.ceil(wait_s - _ROUNDING_S), LONGEST_S)
                    raise RateLimited(
                        f"this key has used up its {per_minute:g} {what} a minute; "
                        f"try again in {retry_after_s} s",
                        retry_after_s,
                    )
            self._take(full_at, requests=1)

    def charge(self, tokens: int) -> None:
        """Take the tokens that a request of the key has used."""
        with self._full_at() as full_at:
            self._take(full_at, tokens=tokens)

    def _take(self, full_at: list[float], requests: int = 0, tokens: int = 0) -> None:
        now = self._limits.clock()
        for bucket, amount in enumerate((requests, tokens)):
            if per_minute := self._limits.per_minute[bucket]:
                full_at[bucket] = max(full_at[bucket], now) + amount * 60 / per_minute

    @contextmanager
    def _full_at(self) -> Iterator[list[float]]:
        """Yield when the buckets are full again, for the caller alone to change in place."""
        if not any(self._limits.per_minute):
            yield [0.0, 0.0]
            return
        fd, size = self._limits.fd, _FULL_AT.size
        fcntl.lockf(fd, fcntl.LOCK_EX, size, self._place)
        try:
            full_at = list(_FULL_AT.unpack(os.pread(fd, size, self._place).ljust(size, b"\0")))
            yield full_at
            os.pwrite(fd, _FULL_AT.pack(*full_at), self._place)
        finally:
            fcntl.lockf(fd, fcntl.LOCK_UN, size, self._place)
