"""A checksum in front of what an object of JSON says, so that a flipped bit of it is noticed.

It is a field of the object, which readers that do not know it pass over; an object without one was
written by an earlier version, and is read as it is.
"""

from __future__ import annotations

import re
import zlib

_SEAL = re.compile(rb'\{"crc32":"([0-9a-f]{8})",')


def sealed(data: bytes) -> bytes:
    """Return the bytes of a JSON object with its checksum as the first field."""
    return b'{"crc32":"%08x",' % zlib.crc32(data) + data[1:]


def unsealed(data: bytes) -> bytes:
    """Return the bytes that were sealed. Raises ValueError where the checksum is not theirs."""
    seal = _SEAL.match(data)
    if seal is None:
        return data
    data = b"{" + data[seal.end() :]
    if zlib.crc32(data) != int(seal[1], 16):
        raise ValueError("its checksum is of other bytes")
    return data
