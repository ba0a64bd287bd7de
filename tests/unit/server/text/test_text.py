"""The byte table against the tokenizer library, and what a bad folder is told."""

from __future__ import annotations

import json
import shutil
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.errors import CheckpointError
from server.text import text as text_module
from server.text.byte_table import ByteTable
from server.text.text import Text
from tests.serving import TEXT_MODEL, write_text_model

tokens = st.lists(st.integers(0, TEXT_MODEL.vocab_size - 1))


@pytest.fixture
def folder(text_model: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(text_model, tmp_path / "copy"))


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture(scope="module")
def library(text_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(text_model / "tokenizer.json"))


@given(st.lists(st.text(max_size=9)), st.integers(1, 30))
def test_decoding_gives_back_what_was_encoded_however_many_at_once(
    text: Text, prompts: list[str], at_once: int
) -> None:
    expected = [text.encode([prompt])[0] for prompt in prompts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "AT_ONCE", at_once)
        assert text.encode(prompts) == expected
    for prompt, encoded in zip(prompts, expected, strict=True):
        assert encoded[:4] == b"\0\0\0\0"  # begin of text
        assert text.decode(encoded).decode() == prompt
        assert len(prompt) <= text.longest_token * len(encoded) // 4


@given(tokens)
def test_decoding_any_tokens_agrees_with_the_library(
    text: Text, library: Tokenizer, ids: list[int]
) -> None:
    data = array("i", ids).tobytes()
    assert text.decode(data).decode("utf-8", "replace") == library.decode(ids)
    assert b"".join(text.pieces(data)) == text.decode(data)
    plain = array("i", [token for token in ids if token > 1]).tobytes()
    begin, end = (array("i", [token]).tobytes() for token in (0, 1))
    assert text.spell(plain) == text.decode(plain)
    assert text.spell(begin + plain + end) == (
        b"<|begin_of_text|>" + text.decode(plain) + b"<|end_of_text|>"
    )


def test_every_token_has_a_label(text: Text) -> None:
    assert len(text.labels) == TEXT_MODEL.vocab_size and all(text.labels)
    assert text.labels[1] == "<|end_of_text|>"
    assert text.labels[text.model.vocab_size - 1] == "token_id:319"
    assert "bytes:\\xe2" in text.labels


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_damaged_file_is_named(folder: Path, name: str) -> None:
    for content in (b"", b"{", b"\xff", b"[]", b"{}"):
        (folder / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=name):
            Text(folder)


def test_a_model_needs_a_config_and_a_tokenizer_that_fits_it(folder: Path) -> None:
    change(folder / "config.json", vocab_size=200)
    with pytest.raises(CheckpointError, match=r"\d+ lies outside the model's 200"):
        Text(folder)
    tokenizer = folder / "tokenizer.json"
    spelled = json.loads(tokenizer.read_text())["model"]
    vocab = {("€" if token == "z" else token): id for token, id in spelled["vocab"].items()}
    change(folder / "config.json", vocab_size=320)
    change(tokenizer, model={**spelled, "vocab": vocab})
    with pytest.raises(CheckpointError, match="not spelled in byte-level BPE: '€'"):
        Text(folder)
    change(tokenizer, decoder=None)
    with pytest.raises(CheckpointError, match="only byte-level"):
        Text(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Text(folder)


def test_without_a_tokenizer_tokens_are_written_as_ids(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    text = Text(folder)
    assert not text.has_tokenizer
    assert text.decode(array("i", [0, 17, 319]).tobytes()) == b"token_id:0token_id:17token_id:319"
    assert text.labels[17] == "token_id:17"
    assert text.longest_token == len("token_id:319")


def test_write_text_model_is_deterministic(text_model: Path, tmp_path: Path) -> None:
    write_text_model(tmp_path)
    written = (one / "tokenizer.json" for one in (tmp_path, text_model))
    assert len({one.read_bytes() for one in written}) == 1


def test_special_tokens_are_those_of_the_config_where_they_read_as_one(
    text: Text, folder: Path
) -> None:
    assert text.special_tokens == {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    change(folder / "config.json", eos_token_id=310)
    assert Text(folder).special_tokens == {"bos_token": "<|begin_of_text|>"}
    (folder / "tokenizer_config.json").write_text('{"eos_token": "the"}')
    assert Text(folder).special_tokens["eos_token"] == "the"


# The two ways through a table of bytes are one

ENTRIES = [*(bytes([i]) for i in range(256)), b"", b"a" * 15, b"b" * 16, b"c" * 17, b"\xc3" * 40]
TABLE = ByteTable(ENTRIES)
ordinary = st.integers(0, 253) | st.sampled_from([256, 257, 258])
elsewhere = st.sampled_from([254, 255, 259, 260])  # the bytes that rows are filled with, and long


@pytest.mark.parametrize("tokens", [ordinary, ordinary | elsewhere], ids=["gathered", "joined"])
def test_any_length_reads_as_its_pieces(tokens: st.SearchStrategy[int]) -> None:
    @given(st.lists(tokens, max_size=300))
    def holds(ids: list[int]) -> None:
        token_ids = array("i", ids).tobytes()
        expected = [ENTRIES[token] for token in ids]
        assert TABLE.join(token_ids) == b"".join(expected)
        assert TABLE.pieces(token_ids) == expected

    holds()


def test_a_long_run_of_every_token_and_ids_beyond_the_table() -> None:
    for token, entry in enumerate(ENTRIES):
        assert TABLE.join(array("i", [token] * 500).tobytes()) == entry * 500
    for count in (1, 100):
        with pytest.raises(IndexError):
            TABLE.join(array("i", [len(ENTRIES)] * count).tobytes())
