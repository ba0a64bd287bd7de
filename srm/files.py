"""Opens the files that an operator or a client names, and puts a checksum into our own JSON.

Only a regular file is opened, and the open file is what is checked: a pipe, a device or an endless
file behind the name costs nothing. Links are followed; within a folder only where they end inside.

The checksum shows a flipped bit. It is a field of the object, which readers that do not know it
pass over; an object without one was written by an earlier version, and is read as it is.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import zlib
from io import BufferedReader
from pathlib import Path

SMALL_BYTES = 64 * 1024**2
"""Most bytes of a file that belongs to a model and has no weights."""
_READ = os.O_RDONLY | os.O_CLOEXEC
_SEAL = re.compile(rb'\{"crc32":"([0-9a-f]{8})",')


def open_file(path: Path, within: Path | None = None) -> BufferedReader:
    """Open a regular file to read. Raises OSError for anything else, and for what does not lie
    `within` a folder once all links are followed."""
    flags = _READ | os.O_NONBLOCK  # a pipe is not waited for
    file = os.open(path, flags) if within is None else _open_beneath(path, within, flags)
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(file, "rb")
    os.close(file)
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(number, "must be a regular file", str(path))


def _open_beneath(path: Path, within: Path, flags: int) -> int:
    """Open each part from the handle of the folder before it, so that a part that becomes a link
    meanwhile is refused."""
    root, real = os.path.realpath(within), Path(os.path.realpath(path))
    if not real.is_relative_to(root):
        raise OSError(errno.EXDEV, f"leads outside {within}", str(path))
    folder = os.open(root, _READ | os.O_DIRECTORY)
    try:
        *folders, name = real.relative_to(root).parts or (".",)
        for part in folders:
            inner = os.open(part, _READ | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)
    finally:
        os.close(folder)


def read_file(path: Path, most: int = SMALL_BYTES, within: Path | None = None) -> bytes:
    """Read a regular file of at most so many bytes. Raises OSError as `open_file` does, and for a
    file that is larger, or written meanwhile."""
    with open_file(path, within) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"is larger than {most} bytes", str(path))
        content = file.read(size + 1)
    if len(content) != size:
        raise OSError(errno.EBUSY, "was written while it was read", str(path))
    return content


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
