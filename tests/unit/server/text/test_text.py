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

from srm.errors import CheckpointError
from srm.server.text import text as text_module
from srm.server.text.stream import ByteTable
from srm.server.text.text import Text
from tests.kit.serving import TEXT_MODEL


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


@pytest.fixture
def folder(text_model: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(text_model, tmp_path / "copy"))


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@given(st.lists(st.text(max_size=9)), st.integers(1, 30))
def test_decoding_gives_back_what_was_encoded_however_many_at_once(
    text: Text, prompts: list[str], at_once: int
) -> None:
    expected = [text.encode([prompt])[0] for prompt in prompts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "AT_ONCE", at_once)
        assert text.encode(prompts) == expected
    for prompt, encoded in zip(prompts, expected, strict=True):
        assert encoded[:4] == ids(0)  # begin of text
        assert text.decode(encoded).decode() == prompt
        assert len(prompt) <= text.longest_token * len(encoded) // 4


@given(st.lists(st.integers(0, TEXT_MODEL.vocab_size - 1)))
def test_decoding_any_tokens_agrees_with_the_library(
    text: Text, text_model: Path, tokens: list[int]
) -> None:
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
