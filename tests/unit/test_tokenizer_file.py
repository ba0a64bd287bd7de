"""What a tokenizer.json may be, and which tokens it puts around a text."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from srm.engine.config import DEMO_MODEL
from srm.engine.python.tokenizer import FolderTokenizer
from srm.engine.weights.convert import convert
from srm.errors import CheckpointError
from srm.loadtest.workload.words import Words
from srm.server.commands.score_lines import parse
from srm.server.text.text import Text
from srm.tokenizer_file import read_tokenizer
from srm.training.text.token_file import token_file
from srm.training.text.tokenizer import special_ids

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


BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"


def changed(folder: Path, **fields: object) -> Path:
    """Return a copy of the bundled model whose tokenizer.json has these fields."""
    shutil.copytree(DEMO_MODEL, folder, dirs_exist_ok=True)
    spec = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(spec | fields))
    return folder


BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def in_sequence(*decoders: dict[str, object]) -> dict[str, object]:
    return {"type": "Sequence", "decoders": list(decoders)}


@pytest.mark.parametrize(
    "decoder",
    [
        in_sequence(BYTES),
        in_sequence(in_sequence(BYTES)),
        in_sequence(BYTES, {"type": "Fuse"}),
        in_sequence({"type": "Fuse"}, BYTES),
    ],
)
def test_all_take_a_byte_level_decoder_in_a_sequence(
    decoder: dict[str, object], tmp_path: Path
) -> None:
    folder = changed(tmp_path / "model", decoder=decoder)
    plain = Text(DEMO_MODEL).encode([PROMPT])
    assert Text(folder).encode([PROMPT]) == plain
    ids = FolderTokenizer(folder).encode([PROMPT])[0]
    assert ids.tobytes() == plain[0] and FolderTokenizer(folder).decode(ids) == PROMPT
    for form in ("srm", "transformers"):
        convert(folder, None, tmp_path / form, form=form)
        assert Text(tmp_path / form).encode([PROMPT]) == plain


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        in_sequence(),
        in_sequence({"type": "Fuse"}),
        in_sequence(BYTES, BYTES),
        in_sequence(BYTES, {"type": "Strip", "content": " ", "start": 1, "stop": 0}),
        {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True},
    ],
)
def test_all_refuse_the_same_tokenizers(decoder: dict[str, object] | None, tmp_path: Path) -> None:
    """Python, evaluation and training took what no server reads."""
    folder = changed(tmp_path / "model", decoder=decoder)
    readers = (
        lambda: Text(folder),
        lambda: FolderTokenizer(folder).encode(["a"]),
        lambda: read_tokenizer(folder / "tokenizer.json"),
        lambda: convert(folder, None, tmp_path / "srm"),
        lambda: convert(folder, None, tmp_path / "theirs", form="transformers"),
    )
    for read in readers:
        with pytest.raises(CheckpointError, match=r"only byte-level BPE .* its decoder is"):
            read()


def test_a_text_with_a_begin_token_gets_no_second(caplog: pytest.LogCaptureFixture) -> None:
    """A rendered chat did, and its log-probability was half of what it is."""
    text = Text(DEMO_MODEL)
    (plain,) = text.encode([PROMPT])
    assert text.encode([BEGIN + PROMPT, PROMPT]) == [plain, plain]
    assert len(text.encode([BEGIN, BEGIN + BEGIN])[1]) == 8, "those that it has itself stay"
    assert text.encode([BEGIN + PROMPT], adds_special=False) == [plain]
    assert FolderTokenizer(DEMO_MODEL).encode([BEGIN + PROMPT])[0].tobytes() == plain
    line = json.dumps({"prompt": BEGIN + PROMPT}).encode()
    assert parse(line, 1, text).token_ids == plain
    reports = [message for message in caplog.messages if "no second" in message]
    assert len(reports) == 2, "once for each tokenizer"
    given = json.dumps({"prompt": [0, 0, 5]}).encode()
    assert len(parse(given, 1, text).token_ids) == 12, "token ids are taken as they are"


def test_tokens_behind_a_text_are_added_once(tmp_path: Path) -> None:
    tokens = {BEGIN: 0, END: 1}
    around = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": BEGIN, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": END, "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            name: {"id": name, "ids": [number], "tokens": [name]} for name, number in tokens.items()
        },
    }
    text = Text(changed(tmp_path, post_processor=around))
    whole = text.encode(["hi", BEGIN + "hi", "hi" + END, BEGIN + "hi" + END])
    assert len({*whole}) == 1 and memoryview(whole[0]).cast("i").tolist()[-1] == 1
    assert text.encode([""]) == [bytes([0, 0, 0, 0, 1, 0, 0, 0])]


def test_a_begin_token_that_the_folder_adds_is_added_once(tmp_path: Path) -> None:
    """Training put it before texts, and the server did not."""
    expected = Text(DEMO_MODEL).encode([PROMPT])
    folder = changed(tmp_path / "model", post_processor=None)
    assert Text(folder).encode([PROMPT]) != expected
    described = {"add_bos_token": True, "bos_token": BEGIN}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        assert Text(folder).encode([PROMPT, BEGIN + PROMPT]) == expected * 2
        assert FolderTokenizer(folder).encode([PROMPT])[0].tobytes() == expected[0]
        (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": BEGIN}))
        (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
        assert name
    whole = changed(tmp_path / "whole")  # its post-processor adds it too
    (whole / "tokenizer_config.json").write_text(json.dumps(described))
    assert Text(whole).encode([PROMPT]) == expected
    (folder / "special_tokens_map.json").write_text("{}")
    with pytest.raises(CheckpointError, match="adds a begin token, None, that its tokenizer has"):
        Text(folder)


def test_documents_keep_their_own_begin_and_end_tokens(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(DEMO_MODEL / "tokenizer.json")
    end = special_ids(tokenizer).end
    texts = ["a cat", f"{BEGIN}a cat{END}"]
    _, ids = token_file(tmp_path / "ids", "", lambda: texts, tokenizer, end)
    half = len(ids) // 2
    assert ids[:half].tolist() == ids[half:].tolist()
