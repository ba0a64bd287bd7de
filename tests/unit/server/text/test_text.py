"""The byte table against the tokenizer library; what a model's folder says and cannot say."""

from __future__ import annotations

import json
import logging
import shutil
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from srm.errors import CheckpointError
from srm.server.dialects.chat.request import ChatRequest, parse_chat
from srm.server.dialects.messages.request import parse_message
from srm.server.schema import validation
from srm.server.schema.completion_request import CompletionRequest, parse_completion
from srm.server.text import text as text_module
from srm.server.text.stream import ByteTable
from srm.server.text.text import Text
from srm.server.text.tokenizer_files import report_unread, use_defaults
from tests.kit.bodies.refusals import parse_response
from tests.kit.serving import TEXT_MODEL


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


@pytest.fixture
def folder(text_model: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy to be changed; what a server makes of it ends with the test."""
    yield shutil.copytree(text_model, tmp_path / "copy")
    validation.SAMPLING.clear()


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@given(st.lists(st.text(max_size=9)), st.integers(1, 30))
def test_decodes_what_was_encoded(text: Text, prompts: list[str], at_once: int) -> None:
    expected = [text.encode([prompt])[0] for prompt in prompts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "AT_ONCE", at_once)
        assert text.encode(prompts) == expected
    for prompt, encoded in zip(prompts, expected, strict=True):
        assert encoded[:4] == ids(0)  # begin of text
        assert text.decode(encoded).decode() == prompt
        assert len(prompt) <= text.longest_token * len(encoded) // 4


@given(st.lists(st.integers(0, TEXT_MODEL.vocab_size - 1)))
def test_decodes_as_the_library_does(text: Text, text_model: Path, tokens: list[int]) -> None:
    library = Tokenizer.from_file(str(text_model / "tokenizer.json"))
    assert text.decode(ids(*tokens)).decode("utf-8", "replace") == library.decode(tokens)
    plain = [token for token in tokens if token > 1]
    spelled = text.spell(ids(0, *plain, 1))
    assert spelled == b"<|begin_of_text|>" + text.decode(ids(*plain)) + b"<|end_of_text|>"


def test_every_token_has_a_label(text: Text) -> None:
    assert len(text.labels) == TEXT_MODEL.vocab_size and all(text.labels)
    assert (text.labels[1], text.labels[319]) == ("<|end_of_text|>", "token_id:319")
    assert "bytes:\\xe2" in text.labels


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_damaged_file_is_named(folder: Path, name: str) -> None:
    for content in (b"", b"{", b"\xff", b"[]", b"{}"):
        (folder / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=name):
            Text(folder)


def test_a_model_needs_a_config_and_a_tokenizer_that_fits_it(folder: Path) -> None:
    config, tokenizer = folder / "config.json", folder / "tokenizer.json"
    bpe = json.loads(tokenizer.read_text())["model"]
    euro = {("€" if token == "z" else token): id for token, id in bpe["vocab"].items()}
    for path, fields, why in (
        (config, {"vocab_size": 200}, r"\d+ lies outside the model's 200"),
        (tokenizer, {"model": {**bpe, "vocab": euro}}, "not spelled in byte-level BPE: '€'"),
        (tokenizer, {"decoder": None}, "only byte-level"),
    ):
        change(path, **fields)
        with pytest.raises(CheckpointError, match=why):
            Text(folder)
    config.unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Text(folder)


def test_without_a_tokenizer_tokens_are_written_as_ids(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    text = Text(folder)
    assert not text.has_tokenizer
    assert text.decode(ids(0, 17, 319)) == b"token_id:0token_id:17token_id:319"
    assert text.labels[17] == "token_id:17"
    assert text.longest_token == len("token_id:319")


def test_special_tokens_are_those_of_the_config(text: Text, folder: Path) -> None:
    assert text.special_tokens == {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    change(folder / "config.json", eos_token_id=310)
    assert Text(folder).special_tokens == {"bos_token": "<|begin_of_text|>"}
    (folder / "tokenizer_config.json").write_text('{"eos_token": "the"}')
    assert Text(folder).special_tokens["eos_token"] == "the"


# The two ways through a table of bytes are one

ENTRIES = [*(bytes([i]) for i in range(256)), b"", b"a" * 15, b"b" * 16, b"c" * 17, b"\xc3" * 40]
TABLE = ByteTable(ENTRIES)
gathered = st.integers(0, 253) | st.sampled_from([256, 257, 258])
joined = gathered | st.sampled_from(
    [254, 255, 259, 260]
)  # what rows are filled with, and long ones


@given(st.lists(gathered, max_size=300) | st.lists(joined, max_size=300))
def test_any_length_reads_as_its_pieces(tokens: list[int]) -> None:
    expected = [ENTRIES[token] for token in tokens]
    assert TABLE.join(ids(*tokens)) == b"".join(expected)
    assert TABLE.pieces(ids(*tokens)) == expected


def test_a_long_run_of_every_token_and_ids_beyond_the_table() -> None:
    for token, entry in enumerate(ENTRIES):
        assert TABLE.join(ids(*[token] * 500)) == entry * 500
    for count in (1, 100):
        with pytest.raises(IndexError):
            TABLE.join(ids(*[len(ENTRIES)] * count))


def parse_responses(body: bytes) -> ChatRequest:
    return parse_response(body)[1]


HI = [{"role": "user", "content": "hi"}]


def write(folder: Path, name: str, **fields: object) -> None:
    (folder / name).write_text(json.dumps(fields))


def test_names_what_it_does_not_use(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
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
def test_refuses_sampling_of_no_request(fields: dict[str, object], folder: Path) -> None:
    write(folder, "generation_config.json", **fields)
    for call in (use_defaults, report_unread):
        with pytest.raises(
            CheckpointError, match=rf"generation_config\.json: {next(iter(fields))}"
        ):
            call(folder, "model")
