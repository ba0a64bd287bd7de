"""`python -m tests.tools.replies URL FILE` asks a server 500 things and writes what it replied.

Two commits answer alike if the files are the same: `diff` shows where not. The server runs
tests.engines.numpy_engine on the model of `tests.serving.write_text_model`. Times, ids and ports
are replaced, and a stream, whose events depend on time, becomes its first and last event with the
choices joined. Uses only the standard library, so that it runs beside any commit.
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
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

Call = tuple[str, str, dict[str, str], bytes]
"""Method, path, headers, body."""

_JSON = {"content-type": "application/json"}
_COMPLETION, _CHAT = "/v1/completions", "/v1/chat/completions"
_CAT = {"prompt": "the cat", "max_tokens": 6, "seed": 3}
_HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "seed": 3}
_HONOURED: list[dict[str, Any]] = [
    *({"n": n} for n in (1, 2, 5, 16)),
    *({"temperature": t} for t in (0, 0.5, 1, 2)),
    *({"top_p": p} for p in (0.1, 0.9, 1)),
    *({"top_k": k} for k in (-1, 1, 40)),
    *({"min_p": p} for p in (0.0, 0.2)),
    {"stop": "a"},
    {"stop": ["e", "the"]},
    {"stop": " c", "include_stop_str_in_output": True},
    {"stop_token_ids": [5, 70]},
    {"logit_bias": {"70": 100}},
    {"logit_bias": {"70": -100, "71": 3}},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -1},
    {"repetition_penalty": 1.3},
    {"allowed_token_ids": [70, 71, 72]},
    {"bad_words": ["cat"]},
    {"min_tokens": 3},
    {"ignore_eos": True},
    {"user": "somebody"},
    {"priority": 2},
    {"return_token_ids": True},
    {"skip_special_tokens": False},
    {"n": 4, "until": {"match": "a"}},
    {"n": 8, "until": {"match": "a", "count": 1}},
    {"n": 8, "return": "unique"},
    {"n": 8, "return": "counts"},
    {"n": 8, "return": "counts", "until": {"match": "(.)$"}, "count_by": "group"},
    {"prompt_logprobs": 2},
    {"return_tokens_as_token_ids": True, "n": 2},
]
_COMPLETIONS: list[dict[str, Any]] = [
    {"logprobs": 0},
    {"logprobs": 3},
    {"logprobs": 2, "echo": True},
    {"echo": True},
    {"echo": True, "max_tokens": 0},
    {"best_of": 4, "n": 2},
    {"prompt": ["the cat", "the mat", "sat"]},
    {"prompt": [1, 2, 3]},
    {"prompt": [[1, 2, 3], [70, 71]], "n": 2},
    {"truncate_prompt_tokens": 2, "logprobs": 1},
    {"add_special_tokens": False},
    {"return_packed": True},
    {"return_packed": True, "logprobs": 2, "return_token_ids": True},
    {"return_packed": True, "prompt_logprobs": 1, "n": 3},
    {"prompt": "é ü 漢字 🐈", "max_tokens": 12},
]
_CHATS: list[dict[str, Any]] = [
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3},
    {"max_completion_tokens": 4},
    {"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "so"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "parts"}]}]},
]
_STREAMED: list[dict[str, Any]] = [
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stream": True, "stream_interval": 4},
    {"stream": True, "stream_whole": True},
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
    texts: tuple[dict[str, Any], ...] = (
        {"prompt": "the cat"},
        {"tokens": [1, 70]},
        {"messages": []},
        {"tokens": [-1]},
    )
    paths = ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize")
    for path, text in itertools.product(paths, texts):
        yield _post(path, text)


def _post(path: str, body: dict[str, Any]) -> Call:
    return "POST", path, _JSON, json.dumps(body).encode()


class Server:
    """A server under test."""

    def __init__(self, url: str) -> None:
        self._host = urlsplit(url).netloc
        self._seen: dict[str, str] = {}  # names for ids, in the order in which they come

    def ask(self, call: Call) -> str:
        """Send a request; return its reply's status, types and body without what time changes."""
        method, path, headers, body = call
        connection = http.client.HTTPConnection(self._host, timeout=600)
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        data = reply.read()
        connection.close()
        kind = reply.headers.get("content-type", "")
        if "event-stream" in kind:
            text = _joined(data.decode())
        elif "json" in kind:
            text = data.decode()
        else:
            text = f"{len(data) > 0}"
        more = {name: reply.headers.get(name) for name in ("allow", "x-should-retry", "location")}
        told = f"{reply.status} {kind} { ({k: v for k, v in more.items() if v}) }\n{text}"
        return self._without_luck(told)

    def _without_luck(self, text: str) -> str:
        text = re.sub(r'("(?:\w+_at|created)": ?)\d+', r"\g<1>0", text)
        text = re.sub(r'("(?:cached_tokens|discarded_tokens)": ?)\d+', r"\g<1>0", text)
        text = text.replace(self._host, "HOST")

        def name(found: re.Match[str]) -> str:
            return self._seen.setdefault(found[0], f"{found[1]}-{len(self._seen)}")

        return re.sub(r"\b(cmpl|chatcmpl|file|batch|batch_req|req)[-_][0-9a-zA-Z]{16,}", name, text)


def _joined(text: str) -> str:
    """A stream's first and last event of each choice, with its texts joined."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event.get("choices", ()):
            joined = choices.setdefault(choice["index"], {})
            _join(joined, choice)
    first = {k: v for k, v in events[0].items() if k not in {"choices", "usage"}}
    rest = [event for event in events if not event.get("choices")]
    return json.dumps([first, sorted(choices.items()), rest, lines[-1]], ensure_ascii=False)


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def _join(into: dict[str, Any], new: dict[str, Any], path: str = "") -> None:
    for name, value in new.items():
        old = into.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            _join(old, value, name)
        elif isinstance(value, list) and isinstance(old, list):
            into[name] = old + value
        elif isinstance(value, str) and isinstance(old, str) and name not in {"role", "object"}:
            into[name] = old + value
            if "packed" in path:  # base64, padded at the end of each event
                into[name] = base64.b64encode(_bytes(old) + _bytes(value)).decode()
        elif value is not None or name not in into:
            into[name] = value


def stored(server: Server) -> Iterator[tuple[Call, str]]:
    """Upload files, run batches of them and read the results."""

    def upload(data: bytes, purpose: str = "batch", name: str = "a.jsonl") -> Call:
        form = (
            f'--B\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n--B\r\n'
            f'content-disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        ).encode()
        kind = {"content-type": "multipart/form-data; boundary=B"}
        return "POST", "/v1/files", kind, form + data + b"\r\n--B--\r\n"

    names: dict[str, str] = {}

    def said(call: Call) -> tuple[Call, str]:
        reply = server.ask(call)
        names.update({new: old for old, new in server._seen.items()})
        return call, reply

    def line(i: int, body: dict[str, Any], url: str = _COMPLETION) -> bytes:
        what = {"custom_id": f"r{i}", "method": "POST", "url": url, "body": body}
        return json.dumps(what).encode() + b"\n"

    good = b"".join(line(i, _CAT | {"seed": i}) for i in range(5))
    mixed = good + line(9, {"prompt": "x", "n": -1}) + line(10, _CAT | {"priority": 3})
    for data in (good, mixed, b"", b"\n", b"{\n", good + good, line(0, _HELLO, _CHAT), b"\xff\n"):
        call, reply = said(upload(data))
        yield call, reply
        found = re.search(r"file-\d+", reply)
        if not found:
            continue
        file = names[found[0]]
        path = _CHAT if b"messages" in data else _COMPLETION
        body = {"input_file_id": file, "endpoint": path, "completion_window": "24h"}
        yield said(("GET", f"/v1/files/{file}", {}, b""))
        call, reply = said(_post("/v1/batches", body))
        yield call, reply
        found = re.search(r'"id":"(batch-\d+)', reply)
        if not found:
            continue
        batch = names[found[1]]
        for _ in range(2000):
            call, reply = said(("GET", f"/v1/batches/{batch}", {}, b""))
            if re.search(r'"status":"(completed|failed|expired|cancelled)"', reply):
                break
            time.sleep(0.1)
        yield call, reply
        for kind in ("output", "error"):
            if result := re.search(rf'"{kind}_file_id":"(file-\d+)"', reply):
                connection = http.client.HTTPConnection(server._host, timeout=600)
                connection.request("GET", f"/v1/files/{names[result[1]]}/content")
                lines = connection.getresponse().read().decode().splitlines()
                connection.close()
                text = "\n".join(sorted(lines, key=lambda one: re.findall(r'"r\d+"', one)))
                yield ("GET", f"{kind} of the batch", {}, b""), server._without_luck(text)
        yield said(("POST", f"/v1/batches/{batch}/cancel", {}, b""))
        yield said(("DELETE", f"/v1/files/{file}", {}, b""))
    for purpose in ("fine-tune", "x", ""):
        yield said(upload(good, purpose))
    for fields in (
        {"weight": 0},
        {"weight": 5e-324},
        {"completion_window": "1h"},
        {"endpoint": "/x"},
    ):
        body = {"input_file_id": "file-none", "endpoint": _COMPLETION, "completion_window": "24h"}
        yield said(_post("/v1/batches", body | fields))


def main(url: str, path: str) -> None:
    server = Server(url)
    count = 0
    with Path(path).open("w", encoding="utf-8") as out:
        for call, reply in itertools.chain(
            ((call, server.ask(call)) for call in calls()), stored(server)
        ):
            count += 1
            shown = call[3][:300].decode(errors="replace")
            shown = re.sub(r"\b(file|batch)[-_][0-9a-zA-Z]{16,}", "ID", shown)
            where = re.sub(r"\b(file|batch)[-_][0-9a-zA-Z]{16,}", "ID", call[1])
            out.write(f"## {call[0]} {where} {shown}\n{reply}\n")
    print(f"{count} replies in {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
