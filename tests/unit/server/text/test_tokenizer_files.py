"""What a model's folder says of sampling, and what in it is not honoured."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from srm.errors import CheckpointError
from srm.server.dialects.chat.request import ChatRequest, parse_chat
from srm.server.dialects.messages.request import parse_message
from srm.server.dialects.responses.request import parse_response
from srm.server.schema import validation
from srm.server.schema.completion_request import CompletionRequest, parse_completion
from srm.server.text.tokenizer_files import report_unread, use_defaults


def parse_responses(body: bytes) -> ChatRequest:
    return parse_response(body)[1]


HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(text_model: Path, tmp_path: Path) -> Iterator[Path]:
    yield shutil.copytree(text_model, tmp_path / "model")
    validation.SAMPLING.clear()


def write(folder: Path, name: str, **fields: object) -> None:
    (folder / name).write_text(json.dumps(fields))


def test_names_what_the_folder_asks_for_in_vain(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    report_unread(folder, "openai")
    assert not caplog.messages
    write(folder, "generation_config.json", _from_model_config=True, do_sample=True, top_p=0.9,
          temperature=0.6, max_new_tokens=64, eos_token_id=[1, 2], max_time=None)  # fmt: skip
    write(folder, "tokenizer_config.json", add_eos_token=True, add_prefix_space=False,
          chat_template=[{"name": "default", "template": "a"},
                         {"name": "tool_use", "template": "b"}])  # fmt: skip
    write(folder, "adapter_config.json")
    report_unread(folder, "openai")
    used, unread = caplog.messages
    assert "temperature = 0.6, top_p = 0.9: not used" in used
    assert unread == (
        f"{folder}: not honoured: the chat template 'tool_use', max_new_tokens = 64 of "
        "generation_config.json, add_eos_token = true of tokenizer_config.json, adapter_config.json"
    )
    report_unread(folder, "model")
    assert "top_p = 0.9: used" in caplog.messages[2]


def test_sampling_of_the_model_is_used_where_a_setting_says_so(folder: Path) -> None:
    write(folder, "generation_config.json", temperature=0.6, top_p=0.9, top_k=20)
    body = {"model": "tiny", "max_tokens": 9}
    bodies: dict[Any, dict[str, Any]] = {
        parse_completion: body | {"prompt": "hi"},
        parse_chat: body | {"messages": HI},
        parse_message: body | {"messages": HI},
        parse_responses: {"model": "tiny", "input": "hi"},
    }
    for source, expected in (("openai", (1.0, 1.0)), ("model", (0.6, 0.9))):
        use_defaults(folder, source)  # type: ignore[arg-type]
        for parse, fields in bodies.items():
            request = parse(json.dumps(fields).encode())
            assert (request.temperature, request.top_p) == expected, parse
            given = parse(json.dumps({**fields, "temperature": 0.1, "top_p": None}).encode())
            assert (given.temperature, given.top_p) == (0.1, expected[1])
    assert CompletionRequest(prompt=["hi"]).temperature == 1.0


@pytest.mark.parametrize(
    "fields", [{"temperature": -1}, {"top_p": "0.9"}, {"top_k": "all"}, {"min_p": 2}]
)
def test_sampling_that_no_request_may_have_is_refused(
    fields: dict[str, object], folder: Path
) -> None:
    write(folder, "generation_config.json", **fields)
    for call in (use_defaults, report_unread):
        with pytest.raises(
            CheckpointError, match=rf"generation_config\.json: {next(iter(fields))}"
        ):
            call(folder, "model")
