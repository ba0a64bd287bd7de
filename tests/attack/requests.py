"""Random requests of every route: valid ones, extreme values, and what is no HTTP at all."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from srm.server.routes.app import OPERATIONS
from srm.server.schema.openapi import Operation
from tests.attack.hostile import hostile_constraint

STATE = f"state_{'0' * 32}"
RESPONSE = f"resp_{'0' * 32}"
LARGE = '"' + "x" * 5000 + '"'
EXTREMES = (
    *("0", "-0", "1", "-1", "0.1", "0.5", "2147483647", "2147483648", "9007199254740993"),
    *("9223372036854775808", "18446744073709551616", "1e308", "-1e308", "1e999", "-1e999"),
    *("5e-324", "1e-30", "NaN", "Infinity", "true", "false", "null", '""', '"\\u0000"'),
    *('"\\ud800"', '"1"', LARGE, "[]", "{}", "[[]]", "[null]", "[1e999]", '{"":""}', "[0]", "[-1]"),
    *('["a"]', '[""]', "[" * 600 + "]" * 600, "[" + "1," * 3000 + "1]", "\xff", "'"),
)
"""JSON texts, some of them none, for any field."""
MESSAGES = [{"role": "user", "content": "the cat"}]
EXACT = {
    **{"role": "assistant", "content": "sat"},
    **{"prompt_token_ids": [0], "generation_token_ids": [5]},
}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
VALID: dict[str, Sequence[dict[str, Any]]] = {
    "CompletionRequest": (
        {"prompt": "the cat", "max_tokens": 9},
        {"prompt": ["the cat", "the mat"], "max_tokens": 60, "n": 30, "priority": 1},
        {"prompt": "the cat sat", "max_tokens": 100, "n": 200, "stream": True, "ignore_eos": True},
        {"prompt": "the", "max_tokens": 90, "n": 90, "stop": ["a", "th"], "priority": 1},
        {"prompt": "the mat", "max_tokens": 40, "logprobs": 3, "n": 4, "stream": True},
        {"prompt": "the", "max_tokens": 20, "n": 50, "until": {"match": "a", "count": 2}},
        {"prompt": "the cat", "max_tokens": 30, "n": 1000, "ignore_eos": True},
        {"prompt": "the", "structured_outputs": {"regex": "[a-c]{1,9}"}, "n": 40},
        {"prompt": "the", "verify": {"match": "a"}, "until": {"score": 1, "count": 2}, "n": 40},
        {"prompt": "the cat", "n": 9, "save_state": True, "ignore_eos": True},
        {"prompt": "the cat", "n": 9, "save_at": [1, 9, 2**31 - 1]},
        {"state": STATE, "prompt": "sat"},
        {"prompt": "the", "n": 3, "use_beam_search": True, "length_penalty": 2, "max_tokens": 5},
        {"prompt": "the cat", "n": 9, "keep_states": True},
    ),
    "TreeRequest": (
        {"prompt": "the cat", "tree": {"branching": 3, "node_tokens": 5, "width": 4}},
        {"prompt": "the", "split": "a", "verify": {"match": "a"}, "score": "verify"},
        {"prompt": [9, 21], "tree": {"candidates": "likeliest", "width": 3}, "stream": True},
        {
            **{"state": STATE, "prompt": "sat", "score": "mean_logprob"},
            "tree": {"search": "best_first", "width": 2, "budget": 50, "depth": 9},
        },
    ),
    "ForkRequest": ({"n": 9, "max_tokens": 9}, {"index": 1, "prompt_index": 1, "stream": True}),
    "StateRequest": (
        {"prompt": "the cat"},
        {"prompt": [9, 21], "ttl_s": 1, "metadata": {"a": "b"}},
        {"state": STATE, "prompt": "sat", "refeed": True},
        {"messages": MESSAGES, "tools": TOOLS},
        {"state": STATE, "messages": MESSAGES, "add_generation_prompt": False},
    ),
    "ChatRequest": (
        {"messages": MESSAGES, "max_tokens": 9},
        {"messages": MESSAGES, "max_tokens": 90, "n": 40, "stream": True},
        {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "n": 9, "stream": True},
        {"messages": MESSAGES, "tools": TOOLS},
        {"messages": [*MESSAGES, EXACT, *MESSAGES], "max_tokens": 9},
        {"messages": [*MESSAGES, EXACT], "required_prefix_token_ids": [0, 5]},
        {"messages": MESSAGES, "max_tokens": 9, "n": 9, "save_state": True, "save_at": [1]},
        {"messages": MESSAGES, "state": STATE},
    ),
    "ChatsRequest": (
        {"messages": [MESSAGES] * 3, "max_tokens": 9, "n": 9},
        {"messages": [MESSAGES], "structured_outputs": {"choice": ["a", "b"]}, "logprobs": True},
    ),
    "ResponseRequest": (
        {"input": "the cat", "max_output_tokens": 9},
        {"input": MESSAGES, "max_output_tokens": 90, "stream": True},
        {"input": "the cat", "tools": [{"type": "function", "name": "f"}]},
        {"input": "the cat", "max_output_tokens": 9, "store": True, "stream": True},
        {"input": "the cat", "previous_response_id": RESPONSE},
        {"input": "the cat", "max_output_tokens": 90, "store": True, "background": True},
    ),
    "MessageRequest": (
        {"messages": MESSAGES, "max_tokens": 9},
        {"messages": MESSAGES, "max_tokens": 90, "stream": True, "system": "sat"},
        {"messages": MESSAGES, "max_tokens": 9, "tools": [{"name": "f", "input_schema": {}}]},
    ),
    "TokensRequest": (
        {"token_ids": [9, 21], "sampling_params": {"max_tokens": 9, "logprobs": 2}},
        {"token_ids": [9], "sampling_params": {"n": 40, "max_tokens": 60}, "stream": True},
        {"token_ids": [9], "sampling_params": {"stop": ["a"], "n": 9}, "request_id": "r"},
        {"state": STATE},
    ),
    "GenerateRequest": (
        {"text": "the cat", "sampling_params": {"max_new_tokens": 9}, "rid": "r"},
        {"input_ids": [[9], [21]], "sampling_params": {"n": 9}, "return_logprob": True},
        {"text": "the", "sampling_params": {"max_new_tokens": 60}, "stream": True},
        {"state": STATE, "text": "sat", "refeed": True},
    ),
    "FolderRequest": ({"weight_dir": "nowhere"},),
    "DropQuery": ({}, {"reset_running_requests": False}),
    "AbortRequests": ({}, {"request_ids": ["r", "x"]}),
    "PauseGeneration": ({}, {"mode": "abort"}),
    "Nothing": ({},),
    "DiskRequest": ({"model_path": "nowhere", "weight_version": "7"},),
    "AbortRequest": ({"rid": "r"}, {"abort_all": True}),
    "CountRequest": ({"messages": MESSAGES}, {"messages": MESSAGES, "system": "sat"}),
    "TokenizeRequest": ({"prompt": "the cat"}, {"messages": MESSAGES}),
    "DetokenizeRequest": ({"tokens": [1, 2, 3]},),
}
PADDED_BYTES = 25_000_000
"""Size of a body that is mostly blanks."""
KEYS = {name: f"{name}-key-of-the-attack" for name in ("admin", "second", "third")}
"""API keys by their names."""
_POST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer "
_POST += KEYS["admin"].encode() + b"\r\n%b"
GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /ready HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    _POST % b"Content-Length: 99999999999999999999\r\n\r\n",
    _POST % b"Content-Length: -1\r\n\r\n",
    _POST % b"Content-Length: 400\r\n\r\n{",
    _POST % b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    _POST % b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n{}\n",
    b"GET /%00%ff/../../etc/passwd HTTP/1.1\r\nHost: \xff\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 3000 + b"\r\n",
    b"GET " + b"/" * 70_000,
    b"\x00" * 4000,
)


@dataclass(frozen=True)
class Call:
    """A request as it is sent; `route` is its path as the routes have it."""

    method: str
    route: str
    path: str
    body: bytes = b""
    kind: str = "application/json"


def random_call(rng: random.Random, folders: list[str]) -> Call:
    """One request of any route; about a third of them have nothing wrong.

    `folders`: of weights, good and bad.
    """
    operation = rng.choice(OPERATIONS)
    path = operation.path
    for name in ("file_id", "batch_id", "state_id", "response_id", "completion_id", "name"):
        given = ["tiny"] if name == "name" and rng.random() < 0.8 else ["x", "%00", "a" * 900]
        given += {"state_id": [STATE], "response_id": [RESPONSE]}.get(name, [])
        path = path.replace("{" + name + "}", rng.choice(given))
    if operation.query is not None and rng.random() < 0.7:
        names = [field.encode_name for field in msgspec.structs.fields(operation.query)]
        pairs = (
            f"{rng.choice(names)}={rng.choice(EXTREMES)[:50]}" for _ in range(rng.randint(1, 2))
        )
        path += "?" + "&".join(pair.encode("ascii", "replace").decode() for pair in pairs)
    if operation.form is not None:
        return Call(operation.method, operation.path, path, *_form(rng))
    body = b"" if operation.body is None else _body(rng, operation, folders)
    if operation.method == "PUT":
        body = rng.randbytes(rng.randint(0, 9_000))
    kind = "application/json" if rng.random() < 0.95 else rng.choice(["text/plain", "x", ""])
    return Call(operation.method, operation.path, path, body, kind)


def _body(rng: random.Random, operation: Operation, folders: list[str]) -> bytes:
    assert operation.body is not None
    if rng.random() < 0.05:
        return rng.choice(EXTREMES).encode("latin-1") + rng.randbytes(rng.randint(0, 9))
    kind = operation.body.kind
    fields = {
        name: json.dumps(value) for name, value in _valid(rng, kind.__name__, folders).items()
    }
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    names += [*operation.body.neutral, "nonsense"]
    for _ in range(rng.choice((0, 0, 1, 1, 1, 2, 3))):
        fields[rng.choice(names)] = rng.choice(EXTREMES)
    blanks = " " * (PADDED_BYTES if rng.random() < 0.003 else 0)
    text = "{" + blanks + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"
    return text.encode("latin-1")


def _valid(rng: random.Random, kind: str, folders: list[str]) -> dict[str, Any]:
    if kind == "BatchRequest":
        given = {"endpoint": "/v1/completions", "completion_window": "24h"}
        return given | {"weight": rng.choice((0.001, 1, 1000)), "input_file_id": "x"}
    if kind in {"FolderRequest", "DiskRequest"}:
        return {"weight_dir" if kind == "FolderRequest" else "model_path": rng.choice(folders)}
    if kind == "WeightsRequest":
        running = rng.choice(("finish", "drop", "continue", "refeed", "x"))
        return {"path": rng.choice(folders), "running": running}
    if kind == "CompletionRequest" and rng.random() < 0.2:
        return hostile_constraint(rng)
    return rng.choice(VALID[kind])


def _form(rng: random.Random) -> tuple[bytes, str]:
    """An upload of something that may be no batch file, in a form that may be none."""
    content = rng.choice((b"", b"\xef\xbb\xbf\n", b"{}\n", b"\xff\n" * 9, b"{" * 100_000))
    purpose = rng.choice(("batch", "x", ""))
    body = (
        f'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
        '--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    ).encode() + content
    body += rng.choice((b"\r\n--x--\r\n", b"\r\n--x--\r\n", b"\r\n--x--\r\n", b"", b"\r\n--x"))
    return body, "multipart/form-data; boundary=x"
