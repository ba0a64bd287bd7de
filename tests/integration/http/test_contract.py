"""What the OpenAPI document says is what the server does, for requests in it and near it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from srm.engine.config import ModelConfig
from srm.server.routes.app import OPERATIONS
from srm.server.schema.openapi import document
from tests.kit.serving import Server, free_port, write_text_model

MODEL = ModelConfig(d_model=16, num_layers=2, num_heads=2, n_ctx=32, vocab_size=320)
REFUSED = [400, 404, 405, 413, 415]
"""What a request may get that the document forbids."""
FLAGS = ("--num-slots=32", "--max-step-rows=32", "--max-waiting=200", "--max-body-bytes=200000",
         "--pause-lease-s=0.05")  # fmt: skip
"""Small, so that no valid request keeps it busy for long."""


def closed_document() -> dict[str, Any]:
    """Ours, but replies may have no field that it does not tell of."""
    whole: dict[str, Any] = json.loads(json.dumps(document(OPERATIONS, "srm", "1")))
    for schema in whole["components"]["schemas"].values():
        schema.setdefault("additionalProperties", False)
    return whole


WHOLE = closed_document()
_SCHEMA = schemathesis.openapi.from_dict(
    WHOLE,
    config=schemathesis.Config.from_dict(
        {
            "max-stream-events": 10_000,
            "checks": {"negative_data_rejection": {"expected-statuses": REFUSED}},
        }
    ),
)
OPERATION = {f"{operation.method} {operation.path}": operation for operation in OPERATIONS}
CALLS = {label: _SCHEMA[item.path][item.method] for label, item in OPERATION.items()}
NEVER_RIGHT = {
    *("POST /v1/admin/weights", "POST /update_weights", "POST /update_weights_from_disk"),
    "POST /v1/completions/{completion_id}/fork",
}
"""What is not in the document: which folders there are, and what runs."""
STREAMED = -1
"""Counted among statuses: streams that went well."""
ALIASES = {label for label in CALLS if label.replace(" /v1/", " /") in CALLS.keys() - {label}}
FORMS = {label for label, item in OPERATION.items() if item.form}
"""What is wrong for the document may be left out of a form on the wire, such as an empty list."""
VARIED = [
    (label, mode)
    for label, call in CALLS.items()
    for mode in GenerationMode
    if (call.body or (call.path_parameters and mode is GenerationMode.POSITIVE))
    and not (mode is GenerationMode.NEGATIVE and label in FORMS | ALIASES)
]
QUICK, MORE, MANY = 2, 16, 400
"""Cases of an operation and a mode, times 3; times 6 where there are streams."""
CHAT, SEVERAL = "POST /v1/chat/completions", "POST /v1/chat/completions/batch"
"""Requests of the second one are drawn as those of the first: lists of lists take minutes."""
GENERATING = {label for label in OPERATION if "/completions" in label}
OF_STATES = {"state", "refeed", "save_state", "save_at"}
ROLLOUTS: dict[str, dict[str, Any]] = {
    "POST /generate": {"text": "a"},
    "POST /inference/v1/generate": {"token_ids": [1]},
}
LOOSE = {
    *("verify", "until", "return", "count_by", "echo", "prompt_logprobs", "top_logprobs"),
    *("response_format", "structured_outputs", "tools", "tool_choice", "stream", "stream_whole"),
    *("required_prefix_token_ids", "best_of", "return_packed", "stream_interval"),
    *OF_STATES,
}
"""Fields of completions and chats that go with others, or have a form, as the document cannot say:
half of what is drawn goes without them, or nothing would be answered."""
load_all_checks()
NOT_PROMISED: list[Any] = CHECKS.get_by_names(["positive_data_acceptance"])
"""A field may be refused for what another one says; which refusals are allowed is checked here."""


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_text_model(folder, MODEL)
    with Server(folder, *FLAGS, f"--admin-port={free_port()}") as running:
        yield running


def fields_of(label: str) -> set[str]:
    """Names that a request's body may have."""
    body, form = OPERATION[label].body, OPERATION[label].form
    kind = body.kind if body else form
    names = {*kind.__struct_encode_fields__} if kind else set()
    return names | {*((body and body.neutral) or ())}


@cache
def uploaded(running: Server) -> str:
    """The id of a file, which nobody could draw."""
    file = {"file": ("in.jsonl", b"")}
    reply = httpx.post(f"{running.url}/v1/files", files=file, data={"purpose": "batch"})
    return str(reply.json()["id"])


def check(case: Case[Any], running: Server, mode: GenerationMode, statuses: Counter[int]) -> None:
    label = case.operation.label
    is_drawn = mode is GenerationMode.POSITIVE and isinstance(case.body, dict)
    if is_drawn and label in GENERATING and sum(statuses.values()) % 4 < 2:
        assert isinstance(case.body, dict)
        case.body = {name: value for name, value in case.body.items() if name not in LOOSE}
        if "messages" in case.body:  # of few drawn chats all messages are right
            messages: list[Any] = [{"role": "user", "content": "a"}]
            case.body["messages"] = [messages] * 2 if label == SEVERAL else messages
    if is_drawn and label.endswith("/tokenize") and sum(statuses.values()) % 4 < 2:
        assert isinstance(case.body, dict)  # few drawn bodies have a prompt or a chat alone
        case.body = {"prompt": case.body.get("prompt") or "a"}
    if is_drawn and label in ROLLOUTS:
        assert isinstance(case.body, dict)
        case.body = {name: case.body[name] for name in case.body if name not in OF_STATES}
        if not {"text", "input_ids", "token_ids"} & {*case.body}:
            case.body.update(ROLLOUTS[label])  # the document cannot say that one must be
    if mode is GenerationMode.POSITIVE and OPERATION[label].events is not None:
        assert isinstance(case.body, dict)
        # Drawn at random, few requests would be streams that go well.
        case.body["stream"] = sum(statuses.values()) % 2 == 0
        if not case.body["stream"]:
            case.body.pop("stream_options", None)
    if mode is GenerationMode.POSITIVE and label == "POST /v1/batches":
        assert isinstance(case.body, dict)
        case.body["input_file_id"] = uploaded(running)
    reply = case.call(base_url=running.admin_url, timeout=120)
    statuses[reply.status_code] += 1
    case.validate_response(reply, excluded_checks=NOT_PROMISED)
    if reply.headers["content-type"][0].startswith("text/event-stream"):
        is_named = isinstance(OPERATION[label].events, tuple)
        assert reply.text.endswith("\n\n")
        assert reply.text.endswith("\n\ndata: [DONE]\n\n") != is_named
        statuses[STREAMED] += 1
    if reply.status_code == 400 and mode is GenerationMode.POSITIVE:
        error = reply.json()["error"]
        assert error["param"] in fields_of(label), error


def several(case: Case[Any]) -> Case[Any]:
    """A request of two equal chats."""
    body = case.body
    if isinstance(body, dict) and "messages" in body:
        body = {**body, "messages": [body["messages"]] * 2}
    return CALLS[SEVERAL].Case(body=body, media_type=case.media_type)


def check_operation(running: Server, label: str, mode: GenerationMode, num_cases: int) -> None:
    """Try so many cases; raises for the first that breaks a promise."""
    statuses: Counter[int] = Counter()

    @seed(1)
    @settings(
        max_examples=num_cases * (6 if OPERATION[label].events else 3),
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(CALLS[CHAT if label == SEVERAL else label].as_strategy(generation_mode=mode))
    def run(case: Case[Any]) -> None:
        check(several(case) if label == SEVERAL else case, running, mode, statuses)

    run()
    running.wait_until_idle()
    assert httpx.get(f"{running.url}/ready").status_code == 200
    if mode is GenerationMode.NEGATIVE:
        assert set(statuses) <= set(REFUSED)
        return
    assert set(statuses) <= {200, 400, 404, STREAMED}
    has_body = label.startswith("POST") and fields_of(label)
    assert statuses[200] or not has_body or label in NEVER_RIGHT
    assert statuses[STREAMED] or OPERATION[label].events is None or label in NEVER_RIGHT


@pytest.mark.parametrize(
    "num_cases", [QUICK, *(pytest.param(count, marks=pytest.mark.slow) for count in (MORE, MANY))]
)
@pytest.mark.parametrize(("label", "mode"), VARIED)
def test_requests_near_the_document(
    small_server: Server, label: str, mode: GenerationMode, num_cases: int
) -> None:
    check_operation(small_server, label, mode, num_cases)


@pytest.mark.parametrize("label", sorted(set(CALLS) - {label for label, _ in VARIED}))
def test_what_takes_nothing_answers_as_told(small_server: Server, label: str) -> None:
    case = CALLS[label].Case()
    reply = case.call(base_url=small_server.admin_url)
    assert reply.status_code == 200
    case.validate_response(reply)
