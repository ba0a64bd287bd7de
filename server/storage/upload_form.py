"""A multipart form with one file, taken apart as it comes: fields are kept, the file passed on."""

from __future__ import annotations

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from srm.errors import InvalidRequest

MAX_FIELD_BYTES = 4096
"""Most bytes of a field that is not the file."""
MAX_FILENAME = 255
"""Most characters of a file's name."""
_FILE = "file"


class UploadForm:
    """Parses one form. `parse` takes bytes of the body and returns those of the file."""

    def __init__(self, content_type: str, names: frozenset[str]) -> None:
        """`names` are the fields allowed besides the file. Raises InvalidRequest."""
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """None until the file begins."""
        self.is_whole = False
        self._names = names
        self._name = ""
        self._value = bytearray()
        self._header = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._header_value = bytearray()
        self._found: list[bytes] = []
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise InvalidRequest(
                "content-type must be multipart/form-data with a boundary; "
                f"got {content_type[:80]!r}",
                "content-type",
            )
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._add_header_name,
                    "on_header_value": self._add_header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._add_data,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise InvalidRequest(f"the form's boundary is none: {error}", "content-type") from None

    def parse(self, data: bytes) -> list[bytes]:
        """Return what these bytes of the body hold of the file. Raises InvalidRequest."""
        self._found = []
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequest(f"the body is no multipart form: {error}") from None
        return self._found

    def finish(self) -> str:
        """Return the file's name. Raises InvalidRequest for a form cut short or without a file."""
        if not self.is_whole:
            raise InvalidRequest("the body ends in the middle of the form")
        if self.filename is None:
            raise InvalidRequest("file is required: a file with its name", _FILE)
        return self.filename

    def _begin_part(self) -> None:
        self._headers = {}
        self._value = bytearray()

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._header_value)
        self._header, self._header_value = bytearray(), bytearray()

    def _end_headers(self) -> None:
        disposition = self._headers.get(b"content-disposition", b"").decode("latin-1")
        kind, options = parse_options_header(disposition)
        if kind != b"form-data" or b"name" not in options:
            raise InvalidRequest("every part of the form needs content-disposition with a name")
        self._name = options[b"name"].decode("utf-8", "replace")
        if self._name == _FILE:
            self._begin_file(options.get(b"filename"))
        elif self._name not in self._names:
            name = self._name[:80]
            raise InvalidRequest(f"{name!r} is not a field of this request", name)
        elif self._name in self.fields:
            raise InvalidRequest(f"{self._name} is there twice", self._name)

    def _begin_file(self, filename: bytes | None) -> None:
        if self.filename is not None:
            raise InvalidRequest("file is there twice: send one file at a time", _FILE)
        if not filename:
            raise InvalidRequest("file must have a filename in its content-disposition", _FILE)
        name = filename.decode("utf-8", "replace")
        if len(name) > MAX_FILENAME:
            raise InvalidRequest(
                f"the filename must have at most {MAX_FILENAME} characters; got {len(name)}", _FILE
            )
        self.filename = name

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == _FILE:
            self._found.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise InvalidRequest(
                f"{self._name} must have at most {MAX_FIELD_BYTES} bytes", self._name
            )

    def _end_part(self) -> None:
        if self._name != _FILE:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self.is_whole = True
