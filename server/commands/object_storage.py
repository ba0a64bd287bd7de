"""Objects of S3 and of Google Cloud Storage as files of `srm batch`. Needs the extra `storage`.

An object is read in ranges, and written whole or not at all. The libraries find credentials by
themselves: none is in a URL or in a message.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal
from urllib.parse import unquote

from srm.errors import ConfigError

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
"""The package for URLs of each scheme."""
_BLOCK = 8 * 1024**2
"""Bytes read ahead, with one request."""
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://([^/]*)/?(.*)", re.IGNORECASE | re.DOTALL)


def located(field: str, name: str) -> Path | StoredObject:
    """Return the file or object that the path or URL given for a setting names. Raises ConfigError
    for other URLs, and if the package for it is not installed."""
    if (url := _URL.fullmatch(name)) is None:
        return Path(name)
    scheme, place, path = url[1].lower(), url[2], url[3]
    if scheme == "file" and place in {"", "localhost"}:
        return Path("/" + unquote(path))
    if scheme not in _PACKAGES:
        raise ConfigError(
            f"{field} must be a path or begin with file:///, s3:// or gs://, got {scheme}://"
        )
    if "@" in place or (":" in place and not place.startswith("arn:")):
        raise ConfigError(
            f"{field} must be {scheme}://BUCKET/KEY without credentials, which whoever lists the "
            "processes would see: give them in the environment or a file"
        )
    if not place or not path or path.endswith("/"):
        raise ConfigError(f"{field} must be {scheme}://BUCKET/KEY, got {name}")
    package = _PACKAGES[scheme]
    try:
        import_module(package)
        return StoredObject(field, f"{scheme}://{place}/{path}", scheme, place, path)
    except ImportError:
        raise ConfigError(
            f"{field} = {name} needs {package}, which is not installed: pip install {package}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{field} = {name}: {error}") from None


class StoredObject:
    """An object, which may be there or not."""

    def __init__(self, field: str, url: str, scheme: str, bucket: str, key: str) -> None:
        """`field` is the setting that names it. Raises OSError without credentials."""
        for library in ("aiobotocore", "botocore", "gcsfs"):  # all they say is raised, or details
            logging.getLogger(library).setLevel(logging.CRITICAL)
        self.field = field
        self._url = url
        self._bucket = bucket
        self._path = f"{bucket}/{key}"
        with self._explained():
            self._files: Any = import_module("fsspec").filesystem(
                scheme, skip_instance_cache=True, use_listings_cache=False
            )
        self.name = PurePosixPath(key).name
        self.suffix = PurePosixPath(key).suffix

    def __str__(self) -> str:
        return self._url

    @contextmanager
    def open(self, mode: Literal["rb"] = "rb") -> Iterator[BinaryIO]:
        """Open it for reading, at any place. Here and while it is read, raises OSError."""
        with (
            self._explained(),
            self._files.open(self._path, mode, block_size=_BLOCK, cache_type="readahead") as file,
        ):
            yield file

    def exists(self) -> bool:
        """Return whether it is there. Raises OSError if its bucket is not, or cannot be read."""
        with self._explained():
            self._files.info(self._bucket)
            try:
                return bool(self._files.info(self._path)["type"] == "file")
            except FileNotFoundError:
                return False

    def download(self, path: Path) -> None:
        """Make a file of it, which is there whole or not at all. Raises OSError."""
        unfinished = path.with_name(f"{path.name}.tmp")
        with self._explained():
            self._files.get_file(self._path, str(unfinished))
        unfinished.replace(path)

    def upload(self, path: Path) -> None:
        """Make it from a file, in place of what is there; it changes whole or not at all. Raises
        OSError."""
        with self._explained():
            self._files.put_file(str(path), self._path)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Make an OSError that can be read of whatever the libraries raise."""
        try:
            yield
        except FileNotFoundError:
            raise OSError("there is no such object or bucket") from None
        except PermissionError as error:
            raise OSError(f"permission denied: {error}") from None
        except Exception as error:  # noqa: BLE001 - the libraries have no common class
            raise OSError(f"{type(error).__name__}: {error}") from None


Source = Path | StoredObject
"""A file, wherever it is."""
