"""What a trainer leaves in tokenizer.json for its batches changes no prompt."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from srm.engine.config import DEMO_MODEL
from srm.engine.errors import CheckpointError
from srm.engine.python.tokenizer import FolderTokenizer
from srm.engine.tokenizer_file import read_tokenizer
from srm.loadtest.workload.words import Words
from srm.server.text.text import Text

PROMPT = "Compute: 12 * 34 + 56 = " * 9


def test_truncation_padding_and_dropout_are_ignored_by_all_who_read_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    plain = tokenizer.encode(PROMPT).ids
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=500)
    tokenizer.model.dropout = 0.9
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with caplog.at_level(logging.WARNING):
        assert read_tokenizer(tmp_path / "tokenizer.json").encode(PROMPT).ids == plain
    assert caplog.messages == [
        f"{tmp_path / 'tokenizer.json'}: truncation and padding and dropout is ignored: "
        "it is for training"
    ]
    assert FolderTokenizer(tmp_path).encode([PROMPT])[0].tolist() == plain
    (encoded,) = Text(tmp_path).encode([PROMPT])
    assert memoryview(encoded).cast("i").tolist() == plain
    assert Words(tmp_path).count(PROMPT, special=True) == len(plain)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("truncation", {"max_length": 3}),
        ("truncation", {"max_length": 10**30, "strategy": "LongestFirst", "stride": 0}),
        ("truncation", "longest_first"),
        ("padding", {"strategy": "Longest"}),
        ("dropout", 2.0),
    ],
)
def test_what_is_ignored_had_to_be_of_this_version_of_the_library(
    tmp_path: Path, name: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    spec = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    (spec["model"] if name == "dropout" else spec)[name] = value
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec))
    plain = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(PROMPT).ids
    assert read_tokenizer(path).encode(PROMPT).ids == plain
    assert caplog.messages == [f"{path}: {name} is ignored: it is for training"]


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff"])
def test_what_is_no_tokenizer_is_refused_by_its_path(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{path} is not a tokenizer: "):
        read_tokenizer(path)


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b"\xef\xbb\xbf" + (DEMO_MODEL / "tokenizer.json").read_bytes())
    assert read_tokenizer(path).encode(PROMPT).ids
