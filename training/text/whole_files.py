"""Files that appear whole or not at all, and replace in one step what was there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Give a path to write to; what is there then replaces `path` in one step."""
    partial = path.with_name(path.name + ".partial")
    yield partial
    partial.replace(path)


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step."""
    with whole(path) as partial:
        partial.write_bytes(content)
