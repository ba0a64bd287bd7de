"""The byte table against the tokenizer library, and what a bad folder is told."""

from __future__ import annotations

import json
import shutil
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.errors import CheckpointError
from server.text import text as text_module
from server.text.text import Text
from tests.serving import TEXT_MODEL, write_text_model


@pytest.fixture(scope="module")
def text(text_model: Path) -> Text:
    return Text(text_model)


@pytest.fixture
def folder(text_model: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(text_model, tmp_path / "copy"))


@given(st.text())
def test_decoding_gives_back_what_was_encoded(text: Text, prompt: str) -> None:
    (encoded,) = text.encode([prompt])
    assert encoded[:4] == b"\0\0\0\0"  # begin of text
    assert text.decode(encoded).decode() == prompt
    assert len(prompt) <= text.longest_token * len(encoded) // 4


@given(st.lists(st.integers(0, TEXT_MODEL.vocab_size - 1)))
def test_decoding_any_tokens_agrees_with_the_library(
    text: Text, text_model: Path, ids: list[int]
) -> None:
    tokenizer = Tokenizer.from_file(str(text_model / "tokenizer.json"))
    data = array("i", ids).tobytes()
    assert text.decode(data).decode("utf-8", "replace") == tokenizer.decode(ids)
    assert b"".join(text.pieces(data)) == text.decode(data)


def test_every_token_has_a_label(text: Text) -> None:
    assert len(text.labels) == TEXT_MODEL.vocab_size
    assert all(text.labels)
    assert text.labels[1] == "<|end_of_text|>"
    assert text.labels[text.model.vocab_size - 1] == "token_id:319"
    assert "bytes:\\xe2" in text.labels


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"{}"])
def test_a_damaged_file_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        Text(folder)


def test_a_model_needs_a_config(folder: Path) -> None:
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


def test_a_tokenizer_that_is_not_byte_level_is_refused(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "decoder": None}))
    with pytest.raises(CheckpointError, match="byte-level"):
        Text(folder)


def test_a_tokenizer_larger_than_the_model_is_refused(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 200}))
    with pytest.raises(CheckpointError, match=r"\d+ lies outside the model's 200"):
        Text(folder)


def test_write_text_model_is_deterministic(folder: Path, tmp_path: Path) -> None:
    write_text_model(tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (
        folder / "tokenizer.json"
    ).read_bytes()


@given(st.lists(st.text(max_size=9)), st.integers(1, 30))
def test_texts_are_encoded_alike_however_many_at_once(
    text: Text, prompts: list[str], at_once: int
) -> None:
    expected = [text.encode([prompt])[0] for prompt in prompts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "AT_ONCE", at_once)
        assert text.encode(prompts) == expected


def test_special_tokens_are_those_of_the_config_where_they_read_as_one(
    text: Text, folder: Path
) -> None:
    assert text.special_tokens == {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    config = {**json.loads((folder / "config.json").read_text()), "eos_token_id": 310}
    (folder / "config.json").write_text(json.dumps(config))
    assert Text(folder).special_tokens == {"bos_token": "<|begin_of_text|>"}
    (folder / "tokenizer_config.json").write_text('{"eos_token": "the"}')
    assert Text(folder).special_tokens["eos_token"] == "the"


@given(st.lists(st.integers(0, TEXT_MODEL.vocab_size - 1)))
def test_spelling_shows_special_tokens_and_all_else_as_it_reads(text: Text, ids: list[int]) -> None:
    plain = [token for token in ids if token > 1]
    assert text.spell(array("i", plain).tobytes()) == text.decode(array("i", plain).tobytes())
    assert text.spell(array("i", [0, *plain, 1]).tobytes()) == (
        b"<|begin_of_text|>" + text.decode(array("i", plain).tobytes()) + b"<|end_of_text|>"
    )
