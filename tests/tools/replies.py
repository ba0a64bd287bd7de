"""`python -m tests.tools.replies URL FILE` asks a server 732 things and writes what it replied.

Two commits answer alike if the files are the same: `diff` shows where not. The server runs
tests.kit.processes.numpy_engine on the model of `tests.kit.serving.write_text_model`, or any other,
on a new
data folder. Times, ids and ports are replaced, and a stream, whose events depend on time, becomes
its first and last event with the choices joined. Uses only the standard library, so that it runs
beside any commit.
"""

from __future__ import annotations

import base64
import http.client
import itertools
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

Fields = dict[str, Any]
Call = tuple[str, str, dict[str, str], bytes]
"""Method, path, headers, body."""

_JSON = {"content-type": "application/json"}
_COMPLETION, _CHAT = "/v1/completions", "/v1/chat/completions"
_CAT: Fields = {"prompt": "the cat", "max_tokens": 6, "seed": 3}
_HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "seed": 3}
_HONOURED: list[Fields] = [
    *({"n": n} for n in (1, 2, 5, 16)),
    *({"temperature": t} for t in (0, 0.5, 1, 2)),
    *({"top_p": p} for p in (0.1, 0.9, 1)),
    *({"top_k": k} for k in (-1, 1, 40)),
    *({"min_p": p} for p in (0.0, 0.2)),
    *({"stop": "a"}, {"stop": ["e", "the"]}, {"stop": " c", "include_stop_str_in_output": True}),
    {"stop_token_ids": [5, 70]},
    *({"logit_bias": {"70": 100}}, {"logit_bias": {"70": -100, "71": 3}}),
    *({"presence_penalty": 1.5}, {"frequency_penalty": -1}, {"repetition_penalty": 1.3}),
    *({"allowed_token_ids": [70, 71, 72]}, {"bad_words": ["cat"]}),
    *({"min_tokens": 3}, {"ignore_eos": True}, {"user": "somebody"}, {"priority": 2}),
    *({"return_token_ids": True}, {"skip_special_tokens": False}),
    *({"n": 4, "until": {"match": "a"}}, {"n": 8, "until": {"match": "a", "count": 1}}),
    *({"n": 8, "return": "unique"}, {"n": 8, "return": "counts"}),
    {"n": 8, "return": "counts", "until": {"match": "(.)$"}, "count_by": "group"},
    {"n": 8, "verify": {"match": "[aeiou]"}, "until": {"score": 1, "count": 2}},
    *({"prompt_logprobs": 2}, {"return_tokens_as_token_ids": True, "n": 2}),
]
_COMPLETIONS: list[Fields] = [
    *({"logprobs": 0}, {"logprobs": 3}, {"logprobs": 2, "echo": True}),
    *({"echo": True}, {"echo": True, "max_tokens": 0}, {"best_of": 4, "n": 2}),
    *({"prompt": ["the cat", "the mat", "sat"]}, {"prompt": [1, 2, 3]}),
    {"prompt": [[1, 2, 3], [70, 71]], "n": 2},
    *({"truncate_prompt_tokens": 2, "logprobs": 1}, {"add_special_tokens": False}),
    {"return_packed": True},
    {"return_packed": True, "logprobs": 2, "return_token_ids": True},
    {"return_packed": True, "prompt_logprobs": 1, "n": 3},
    {"prompt": "é ü 漢字 🐈", "max_tokens": 12},
]
_CHATS: list[Fields] = [
    *({"logprobs": True}, {"logprobs": True, "top_logprobs": 3}, {"max_completion_tokens": 4}),
    {"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "so"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "parts"}]}]},
]
_STREAMED: list[Fields] = [
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    *({"stream": True, "stream_interval": 4}, {"stream": True, "stream_whole": True}),
]
_VALUES: list[Any] = [
    *(None, True, "x", [], {}, -1, 0, 1.5, 1e300, -1e300, 2**31, 2**63, 2**64, 5e-324),
]
_FIELDS = [
    *("prompt", "model", "n", "best_of", "max_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("stop", "seed", "stream", "logprobs", "echo", "logit_bias", "until", "return", "priority"),
]
_CHAT_FIELDS = ["messages", "top_logprobs", "tools", "tool_choice", "response_format", "n"]
_PATHS = [
    *("/", "/health", "/ready", "/ping", "/version", "/v1/models", "/v1/models/none", "/nothing"),
    *("/v1/files", "/v1/files/none", "/v1/files/none/content", "/v1/batches", "/v1/batches/none"),
    *("/v1/files?limit=0", "/v1/files?order=x", "/v1/batches?limit=x", "/v1/batches?after=none"),
    *("/get_world_size", "/v1/v1/models", "/completions", "/chat/completions", "/openapi.json"),
]


def calls() -> Iterator[Call]:
    """Yield the requests that do not depend on earlier replies, always the same ones."""
    for path, base, own in ((_COMPLETION, _CAT, _COMPLETIONS), (_CHAT, _HELLO, _CHATS)):
        for fields in (*_HONOURED, *own):
            yield _post(path, base | fields)
        for fields, stream in itertools.product((*_HONOURED[::2], *own), _STREAMED[:2]):
            yield _post(path, base | fields | stream)
        for stream in _STREAMED:
            yield _post(path, base | {"n": 3} | stream)
        names = _FIELDS if base is _CAT else _CHAT_FIELDS
        for name, value in itertools.product(names, _VALUES):
            if (name, value) != ("seed", None):  # without one, each reply is another
                yield _post(path, base | {name: value})
        yield _post(path, {**base, "no_such_field": 1})
        yield _post(path, {**base, "max_token": 1})
        for body in (b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"prompt": "\xc3"}'):
            yield "POST", path, _JSON, body
        yield "POST", path, {"content-type": "text/plain"}, json.dumps(base).encode()
        yield "POST", path, _JSON | {"origin": "http://elsewhere"}, json.dumps(base).encode()
    for path in _PATHS:
        for method in ("GET", "POST", "DELETE"):
            yield method, path, {}, b""
    texts: list[Fields] = [{"prompt": "the cat"}, {"tokens": [1, 70]}, {"messages": []}]
    paths = ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize")
    for path, text in itertools.product(paths, [*texts, {"tokens": [-1]}]):
        yield _post(path, text)


def _post(path: str, body: Fields) -> Call:
    return "POST", path, _JSON, json.dumps(body).encode()


class Recorder:
    """Asks a server, and writes what it was asked and what it replied."""

    def __init__(self, url: str, file: TextIO) -> None:
        self._host, self._file = urlsplit(url).netloc, file
        self._names: dict[str, str] = {}  # of ids, in the order in which they come
        self.count = 0

    def record(self, call: Call) -> str:
        reply = self.ask(call)
        self.write(call, reply)
        return reply

    def write(self, call: Call, reply: str) -> None:
        method, path, _, body = call
        asked = f"{method} {path} {body[:300].decode(errors='replace')}"
        asked = re.sub(r"\b(file|batch)[-_][0-9a-zA-Z]{16,}", "ID", asked)
        self._file.write(f"## {asked}\n{reply}\n")
        self.count += 1

    def ask(self, call: Call) -> str:
        """The reply's status, type and body, without what time changes."""
        headers, data = self._fetched(call)
        kind = headers.get("content-type", "")
        if "event-stream" in kind:
            text = _joined(data.decode())
        else:
            text = data.decode() if "json" in kind else f"{len(data) > 0}"
        names = ("allow", "x-should-retry", "location")
        more = {name: headers[name] for name in names if headers.get(name)}
        return self._without_luck(f"{headers['status']} {kind} {more}\n{text}")

    def content(self, file: str) -> str:
        """The lines of a batch's results, in the order of its requests."""
        _, data = self._fetched(("GET", f"/v1/files/{file}/content", {}, b""))
        lines = sorted(data.decode().splitlines(), key=lambda one: re.findall(r'"r\d+"', one))
        return self._without_luck("\n".join(lines))

    def id_in(self, reply: str, pattern: str) -> str:
        """The id whose name in the reply has this pattern; nothing if there is none."""
        match = re.search(pattern, reply)
        return next((key for key, name in self._names.items() if match and name == match[1]), "")

    def _fetched(self, call: Call) -> tuple[dict[str, str], bytes]:
        method, path, headers, body = call
        with closing(http.client.HTTPConnection(self._host, timeout=600)) as connection:
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            entries = {name.lower(): value for name, value in reply.getheaders()}
            return entries | {"status": str(reply.status)}, reply.read()

    def _without_luck(self, text: str) -> str:
        def name(match: re.Match[str]) -> str:
            return self._names.setdefault(match[0], f"{match[1]}-{len(self._names)}")

        counted = r"\w+_at|created|cached_tokens|discarded_tokens"
        text = re.sub(rf'("(?:{counted})": ?)\d+', r"\g<1>0", text).replace(self._host, "HOST")
        return re.sub(r"\b(cmpl|chatcmpl|file|batch|batch_req|req)[-_][0-9a-zA-Z]{16,}", name, text)


def _joined(text: str) -> str:
    """A stream's first and last event of each choice, with its texts joined."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    choices: dict[int, Fields] = {}
    for choice in itertools.chain(*(event.get("choices", ()) for event in events)):
        _join(choices.setdefault(choice["index"], {}), choice)
    first = {k: v for k, v in events[0].items() if k not in {"choices", "usage"}}
    rest = [event for event in events if not event.get("choices")]
    return json.dumps([first, sorted(choices.items()), rest, lines[-1]], ensure_ascii=False)


_SAME = {"role", "object"}
"""Strings that every event repeats."""


def _join(into: Fields, new: Fields, path: str = "") -> None:
    for name, value in new.items():
        old: Any = into.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            _join(old, value, name)
        elif isinstance(value, str) and isinstance(old, str) and "packed" in path:
            # base64, padded at the end of each event
            whole = base64.b64decode(old) + base64.b64decode(value)
            into[name] = base64.b64encode(whole).decode()
        elif isinstance(value, list | str) and type(value) is type(old) and name not in _SAME:
            into[name] += value
        elif value is not None or name not in into:
            into[name] = value


def _upload(data: bytes, purpose: str = "batch") -> Call:
    form = (
        f'--B\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n--B\r\n'
        'content-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    ).encode()
    kind = {"content-type": "multipart/form-data; boundary=B"}
    return "POST", "/v1/files", kind, form + data + b"\r\n--B--\r\n"


def _line(i: int, body: Fields, url: str = _COMPLETION) -> bytes:
    what = {"custom_id": f"r{i}", "method": "POST", "url": url, "body": body}
    return json.dumps(what).encode() + b"\n"


def _batch(file: str, **fields: object) -> Call:
    asked = {"input_file_id": file, "endpoint": _COMPLETION, "completion_window": "24h"}
    return _post("/v1/batches", asked | fields)


def record_batches(server: Recorder) -> None:
    """Upload files, run batches of them and read the results."""
    good = b"".join(_line(i, _CAT | {"seed": i}) for i in range(5))
    mixed = good + _line(9, {"prompt": "x", "n": -1}) + _line(10, _CAT | {"priority": 3})
    chat = _line(0, _HELLO, _CHAT)
    for data in (good, mixed, b"", b"\n", b"{\n", good + good, chat, b"\xff\n"):
        file = server.id_in(server.record(_upload(data)), r"(file-\d+)")
        if not file:
            continue
        server.record(("GET", f"/v1/files/{file}", {}, b""))
        started = server.record(_batch(file, endpoint=_CHAT if data == chat else _COMPLETION))
        if batch := server.id_in(started, r'"id":"(batch-\d+)'):
            _record_end(server, file, batch)
    for purpose in ("fine-tune", "x", ""):
        server.record(_upload(good, purpose))
    wrong: list[Fields] = [{"weight": 0}, {"weight": 5e-324}, {"completion_window": "1h"}]
    for fields in [*wrong, {"endpoint": "/x"}]:
        server.record(_batch("file-none", **fields))


def _record_end(server: Recorder, file: str, batch: str) -> None:
    call: Call = ("GET", f"/v1/batches/{batch}", {}, b"")
    for _ in range(2000):
        reply = server.ask(call)
        if re.search(r'"status":"(completed|failed|expired|cancelled)"', reply):
            break
        time.sleep(0.1)
    server.write(call, reply)
    for kind in ("output", "error"):
        if result := server.id_in(reply, rf'"{kind}_file_id":"(file-\d+)"'):
            server.write(("GET", f"{kind} of the batch", {}, b""), server.content(result))
    server.record(("POST", f"/v1/batches/{batch}/cancel", {}, b""))
    server.record(("DELETE", f"/v1/files/{file}", {}, b""))


def main(url: str, path: str) -> None:
    with Path(path).open("w", encoding="utf-8") as file:
        server = Recorder(url, file)
        for call in calls():
            server.record(call)
        record_batches(server)
    print(f"{server.count} replies in {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
