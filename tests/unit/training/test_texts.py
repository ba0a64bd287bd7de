"""Texts become documents, documents a file of tokens, and that file batches; damage is told."""

from __future__ import annotations

import json
import os
import re
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, pre_tokenizers, processors

from srm.errors import ConfigError
from srm.training.pretrain import pretrain
from srm.training.text.documents import documents
from srm.training.text.mixed_batches import MixedBatches
from srm.training.text.packed_batches import PackedBatches, _document_windows
from srm.training.text.token_file import token_file
from srm.training.text.tokenizer import (
    BEGIN_ID,
    END_ID,
    TokenizerConfig,
    make_tokenizer,
    train_tokenizer,
)
from tests.unit.training.conftest import tiny_run

TEXTS = ["First – naïve.", "Second\nof two lines", "数 third"]


@pytest.fixture
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS * 20, 300)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The three texts, each in a file of another kind, and a note that is no text of ours."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.txt").write_text(TEXTS[0])
    (tmp_path / "b.jsonl").write_text(f"\n{json.dumps({'text': TEXTS[1]})}\n" + '{"text": ""}\n')
    parquet.write_table(pa.table({"text": [TEXTS[2]], "id": [7]}), tmp_path / "c.parquet")
    return tmp_path


def test_documents_come_from_all_kinds_of_files_in_order(folder: Path) -> None:
    assert list(documents([folder])) == TEXTS
    assert list(documents([folder / "c.parquet", folder / "a"])) == [TEXTS[2], TEXTS[0]]
    assert list(documents([folder], ".txt")) == [TEXTS[0]]
    (folder / "b.jsonl").rename(folder / "b.JSONL")  # as some tools name it; it was one text
    assert list(documents([folder])) == TEXTS


def test_a_file_name_need_not_be_unicode(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("\n".join(20 * TEXTS))
    config = tiny_run(tmp_path, tmp_path / "run", suffix=".txt", n_ctx=8, steps=1, batch_tokens=16)
    assert len(pretrain(config).steps) == 1
    moved = (tmp_path / "run" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"run.pt has no tokenizer.json beside it: put it back"):
        pretrain(msgspec.structs.replace(config, tokenizer=str(moved)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"fine \xff", r"x\.txt: byte 0xff in position 5 is not UTF-8"),
        ("x.txt", b"\x80" * 99_999, r"x\.txt: byte 0x80 in position 0 is not UTF-8"),
        ("x.txt", "text".encode("utf-16-le"), r"x\.txt: it has bytes of 0, as UTF-16 has"),
        ("x.txt", "é".encode("utf-16"), r"x\.txt: it has bytes of 0, as UTF-16 has"),
        ("x.jsonl", b'{"text": "a"}\n{"text": 3}\n', r"x\.jsonl:2: 'text' must be a text, got 3"),
        ("x.jsonl", b'{"text": "a"\n', r"x\.jsonl:1: "),
        ("x.jsonl", b'{"text": "\xff"}\n', r"x\.jsonl:1: "),
        ("x.jsonl", b"[1]\n", r"x\.jsonl:1: "),
        ("x.parquet", b"PAR1 and no more", r"x\.parquet: "),
    ],
)
def test_what_is_no_text_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        list(documents([tmp_path / name]))


@pytest.mark.parametrize("block", [1, 7, 64, 4096])
def test_a_text_in_parts_has_the_tokens_it_has_whole(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    text = "\ufeffFirst – naïve.\r\n\n\n  Second\n\n数 third 12\n" * 9 + "x" * 70 + " two\r\n"
    (tmp_path / "a.txt").write_text(text + "end", newline="")
    (tmp_path / "b.txt").write_text(text[1:20], newline="")
    whole = (text[1:] + "end").replace("\r\n", "\n")
    monkeypatch.setattr("srm.training.text.documents._BLOCK", block)
    monkeypatch.setattr("srm.training.text.token_file._CHARACTERS", 3 * block)
    assert "".join(documents([tmp_path])).startswith(whole)
    about, ids = token_file(tmp_path / "t", "", lambda: documents([tmp_path]), tokenizer, END_ID)
    first, second = np.split(ids, np.flatnonzero(ids == END_ID) + 1)[:-1]
    assert about.documents == 2 and second[0] == BEGIN_ID
    assert tokenizer.decode(first.tolist()) == whole
    if block >= 64:  # smaller ones cut inside of lines
        assert first.tolist() == [*tokenizer.encode(whole).ids, END_ID]


@pytest.mark.parametrize("added", ["<|begin_of_text|> $A", "$A <|end_of_text|>", "$A"])
@pytest.mark.parametrize("puts_space", [False, True])
def test_a_long_line_had_other_tokens_in_parts_and_an_end_token_within(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, added: str,
    puts_space: bool,
) -> None:  # fmt: skip
    special = [("<|begin_of_text|>", BEGIN_ID), ("<|end_of_text|>", END_ID)]
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=puts_space)
    tokenizer.post_processor = processors.TemplateProcessing(added, special_tokens=special)
    text = "First naïve  – 12 lines\n   数 of 'third\nSecond two " * 99
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr("srm.training.text.documents._BLOCK", 64)
    _, ids = token_file(tmp_path / "t", "", lambda: documents([tmp_path]), tokenizer, END_ID)
    begin = [BEGIN_ID] if "begin" in added else []
    inside = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids.tolist() == [*begin, *inside, END_ID]


@pytest.mark.parametrize("run", ["\n", "\r\n", " ", "x", "数", "x" * 100 + " ", "\n\n" + "x" * 200])
def test_a_run_without_a_place_to_cut_made_reading_quadratic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    """5 MB of newlines took 14 s: all that was read was searched again with each block."""
    text = "a word" + run * (9_999 // len(run)) + "end"
    (tmp_path / "a.txt").write_text(text, newline="")
    monkeypatch.setattr("srm.training.text.documents._BLOCK", 64)
    parts = list(documents([tmp_path]))
    assert "".join(parts) == text.replace("\r\n", "\n") and max(map(len, parts)) <= 3 * 64


def test_a_large_text_file_was_read_whole(tmp_path: Path) -> None:
    """57 MiB of text took 10.8 GB."""
    path = tmp_path / "large.txt"
    path.write_bytes(b"A line of a few words, and an end.\n" * 300_000)
    tracemalloc.start()
    size = sum(map(len, documents([path])))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size == path.stat().st_size > 10_000_000 and peak < 1_000_000
    with path.open("ab") as file:
        file.write(b"\xff")
    with pytest.raises(
        ConfigError, match=rf"large\.txt: byte 0xff in position {size} is not UTF-8"
    ):
        list(documents([path]))


def test_what_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is no file"):
        list(documents([folder / "nowhere"]))
    with pytest.raises(ConfigError, match=r"nor a folder with files \*\.md"):
        list(documents([folder], ".md"))
    with pytest.raises(ConfigError, match=r"nor a folder with files \*\*\.txt"):
        list(documents([folder], "*.txt"))
    with pytest.raises(ConfigError, match=r"has no column 'body', but \['text', 'id'\]"):
        list(documents([folder / "c.parquet"], member="body"))


class Counted:
    """Texts that say how often they were read."""

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.times = texts, 0

    def __call__(self) -> Iterator[str]:
        self.times += 1
        return iter(self.texts)


def test_a_token_file_has_all_documents_and_is_written_once(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    texts, path = Counted(TEXTS * 200), tmp_path / "tokens"
    about, ids = token_file(path, "one", texts, tokenizer, END_ID)
    assert (about.documents, about.tokens, about.dtype) == (600, len(ids), "<u2")
    rows = np.split(ids, np.flatnonzero(ids == END_ID) + 1)[:-1]
    assert [tokenizer.decode(row[1:-1].tolist()) for row in rows] == TEXTS * 200
    assert {int(row[0]) for row in rows} == {BEGIN_ID}
    again, same = token_file(path, "one", texts, tokenizer, END_ID)
    assert (again, texts.times) == (about, 1) and np.array_equal(ids, same)


@pytest.mark.parametrize("damage", ["other texts", "short", "no note", "no JSON"])
def test_a_token_file_that_is_not_what_is_asked_for_is_written_anew(
    tmp_path: Path, tokenizer: Tokenizer, damage: str
) -> None:
    texts, path = Counted(TEXTS), tmp_path / "tokens"
    _, ids = token_file(path, "one", texts, tokenizer, END_ID)
    expected = ids.copy()
    if damage == "short":
        path.with_suffix(".bin").write_bytes(expected.tobytes()[:-2])
    elif damage == "no note":
        path.with_suffix(".json").unlink()
    elif damage == "no JSON":
        path.with_suffix(".json").write_text('{"source": "one"')
    source = "two" if damage == "other texts" else "one"
    about, result = token_file(path, source, texts, tokenizer, END_ID)
    assert texts.times == 2 and about.source == source and np.array_equal(result, expected)


def test_texts_without_a_token_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="there is no text in them"):
        token_file(tmp_path / "tokens", "one", lambda: [], tokenizer, END_ID)


def test_a_tokenizer_is_made_of_texts(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "empty" / "a.txt").touch()
    (folder / "empty" / "b.jsonl").write_text('{"text": ""}\n')
    config = TokenizerConfig(texts=(folder / "empty",), output=folder / "t.json")
    with pytest.raises(ConfigError, match=f"texts: there is no text in {folder / 'empty'}"):
        make_tokenizer(config)
    assert not config.output.exists()
    config = TokenizerConfig(texts=(folder,), max_vocab_size=260, output=folder / "new" / "t.json")
    assert make_tokenizer(config).get_vocab_size() == 260
    assert Tokenizer.from_file(str(config.output)).encode("é").ids[0] == BEGIN_ID
    with pytest.raises(ConfigError, match=r"output: .*File exists"):
        make_tokenizer(msgspec.structs.replace(config, output=folder / "b.jsonl" / "t.json"))
    with pytest.raises(ConfigError, match="cannot be written: "):
        make_tokenizer(msgspec.structs.replace(config, output=Path()))
    with pytest.raises(ValueError, match="texts must be files or folders, got none"):
        TokenizerConfig()
    with pytest.raises(ValueError, match="max_vocab_size must be 258 … 1000000, got 1000001"):
        TokenizerConfig(texts=(folder,), max_vocab_size=1_000_001)
    with pytest.raises(ValueError, match="max_vocab_size must be 258 … 1000000, got 257"):
        TokenizerConfig(texts=(folder,), max_vocab_size=257)


def test_no_tokenizer_replaces_a_text_it_is_made_of(folder: Path) -> None:
    before = (folder / "b.jsonl").read_bytes()
    config = TokenizerConfig(texts=(folder,), output=folder / "new" / ".." / "b.jsonl")
    with pytest.raises(ConfigError, match="output must be another file than the texts, got "):
        make_tokenizer(config)
    assert (folder / "b.jsonl").read_bytes() == before


def test_epochs_have_each_window_once_in_orders_of_their_own() -> None:
    """A batch depends on seed and index alone."""
    ids = np.arange(1001, dtype=np.uint16)
    batches, same, other = (PackedBatches(ids, rows=4, length=10, seed=seed) for seed in (3, 3, 4))
    assert len(batches) == 25
    drawn = [batches[index] for index in range(50)]
    assert all(inputs.shape == (4, 10) for inputs, _ in drawn)
    assert all(bool((targets == inputs + 1).all()) for inputs, targets in drawn)
    begins = [int(row[0]) for inputs, _ in drawn for row in inputs]
    assert sorted(begins[:100]) == sorted(begins[100:]) == list(range(0, 1000, 10))
    assert begins[:100] != begins[100:]
    expected = [inputs.tolist() for inputs, _ in drawn]
    assert [same[index][0].tolist() for index in reversed(range(50))] == expected[::-1]
    assert all(other[index][0].tolist() not in expected for index in range(50))


def test_windows_may_begin_with_documents() -> None:
    """Of 3, 5, 25 and 4 tokens and many of 6, each behind an end token, which is 0."""
    lengths = [3, 5, 25, 4, *[6] * 10]
    ids = np.concatenate([[*range(1, length + 1), 0] for length in lengths]).astype(np.uint16)
    batches = PackedBatches(ids, rows=1, length=10, seed=3, end=0)
    begins = sorted(int(row[0]) for index in range(len(batches)) for row in batches[index][0])
    assert [begin for begin in begins if begin != 1] == [11, 21]  # inside the long one
    windows = _document_windows(ids, 10, 0).tolist()
    assert windows[:5] == [0, 10, 20, 30, 36]
    covered = {place for begin in windows for place in range(begin, begin + 10)}
    assert covered == set(range(windows[-1] + 10)) and len(ids) - len(covered) <= 10
    for index in range(len(batches)):
        inputs, targets = batches[index]
        assert inputs.shape == targets.shape == (1, 10)
        assert inputs[0, 1:].tolist() == targets[0, :-1].tolist()


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="31 tokens make 3 windows of 10, and a batch takes 4"):
        PackedBatches(np.zeros(31, np.uint16), rows=4, length=10, seed=0)


def test_a_run_of_letters_without_a_break_made_training_quadratic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trainer gets words of bounded length, and every character."""
    passed: list[str] = []

    class Recorded:
        def __init__(self, _: object) -> None: ...

        def train_from_iterator(self, texts: Iterable[str], _: object) -> None:
            passed.extend(texts)

    monkeypatch.setattr("srm.training.text.tokenizer.Tokenizer", Recorded)
    text = "two words " + "ACGT" * 500 + "\n" + "-" * 700 + " " * 1_100 + "end"
    train_tokenizer([text, "short"], 300)
    assert "".join(passed) == text + "short" and passed[-1] == "short"
    assert max(len(run) for part in passed for run in re.findall(r"\S+|\s+", part)) == 512


def numbered(begin: int, windows: int, seed: int = 0) -> PackedBatches:
    """Windows of four tokens, from `begin` on without a repetition."""
    return PackedBatches(np.arange(begin, begin + 4 * windows + 1, dtype=np.uint32), 1, 4, seed)


def test_rows_follow_each_other_through_epochs() -> None:
    batches, other = numbered(0, 5), numbered(0, 5)
    rows = [batches.following(first, count)[0] for first, count in ((0, 3), (3, 9), (12, 0))]
    begins = np.concatenate([row[:, 0].numpy() for row in rows])
    assert begins.tolist() == [int(other[index][0][0, 0]) for index in range(12)]
    assert sorted(begins[:5]) == sorted(begins[5:10]) == [0, 4, 8, 12, 16]


def test_mixed_rows_have_their_shares_and_every_window_once_an_epoch() -> None:
    windows, weights = (900, 300, 7), (6.0, 3.0, 1.0)

    def mixed(seed: int = 3) -> MixedBatches:
        sources = [numbered(100_000 * i, count) for i, count in enumerate(windows)]
        return MixedBatches(sources, weights, 8, seed)

    batches = mixed()
    assert len(batches) == 8  # of the seven windows, of which there is one in ten rows
    rows = [batches[index] for index in range(1_100)]  # more than are drawn at once
    begins = np.concatenate([inputs[:, 0].numpy() for inputs, _ in rows])
    assert all((targets == inputs + 1).all() for inputs, targets in rows)
    for number, (count, weight) in enumerate(zip(windows, weights, strict=True)):
        own = begins[begins // 100_000 == number] % 100_000 // 4
        assert len(own) / len(begins) == pytest.approx(weight / 10, abs=0.02)
        for epoch in range(len(own) // count):
            assert sorted(own[epoch * count : (epoch + 1) * count]) == list(range(count))
    for index in (1_090, 1_030, 3):  # of any order, and of a run that goes on
        assert (mixed()[index][0] == rows[index][0]).all()
    assert (mixed(4)[3][0] != rows[3][0]).any()
