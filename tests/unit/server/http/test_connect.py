"""A connection that is lent to whoever writes a reply's events itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from srm.server.http.connection import Connection, offer
from srm.server.http.responses import CONNECT


class Gone:
    """A transport that is closed."""

    def write(self, data: bytes) -> None:
        raise RuntimeError("the handler is closed")


def connection(**fields: Any) -> Any:
    made = Connection.__new__(Connection)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_whoever_writes_to_a_lost_connection_is_told_to_leave_it_to_the_task() -> None:
    """Whose `send` raises: behind a pipelined request nothing else says that the client left."""
    paused: list[bool] = []
    lost = connection(transport=Gone(), on_pause=lambda: paused.append(True))
    lost.write(b"5\r\nhello\r\n")
    assert paused == [True]


def test_a_reply_in_chunks_gives_its_connection_and_no_other_does() -> None:
    for is_chunked, is_gone in ((True, False), (False, False), (True, True)):
        cycle = SimpleNamespace(scope={})
        lender = connection(cycle=cycle)
        offer(lender)
        cycle.chunked_encoding, cycle.disconnected = is_chunked, is_gone
        outlet = SimpleNamespace(connection=None)
        cycle.scope["extensions"][CONNECT](outlet)
        assert (outlet.connection is lender) == (is_chunked and not is_gone)
